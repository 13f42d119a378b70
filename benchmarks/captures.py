"""Variants of a preset over several captures, on views held out of their training pictures: what helps all of them.

    python benchmarks/captures.py DATA OUTPUT.json --preset proposal-cpu --steps 800 --seeds 0 1 \
        --scenes ngp/fruit:4 ngp/fox:8 colmap/beer:4 llff/fern:2 --variants "" "optim.table-decay=0.1"

A scene is a folder under DATA and, after a colon, how many times smaller its pictures are. A variant is a string of
values on top of the preset ("" for the preset itself). Every tenth training picture is held out and scored; test views
are for results, not for choices. OUTPUT.json is renewed after every training, and what it has already is not trained
again. --pictures keeps a sheet of each training: the held-out pictures, and below them the renders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config
from nerfturbo.data.images import save_image
from nerfturbo.data.scene import Scene, hold_out, load_scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.training import Trainer
from quality import variant


def run(config: Config, scenes: tuple[Scene, Scene], device: str, views: int | None) -> tuple[dict[str, Any], Any]:
    """One training: its values, and a sheet of the truth above the renders."""
    begun, worked = time.perf_counter(), time.process_time()
    trainer = Trainer(config, scenes[0], device=device)
    errors: list[float] = []
    trainer.callbacks.append(lambda _, record: errors.append(record.mse))
    trainer.fit()
    spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - worked}
    late = errors[-max(1, len(errors) // 10) :]
    columns: list[torch.Tensor] = []
    with trainer.optimizer.averaged():
        scores = evaluate(
            trainer.model.eval(),
            scenes[1],
            views=choose_views(len(scenes[1]), views),
            with_ssim=False,
            on_view=lambda _done, _all, _score, image, truth: columns.append(torch.cat((truth, image.rgb)).cpu()),
        )
    values = {
        "steps": trainer.step,
        **spent,
        "training_psnr": -10.0 * torch.tensor(statistics.fmean(late)).log10().item(),
        "psnr": scores.psnr,
        "views": {str(view.index): view.psnr for view in scores.views},
    }
    return values, torch.cat(columns, dim=1).clamp(0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--scenes", nargs="+", required=True)
    parser.add_argument("--variants", nargs="+", default=[""])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--views", type=int, help="of the held-out pictures; all unless given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.output.read_text())["values"] if options.output.is_file() else []
    for scene in options.scenes:
        name, _, downscale = scene.partition(":")
        whole = load_scene(options.data / name, "train", downscale=int(downscale or 1))
        scenes = hold_out(whole, options.every)
        base, _ = fitted_config(preset(options.preset, options.device), scenes[0])
        resolution = whole.cameras.size[0].tolist()
        for flags, seed in ((flags, seed) for flags in options.variants for seed in options.seeds):
            row = {"scene": name, "resolution": resolution, "preset": options.preset, "flags": flags, "seed": seed}
            if any(row.items() <= done.items() and done["steps"] == options.steps for done in rows):
                continue
            config = variant(base, flags)
            config = replace(config, train=replace(config.train, steps=options.steps, seed=seed))
            values, sheet = run(config, scenes, options.device, options.views)
            rows.append(row | values)
            print(rows[-1], flush=True)
            if options.pictures is not None:
                words = "_".join((name.replace("/", "-"), flags.replace(" ", "_") or "base", str(seed)))
                options.pictures.mkdir(parents=True, exist_ok=True)
                save_image(options.pictures / f"{words}.png", sheet)
            protocol = (
                f"each {options.every}th training view held out and scored, all that counts of it; the same number of "
                "steps for all rows of a scene; training_psnr: mean error of the last tenth of the steps"
            )
            what = f"real captures: variants of preset {options.preset}"
            write_json(options.output, Record(what, protocol, options.seeds[0], rows, machine(options.device)))


if __name__ == "__main__":
    main()
