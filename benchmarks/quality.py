"""Variants of a preset on views held out of the training pictures: what generalises, and what it costs.

    python benchmarks/quality.py lego --preset ngp --seconds 10 --out quality.json \
        "" "optim.table-decay=0.1" "loss.distortion=1e-3 sampler.merge-weak-samples=0.02 field.anti-alias"
    python benchmarks/quality.py fox --steps 3000 --out thin.json "" "sampler.merge-weak-samples=0.02"

Each variant is a string of values on top of the preset ("" for the preset itself; lists as 64,64). All see every
training picture but each tenth (`--every`), on which they are scored: test views are not for choices. With `--seconds`
every variant trains so long by the clock, with `--steps` so many steps, with `--test` on all training pictures and
scored on the test views instead. A trained variant is rendered in training's steps, in finer ones and with four rays a
pixel. Kernels compile before the clock.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.bench.tune import peak_memory
from nerfturbo.cli.flags import parse
from nerfturbo.cli.settings import Settings
from nerfturbo.config import Config
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene, hold_out, load_scene, open_scenes
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.training import Trainer

PICTURES = {"": {}, "refine 2": {"eval_refine": 2}, "refine 4": {"eval_refine": 4}, "4 rays": {"eval_rays": 2}}


def variant(base: Config, flags: str) -> Config:
    """The preset with the flags of one variant."""
    words = [part for word in flags.split() for part in f"--{word}".replace(",", "=").split("=")]
    return parse(Settings, words, "quality", default=Settings.of(base)).apply(base)


def run(config: Config, scenes: tuple[Scene, Scene], device: str, pictures: list[str], views: int) -> dict[str, Any]:
    with peak_memory(torch.device(device)) as peak:
        trainer = Trainer(config, scenes[0], device=device)
        seen: list[tuple[int, int, int]] = []
        trainer.callbacks.append(lambda _, record: seen.append((record.n_rays, record.n_samples, record.n_marched)))
        errors: list[float] = []
        trainer.callbacks.append(lambda _, record: errors.append(record.mse))
        summary = trainer.fit()
    late = seen[-max(1, len(seen) // 10) :]
    rays, samples, marched = (sum(column) / len(late) for column in zip(*late, strict=True))
    error = sum(errors[-len(late) :]) / len(late)
    values: dict[str, Any] = {
        "seconds": summary.train_seconds,
        "steps": trainer.step,
        "peak_bytes": peak.n_bytes,
        "rays_per_step": rays,
        "samples_per_ray": samples / max(rays, 1),
        "marched_per_ray": marched / max(rays, 1),
        "training_psnr": -10.0 * torch.tensor(error).log10().item(),
        "skipped": trainer.skipped,
        "psnr": {},
    }
    chosen = choose_views(len(scenes[1]), views)
    with trainer.optimizer.averaged():
        model = trainer.model.eval()
        for name in pictures:
            model.config = replace(config, render=replace(config.render, **PICTURES[name]))
            scores = evaluate(model, scenes[1], views=chosen, with_ssim=not name)
            values["psnr"][name or "as configured"] = scores.psnr
            values["ssim"] = scores.ssim if not name else values.get("ssim")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene")
    parser.add_argument("variants", nargs="*", default=[""], help="values on top of the preset")
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--views", type=int, default=10)
    parser.add_argument("--pictures", nargs="*", default=list(PICTURES), choices=list(PICTURES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_intermixed_args()
    if options.test:
        scenes = open_scenes(options.scene, LoadOptions(options.downscale))
    else:
        scenes = hold_out(load_scene(options.scene, "train", downscale=options.downscale), options.every)
    base, _ = fitted_config(preset(options.preset, options.device), scenes[0])
    limits = {"time_limit": options.seconds, "steps": options.steps or 10**9, "seed": options.seed}
    rows = []
    for flags in options.variants:
        config = variant(base, flags)
        config = replace(config, train=replace(config.train, **limits))
        try:
            rows.append({"flags": flags, **run(config, scenes, options.device, options.pictures, options.views)})
        except (RuntimeError, ValueError) as error:  # one that does not fit must not cost the others
            rows.append({"flags": flags, "error": f"{type(error).__name__}: {error}"})
        print(rows[-1], flush=True)
        record = Record(
            what=f"{scenes[0].name}: variants of preset {base.preset}",
            protocol=(
                f"{'test views' if options.test else f'each {options.every}th training view held out'}, "
                f"{len(choose_views(len(scenes[1]), options.views))} views, white background; trained for "
                f"{options.seconds} s or {options.steps} steps; per ray: mean of the last tenth"
            ),
            seed=options.seed,
            values=rows,
            machine=machine(options.device),
        )
        write_json(options.out, record)


if __name__ == "__main__":
    main()
