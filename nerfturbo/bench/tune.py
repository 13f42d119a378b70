"""Find what fits this scene on this machine: the largest batch for the memory, and a learning rate by a range test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..config import Config
from ..data.scene import Scene
from ..training.trainer import Trainer
from .continued import fit_whole
from .memory import BatchTrial, best_trial, largest_batch, with_batch

SMOOTHING = 0.9
RANGE = (1.0 / 100.0, 30.0)  # of the config's learning rate: where the test begins and ends
DIVERGED = 4.0  # times the least loss: past this the test need not go on
SAFETY = 4.0  # the learning rate with the least loss is already too large, by about this
CANDIDATES = (0.5, 1.0, 2.0)  # around the suggestion, each tried by a short training


@dataclass(frozen=True)
class RatePoint:
    """One step of the range test: the smoothed loss there."""

    learning_rate: float
    loss: float


@dataclass(frozen=True)
class Candidate:
    """A short training with one learning rate."""

    learning_rate: float
    mse: float  # mean of the last quarter of its steps
    skipped: int


@dataclass(frozen=True)
class Tuned:
    """What was found, and how."""

    config: Config
    batch_trials: tuple[BatchTrial, ...]
    rates: tuple[RatePoint, ...]
    candidates: tuple[Candidate, ...]


def range_test(config: Config, scene: Scene, *, device: torch.device, steps: int) -> list[RatePoint]:
    """Train while the learning rate rises exponentially from far too small to far too large."""
    low, high = (config.optim.lr * factor for factor in RANGE)
    config = replace(config, train=replace(config.train, steps=steps, time_limit=None, coarse_fraction=0.0))
    trainer = Trainer(config, scene, device=device)
    points: list[RatePoint] = []
    mean, weight, step = 0.0, 0.0, 0
    while step < steps:
        rate = low * (high / low) ** (step / max(1, steps - 1))
        trainer.stepper.set_learning_rate(rate)
        record = trainer.stepper.advance(step, 1)
        step = record.step
        if not math.isfinite(record.loss):
            break
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * record.loss, SMOOTHING * weight + (1 - SMOOTHING)
        points.append(RatePoint(rate, mean / weight))
        if points[-1].loss > DIVERGED * min(point.loss for point in points):
            break
    trainer.stepper.finish()
    return points


def suggested_rate(points: list[RatePoint], fallback: float) -> float:
    """A quarter of the learning rate at which the loss was least.

    >>> suggested_rate([RatePoint(0.001, 1.0), RatePoint(0.01, 0.5), RatePoint(0.1, 0.9)], 1.0)
    0.0025
    """
    if len(points) < 2:
        return fallback
    return min(points, key=lambda point: point.loss).learning_rate / SAFETY


def try_rate(config: Config, scene: Scene, rate: float, *, device: torch.device, steps: int) -> Candidate:
    """A short training with the whole schedule, as a real one would be."""
    train = replace(config.train, steps=steps, time_limit=None)
    optim = replace(config.optim, lr=rate, warmup_steps=min(config.optim.warmup_steps, steps // 5))
    errors: list[float] = []
    trainer = Trainer(replace(config, train=train, optim=optim), scene, device=device)
    trainer.callbacks.append(lambda _, record: errors.append(record.mse))
    fit_whole(trainer)
    last = errors[-max(1, len(errors) // 4) :]
    mse = sum(last) / len(last)
    return Candidate(rate, mse if math.isfinite(mse) else math.inf, trainer.skipped)


def tune(
    config: Config,
    scene: Scene,
    *,
    device: torch.device,
    budget: int,
    most: int,
    steps: int,
    say: Callable[[str], None],
) -> Tuned:
    """The largest stable batch within `budget` bytes and at most `most` samples, then a learning rate for it."""

    def said(trial: BatchTrial) -> None:
        size = "" if trial.n_bytes is None else f", {trial.n_bytes / 1e6:.0f} MB"
        say(f"batch of {trial.batch_samples} samples: {'fits' + size if trial.fits else trial.why}")

    trials = largest_batch(config, scene, device=device, budget=budget, most=most, report=said)
    best = best_trial(trials)
    if best is not None:
        config = with_batch(config, best.batch_samples)
    points = range_test(config, scene, device=device, steps=steps)
    suggestion = suggested_rate(points, config.optim.lr)
    say(f"range test over {len(points)} steps suggests a learning rate of {suggestion:.3g}")
    rates = sorted({*(suggestion * factor for factor in CANDIDATES), config.optim.lr})
    candidates = []
    for rate in rates:
        candidates.append(try_rate(config, scene, rate, device=device, steps=steps))
        say(f"learning rate {rate:.3g}: error {candidates[-1].mse:.3g} after {steps} steps")
    chosen = min(candidates, key=lambda candidate: candidate.mse)
    tuned = replace(config, optim=replace(config.optim, lr=chosen.learning_rate))
    return Tuned(tuned, tuple(trials), tuple(points), tuple(candidates))
