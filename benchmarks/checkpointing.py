"""Gradient checkpointing on the original NeRF: memory and time with and without it, and a batch that only it can train.

    python benchmarks/checkpointing.py DATA --budget 4 --output benchmarks/results/h200/checkpointing.json
    python benchmarks/checkpointing.py builtin:toybox --device cpu --downscale 2 --batch 4096 --budget 1   # to try it

Batches double, from `--batch` on, until training runs out of `--budget` GB, or at 8 times what fitted without: on a GPU
the allocator is told to refuse more than that, on a CPU the growth of the process counts. Milliseconds a step are those
of training as it runs (on a GPU a recorded graph), memory is its peak beside the pictures.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.bench.tune import LARGEST_BATCH, peak_memory, with_batch
from nerfturbo.config import Config
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.errors import is_out_of_memory
from nerfturbo.presets import preset
from nerfturbo.training.trainer import Trainer

WARM_STEPS = 16


def trial(config: Config, scene: Scene, device: torch.device, budget: float) -> dict[str, Any]:
    """A few steps of training, or the reason why there are none."""
    row: dict[str, Any] = {"checkpointing": config.train.checkpointing, "batch_samples": config.train.batch_samples}
    try:
        with peak_memory(device, count=True) as peak:
            trainer = Trainer(config, scene, device=device)
            trainer.begin()
            while trainer.step < WARM_STEPS:
                trainer.advance(WARM_STEPS - trainer.step)
            trainer.end()
        before = trainer.train_seconds
        summary = trainer.fit()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return row | {"fits": False, "why": str(error).splitlines()[0]}
    pictures = 0 if trainer.pixels.on_host or device.type == "cpu" else trainer.pixels.scene.images.pixels.nbytes
    n_bytes = None if peak.n_bytes is None else peak.n_bytes - pictures
    step_ms = 1e3 * (summary.train_seconds - before) / (summary.steps - WARM_STEPS)
    fits = n_bytes is None or n_bytes <= budget
    why = "" if fits else f"took {(n_bytes or 0) / 1e6:.0f} MB of {budget / 1e6:.0f} MB"
    return row | {"fits": fits, "why": why, "step_ms": step_ms, "peak_bytes": n_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=4.0, help="GB")
    parser.add_argument("--batch", type=int, default=1 << 15, help="samples of the first try")
    parser.add_argument("--steps", type=int, default=96, help="of each try, after the warm-up")
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path("checkpointing.json"))
    args = parser.parse_args()
    device, budget = torch.device(args.device), args.budget * 1e9
    scene = load_scene(args.data, "train", downscale=args.downscale)
    base = preset("vanilla", device.type)
    base = replace(base, field=replace(base.field, width=args.width))
    base = replace(base, grid=replace(base.grid, cull_unseen=False))  # fog takes long to look through
    base = replace(base, train=replace(base.train, steps=WARM_STEPS + args.steps))
    if device.type == "cuda":
        room = budget + scene.images.pixels.nbytes
        index = torch.cuda.current_device() if device.index is None else device.index  # it takes no device without one
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.mem_get_info(index)[1]), index)
    rows, limit = [], {}
    for checkpointing in (False, True):
        batch = args.batch
        while batch <= min(LARGEST_BATCH, 8 * limit.get(False, LARGEST_BATCH)):
            config = with_batch(base, batch)
            config = replace(config, train=replace(config.train, checkpointing=checkpointing))
            rows.append(trial(config, scene, device, budget))
            print(rows[-1], flush=True)
            if not rows[-1]["fits"]:
                break
            limit[checkpointing], batch = batch, batch * 2
    values = {
        "scene": scene.name,
        "width": args.width,
        "budget_bytes": budget,
        "largest_batch": {"plain": limit.get(False), "checkpointed": limit.get(True)},
        "rows": rows,
    }
    record = Record("gradient checkpointing on the original NeRF", __doc__ or "", 0, values, machine(args.device))
    print(write_json(args.output, record))


if __name__ == "__main__":
    main()
