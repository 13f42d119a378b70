"""The step of training with a clock at its stages: what `nerfturbo profile` runs.

There is no second list of what a step does: the trainer's own eager step runs, and the clock is turned where one stage
ends and the next begins. Every moment belongs to one stage or to none, so that the stages and the rest add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..rendering.model import NerfModel
from ..training.loss import Stages, StepResult
from ..training.step import TrainingStep
from ..training.trainer import Trainer

PREFIX = "nerfturbo: "  # of the stages' names in a trace
STAGES = ("rays", "march", "field", "composite", "backward", "optimizer", "grid", "host")


class StageClock:
    """Sums time and peak memory by stage. A stage inside another stops the outer one for as long as it lasts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.peaks: dict[str, int] = {}
        self.now: str | None = None
        self._range: torch.profiler.record_function | None = None
        self._begun, self._before = 0.0, 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, time counts for this stage; afterwards for the one before again."""
        outer = self.now
        self.turn(name)
        try:
            yield
        finally:
            self.turn(outer)

    def turn(self, name: str | None) -> None:
        """From now on time counts for this stage, or for none."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        if self.now is not None and self._range is not None:
            self.seconds[self.now] += time.perf_counter() - self._begun
            self._range.__exit__(None, None, None)
            if cuda:
                used = torch.cuda.max_memory_allocated(self.device) - self._before
                self.peaks[self.now] = max(self.peaks.get(self.now, 0), used)
        self.now, self._range = name, None
        if name is None:
            return
        if cuda:
            self._before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begun = time.perf_counter()
        self._range = torch.profiler.record_function(PREFIX + name)
        self._range.__enter__()


class TimedStep(TrainingStep):
    """The eager step of a trainer, on its model, pixels and optimizer."""

    def __init__(self, trainer: Trainer, clock: StageClock) -> None:
        stages = _timed_stages(trainer.stepper.stages, clock)
        super().__init__(trainer.model, trainer.pixels, trainer.optimizer, stages=stages)
        self.n_rays, self.clock = max(1, trainer.stepper.n_rays), clock

    def loss(self, step: int, part: int = 0, scale: Tensor | None = None) -> StepResult:
        with self.clock.stage("rays"):  # until the samples are placed and the comparison begins
            return super().loss(step, part, scale)

    def differentiate(self, loss: Tensor, scale: Tensor | None) -> None:
        with self.clock.stage("backward"):
            super().differentiate(loss, scale)

    def update(self, step: int) -> tuple[int, float]:
        with self.clock.stage("optimizer"):
            return super().update(step)


def step_timed(trainer: Trainer, clock: StageClock, n_steps: int) -> None:
    """Train on for so many steps, eagerly and by this clock."""
    trainer.stepper = TimedStep(trainer, clock)
    with _timed_parts(trainer.model, clock):
        for _ in range(n_steps):
            trainer.advance(1)


def _timed_stages(stages: Stages, clock: StageClock) -> Stages:
    """The same functions, each turning the clock."""

    def place(*given: Any, **options: Any) -> Any:
        with clock.stage("march"):
            return stages.place(*given, **options)

    def compare(*given: Any, **options: Any) -> Any:
        clock.turn("composite")  # and so to the end of the loss: what other losses there are comes after
        return stages.compare(*given, **options)

    def update_grid(*given: Any, **options: Any) -> None:
        with clock.stage("grid"):
            stages.update_grid(*given, **options)

    return replace(stages, place=place, compare=compare, update_grid=update_grid)


@contextmanager
def _timed_parts(model: NerfModel, clock: StageClock) -> Iterator[None]:
    """Inside, what the comparison asks of the field counts for the field, and the corrections of rays for the rays."""
    parts: list[tuple[Any, str, str]] = [
        (model.field, name, "field") for name in ("sample_logits", "forward", "density") if hasattr(model.field, name)
    ]
    if model.photos is not None:
        parts.append((model.photos, "rays", "rays"))
    own = [vars(owner).get(name) for owner, name, _ in parts]  # set on the object, not its class
    for owner, name, stage in parts:
        setattr(owner, name, _timed(getattr(owner, name), stage, clock))
    try:
        yield
    finally:
        for (owner, name, _), before in zip(parts, own, strict=True):
            delattr(owner, name) if before is None else setattr(owner, name, before)


def _timed(function: Callable[..., Any], stage: str, clock: StageClock) -> Callable[..., Any]:
    def timed(*given: Any, **options: Any) -> Any:
        if clock.now != "composite":  # the visibility pass and the grid's refreshing ask the field too
            return function(*given, **options)
        with clock.stage(stage):
            return function(*given, **options)

    return timed
