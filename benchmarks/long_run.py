"""Long runs: no value may stop being finite, and memory must stay flat, over many steps and over many trainers.

    python benchmarks/long_run.py SCENE --presets ngp proposal vanilla --trainers 50 --output long_run.json

Writes, ten times a run, the mean squared error, the loss scale, the number of skipped steps and the memory in use; then
the memory after each of several trainers that are made, trained for a few steps and dropped in one process. What was
measured before a run is cut short is kept.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nerfturbo import Scene, Trainer, load_scene, preset
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.training.step import StepRecord

PARTS = 10
PROTOCOL = (
    "ten times a run: last mean squared error, loss scale, steps skipped because a gradient was not finite, bytes of "
    "the GPU in use and of the process (resident); trainers: the same bytes after each was dropped, GPU cache emptied"
)


def bytes_in_use() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return {"gpu_bytes": gpu, "process_bytes": pages * 4096}


def long_run(scene: Scene, name: str, steps: int, device: str, keep: Callable[[dict[str, Any]], None]) -> None:
    config = preset(name, device)
    trainer = Trainer(replace(config, train=replace(config.train, steps=steps)), scene, device=device)
    rows: list[dict[str, float | int]] = []
    run = {"preset": name, "precision": config.train.precision, "steps": 0, "all_weights_finite": True, "rows": rows}

    def look(trainer: Trainer, record: StepRecord) -> None:
        if not math.isfinite(record.loss):
            raise SystemExit(f"{name}, step {record.step}: the loss is {record.loss}")
        if trainer.step * PARTS // steps > len(rows):
            row: dict[str, float | int] = {"step": trainer.step, "seconds": round(trainer.train_seconds, 2)}
            row |= {"mse": record.mse, "loss_scale": float(trainer.optimizer.scale)}
            rows.append(row | {"skipped": int(trainer.optimizer.skipped)} | bytes_in_use())
            print(name, rows[-1], flush=True)
            if not all(bool(torch.isfinite(buffer.values).all()) for buffer in trainer.optimizer.buffers):
                raise SystemExit(f"{name}, step {trainer.step}: a weight is not finite")
            keep(run | {"steps": trainer.step})

    trainer.callbacks.append(look)
    trainer.fit()


def many_trainers(scene: Scene, count: int, device: str, keep: Callable[[dict[str, int]], None]) -> None:
    for number in range(count):
        config = preset("ngp", device)
        Trainer(replace(config, train=replace(config.train, steps=64)), scene, device=device).fit()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        keep(row := bytes_in_use())
        print("trainer", number + 1, row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene")
    parser.add_argument("--presets", nargs="*", default=["ngp", "proposal", "vanilla"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--trainers", type=int, default=0, help="so many made and dropped, at the end")
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("long_run.json"))
    args = parser.parse_args()
    scene = load_scene(args.scene, "train", downscale=args.downscale)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values: dict[str, Any] = {"runs": [], "trainers": []}

    def keep(name: str, row: dict[str, Any]) -> None:
        same = [old for old in values[name] if name == "runs" and old["preset"] == row["preset"]]
        values[name] = [old for old in values[name] if old not in same] + [row]
        what = f"{scene.name}: long runs without a non-finite value, and trainers made and dropped"
        write_json(args.output, Record(what, PROTOCOL, 0, values, machine=machine(device)))

    for name in args.presets:
        long_run(scene, name, args.steps, device, partial(keep, "runs"))
    many_trainers(scene, args.trainers, device, partial(keep, "trainers"))


if __name__ == "__main__":
    main()
