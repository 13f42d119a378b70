"""Callbacks: plain functions of (trainer, record), combined by `every` and `every_seconds`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..ops.positions import ray_aabb
from ..sampling.contracted_grid import ContractedGrid
from .checkpoint import KEEP
from .loggers import Logger, jsonl_logger
from .step import StepRecord
from .trainer import Callback, Trainer

LOG = logging.getLogger("nerfturbo")
Score = Callable[[Trainer], float | None]


def every(n_steps: int, callback: Callback) -> Callback:
    """Run a callback after every n-th step (or soon after, where several steps run at once)."""
    due = n_steps

    def run(trainer: Trainer, record: StepRecord) -> None:
        nonlocal due
        if record.step >= due:
            callback(trainer, record)
            due = (record.step // n_steps + 1) * n_steps

    return run


def every_seconds(seconds: float, callback: Callback) -> Callback:
    """Run a callback when this much wall-clock time has passed since its last run."""
    last = time.monotonic()

    def run(trainer: Trainer, record: StepRecord) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            callback(trainer, record)
            last = time.monotonic()

    return run


def save_checkpoints(folder: Path, *, keep: int = KEEP, score: Score | None = None) -> Callback:
    """Save; the newest `keep` stay, and the best by `score`. A save that fails is said, and training goes on."""

    def run(trainer: Trainer, record: StepRecord) -> None:
        with trainer.clock_stopped():
            value = None if score is None else score(trainer)
            try:
                trainer.save(folder, score=value, keep=keep)
            except CheckpointError as error:
                LOG.warning("%s; training goes on", error)

    return run


def stop_at_psnr(target: float, score: Score) -> Callback:
    """End training once `score` reaches a PSNR; usually inside `every` or `every_seconds`."""

    def run(trainer: Trainer, record: StepRecord) -> None:
        with trainer.clock_stopped(), trainer.optimizer.averaged():
            value = score(trainer)
        if value is not None and value >= target:
            trainer.stop("target psnr")

    return run


class MetricsLog:
    """Turns step results into records: one JSON line each, kept in memory for the display and the report."""

    def __init__(self, path: Path | None = None, *, every_steps: int = 20, loggers: Sequence[Logger] = ()) -> None:
        self.every_steps = every_steps
        self.monitor: Callable[[], dict[str, float]] | None = None  # of the GPU; its numbers go into every step's entry
        self.loggers = [*([] if path is None else [jsonl_logger(path)]), *loggers]
        self.records: list[dict[str, Any]] = []
        self._last: tuple[float, int, int] = (0.0, 0, 0)
        self._mse: float | None = None
        self._due = 1

    def start(self, trainer: Trainer) -> None:
        """Count rates from here on: for a run that was resumed."""
        self._last = (trainer.train_seconds, trainer.rays, trainer.samples)

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        self._mse = record.mse if self._mse is None else 0.95 * self._mse + 0.05 * record.mse
        if record.step < self._due:
            return
        self._due = (record.step // self.every_steps + 1) * self.every_steps
        now, (seconds, rays, samples) = trainer.train_seconds, self._last  # read once, for what follows may wait
        elapsed = max(now - seconds, 1e-9)
        entry = {
            "kind": "step",
            "step": trainer.step,
            "seconds": round(now, 4),
            "loss": record.loss,
            "psnr": round(-10.0 * math.log10(max(self._mse, 1e-12)), 3),
            "rays_per_second": round((trainer.rays - rays) / elapsed),
            "samples_per_second": round((trainer.samples - samples) / elapsed),
            "occupied_fraction": round(float(trainer.model.grid.occupied_fraction()), 5),
            "learning_rate": trainer.optimizer.learning_rate,
            "n_rays": record.n_rays,
            "n_samples": record.n_samples,
            "gradient_norm": float(trainer.optimizer.gradient_norm) / record.loss_scale,
            "loss_scale": record.loss_scale,
            "skipped": trainer.skipped,
        } | ({} if self.monitor is None else self.monitor())
        self._last = (now, trainer.rays, trainer.samples)
        self._write(entry)

    def add_preview(self, trainer: Trainer, psnr: float, image: Path | None = None) -> None:
        """Record the score of a test view that was rendered on the way, and where its picture lies."""
        entry = {"kind": "preview", "step": trainer.step, "seconds": round(trainer.train_seconds, 4)}
        self._write(entry | {"psnr": round(psnr, 3)} | ({} if image is None else {"image": str(image)}))

    def add_event(self, trainer: Trainer, text: str) -> None:
        """Record something that happened once, in words."""
        entry = {"kind": "event", "step": trainer.step, "seconds": round(trainer.train_seconds, 4)}
        self._write(entry | {"text": text})

    def _write(self, entry: dict[str, Any]) -> None:
        self.records.append(entry)
        for logger in self.loggers:
            logger(entry)


def skipped_fraction(trainer: Trainer, record: StepRecord) -> float | None:
    """Share of the uniform lattice inside the box that the last step did not have to train on; None where there is no
    lattice, because an estimator places a fixed number of samples."""
    model = trainer.model
    if isinstance(model.proposer, ContractedGrid):
        return max(0.0, 1.0 - record.n_samples / max(1, record.n_rays * model.proposer.n_samples))
    if model.proposer is not None:
        return None
    batch = trainer.sampler.draw(trainer.step - 1, max(1, record.n_rays))
    t_min, t_max = ray_aabb(
        batch.rays.origins,
        batch.rays.directions,
        model.grid.outer_aabb,
        near=model.bounds.near,
        far=model.bounds.far,
    )
    uniform = float((t_max - t_min).sum()) / model.grid.step_size
    return max(0.0, 1.0 - record.n_samples / max(uniform, 1.0))
