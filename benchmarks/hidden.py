"""What hiding unseen cells does: one run, then its grid emptied by stricter and stricter rules.

    python benchmarks/hidden.py DATA OUT.json [--seconds 55] [--preset dynamic] [--split val]

LIGHT of a ray must be left where it shows a cell, ALPHA is the least opacity there, GROWN counts the cells kept around.
The rule is chosen by the training pictures, which must not change; the other split shows what it brings.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.sampling.geometry import dilate
from nerfturbo.training import Trainer, refine

RULES = ((0.02, 0.005, 1), (0.1, 0.01, 1), (0.3, 0.02, 1), (0.02, 0.005, 0), (0.1, 0.01, 0), (0.3, 0.02, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--preset", default="dynamic")
    parser.add_argument("--split", default="val")
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train, other = (load_scene(args.data, split, downscale=args.downscale) for split in ("train", args.split))
    config = preset(args.preset, args.device)
    config = replace(config, grid=replace(config.grid, cull_unseen=False))
    trainer = Trainer.for_scene(train, config, device=args.device, time_limit=args.seconds)
    summary = trainer.fit()
    model, rows = trainer.model.eval(), []

    def score(scene: Scene, views: int) -> float:
        return evaluate(model, scene, views=choose_views(len(scene), views), with_ssim=False).psnr

    with trainer.optimizer.averaged():
        learned = model.grid.bits.clone()
        scores = {"psnr": score(other, 20), "training_psnr": score(train, 8)}
        rows.append({"rule": "none", "hidden": 0.0, **scores, "steps": summary.steps})
        print(rows[-1], flush=True)
        for light, alpha, cells in RULES:
            model.grid.bits.copy_(learned)
            rule = {"LIGHT": light, "ALPHA": alpha, "dilate": lambda shown, _, n=cells: dilate(shown, n)}
            begun = time.perf_counter()
            with patch.multiple(refine, **rule):
                share = refine.cull_unseen(model, trainer.pixels)
            taken = time.perf_counter() - begun
            name = f"light {light}, alpha {alpha}, {cells} cells around"
            scores = {"psnr": score(other, 20), "training_psnr": score(train, 8)}
            rows.append({"rule": name, "hidden": share, **scores, "seconds": taken})
            print(json.dumps(rows[-1]), flush=True)
    protocol = f"{args.seconds} s of preset {args.preset}; psnr: {args.split} split; hidden: share of occupied cells"
    seed = config.train.seed
    write_json(args.output, Record("cells that no picture shows", protocol, seed, rows, machine=machine(args.device)))


if __name__ == "__main__":
    main()
