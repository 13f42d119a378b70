"""A long run: no value of it may stop being finite.

    python benchmarks/long_run.py SCENE benchmarks/results/h200/long_run.json [STEPS]

Writes, every 10,000 steps, the mean squared error, the loss scale and the number of skipped steps.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from nerfturbo import Trainer, load_scene, preset
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.training.step import StepRecord

EVERY = 10_000


def main() -> None:
    scene, output = load_scene(sys.argv[1], "train"), Path(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = preset("auto", device)
    trainer = Trainer(replace(config, train=replace(config.train, steps=steps)), scene, device=device)
    rows: list[dict[str, float | int | str]] = []
    every = min(EVERY, steps)

    def look(trainer: Trainer, record: StepRecord) -> None:
        if not math.isfinite(record.loss):
            raise SystemExit(f"step {record.step}: the loss is {record.loss}")
        if trainer.step // every > len(rows):
            rows.append(
                {
                    "step": trainer.step,
                    "seconds": round(trainer.train_seconds, 2),
                    "mse": record.mse,
                    "loss_scale": float(trainer.optimizer.scale),
                    "skipped": int(trainer.optimizer.skipped),
                }
            )
            print(rows[-1], flush=True)

    trainer.callbacks.append(look)
    trainer.fit()
    finite = all(bool(torch.isfinite(buffer.values).all()) for buffer in trainer.optimizer.buffers)
    protocol = (
        "every 10,000 steps: last mean squared error, loss scale, steps skipped because a gradient was not finite; "
        "all weights finite"
    )
    values = {"steps": trainer.step, "all_weights_finite": finite, "rows": rows}
    what = f"{scene.name}: a long run, without a non-finite value"
    write_json(output, Record(what, protocol, config.train.seed, values, machine=machine(device)))
    if not finite:
        raise SystemExit("a weight is not finite")


if __name__ == "__main__":
    main()
