"""Callbacks: plain functions of (trainer, result), combined by `every` and `every_seconds`."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from ..ops.aabb import ray_aabb
from .step import StepResult
from .trainer import Callback, Trainer


def every(n_steps: int, callback: Callback) -> Callback:
    """Run a callback after every n-th step."""

    def run(trainer: Trainer, result: StepResult) -> None:
        if trainer.step % n_steps == 0:
            callback(trainer, result)

    return run


def every_seconds(seconds: float, callback: Callback) -> Callback:
    """Run a callback when this much wall-clock time has passed since its last run."""
    last = time.monotonic()

    def run(trainer: Trainer, result: StepResult) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            callback(trainer, result)
            last = time.monotonic()

    return run


def save_checkpoints(folder: Path) -> Callback:
    def run(trainer: Trainer, result: StepResult) -> None:
        with trainer.clock_stopped():
            trainer.save(folder)

    return run


class MetricsLog:
    """Turns step results into records: one JSON line each, kept in memory for the display and the report."""

    def __init__(self, path: Path | None = None, *, every_steps: int = 20) -> None:
        self.path, self.every_steps = path, every_steps
        self.records: list[dict[str, Any]] = []
        self._last: tuple[float, int, int] = (0.0, 0, 0)
        self._mse: float | None = None

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step % self.every_steps and trainer.step != 1:
            return
        mse = float(result.mse)
        self._mse = mse if self._mse is None else 0.8 * self._mse + 0.2 * mse
        seconds, rays, samples = self._last
        elapsed = max(trainer.train_seconds - seconds, 1e-9)
        record = {
            "step": trainer.step,
            "seconds": round(trainer.train_seconds, 4),
            "loss": float(result.loss.detach()),
            "psnr": round(-10.0 * math.log10(max(self._mse, 1e-12)), 3),
            "rays_per_second": round((trainer.rays - rays) / elapsed),
            "samples_per_second": round((trainer.samples - samples) / elapsed),
            "occupied_fraction": round(float(trainer.model.grid.occupied_fraction()), 5),
            "learning_rate": float(trainer.optimizer.param_groups[0]["lr"]),
            "n_rays": int(result.n_rays),
            "n_samples": int(result.n_samples),
        }
        self._last = (trainer.train_seconds, trainer.rays, trainer.samples)
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def skipped_fraction(trainer: Trainer, result: StepResult) -> float:
    """Share of the uniform lattice inside the box that the last step did not have to train on."""
    model = trainer.model
    batch = trainer.sampler.draw(trainer.step - 1, max(1, int(result.n_rays)))
    t_min, t_max = ray_aabb(
        batch.rays.origins,
        batch.rays.directions,
        model.grid.outer_aabb,
        near=model.bounds.near,
        far=model.bounds.far,
    )
    uniform = float((t_max - t_min).sum()) / model.grid.step_size
    return 1.0 - float(result.n_samples) / max(uniform, 1.0)
