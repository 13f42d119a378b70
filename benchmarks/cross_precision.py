"""Train in one precision and score in each: is a difference made by the training or by the pictures?

    python benchmarks/cross_precision.py lego 10000 cross.json "0|fp16|optim.lr=2e-3" "0|tf32|"

A job is `SEED|PRECISION|FLAGS`: fp32, tf32, fp16 or bf16, and values on top of preset vanilla. Each tenth training view
is held out and scored.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fine_samples import matmul_precision
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config
from nerfturbo.data.scene import Scene, hold_out, load_scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.training import Trainer
from quality import variant

SCORED_IN = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def run(config: Config, scenes: tuple[Scene, Scene], device: str) -> dict[str, Any]:
    trainer = Trainer(config, scenes[0], device=device)
    summary = trainer.fit()
    views = choose_views(len(scenes[1]), 10)

    def score() -> float:
        return evaluate(trainer.model, scenes[1], views=views, with_ssim=False).psnr

    values: dict[str, Any] = {
        "seconds": summary.train_seconds,
        "skipped": trainer.skipped,
        "rays": summary.rays / max(trainer.step, 1),
        "samples_per_ray": summary.samples / max(summary.rays, 1),
        "psnr": score(),
        "psnr_scored_in": {},
    }
    halves: list[Any] = [module for module in trainer.model.modules() if hasattr(module, "compute_dtype")]
    for name, dtype in SCORED_IN.items():
        for module in halves:
            module.compute_dtype = dtype
        values["psnr_scored_in"][name] = score()
    return values


def main() -> None:
    scene, steps, out, *jobs = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scenes = hold_out(load_scene(scene, "train"), 10)
    base, _ = fitted_config(preset("vanilla", device), scenes[0])
    rows: list[dict[str, Any]] = []
    for job in jobs:
        seed, kind, flags = job.split("|")
        config = variant(base, flags)
        precision = "fp32" if kind == "tf32" else kind
        config = replace(config, train=replace(config.train, steps=int(steps), seed=int(seed), precision=precision))
        with matmul_precision("tf32" if kind == "tf32" else "ieee"):
            rows.append({"seed": int(seed), "kind": kind, "flags": flags, **run(config, scenes, device)})
        print(rows[-1], flush=True)
        what = f"{scenes[0].name}: the original NeRF trained in one precision, scored in each"
        protocol = f"each 10th training view held out, 10 views at most, {steps} steps"
        write_json(Path(out), Record(what, protocol, rows[0]["seed"], rows, machine=machine(device)))


if __name__ == "__main__":
    main()
