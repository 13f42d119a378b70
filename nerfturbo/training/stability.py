"""What to do when training is not finite: name the first bad tensor, give advice in words, act where it was asked for.
A step with a non-finite gradient changes nothing, and is counted. With fp16 a few of them are how the loss scale finds
its place; only when they keep coming is it a problem."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import NerfturboError
from ..ops.adam import ScaleRule
from ..rendering.render import field_functions
from .distributed import RayShare
from .loss import compute_loss, draw_background
from .step import StepRecord, backward, gradient_scale

if TYPE_CHECKING:
    from .trainer import Trainer

LOG = logging.getLogger("nerfturbo")
WINDOW = 400  # steps looked back on
FALLS = 5  # times the scale fell in the window without having grown: it keeps falling
IN_A_ROW = 20  # skipped steps in a row with nothing left to try
FACTOR = 0.5  # of the learning rate, each time
LOWEST_FACTOR = 1.0 / 32.0


class UnstableError(NerfturboError, RuntimeError):
    """Training is no longer finite, and there is nothing left to try."""


@dataclass(frozen=True)
class Advice:
    """What was found, in words, and whether nothing more can be hoped for."""

    text: str
    hopeless: bool


class ScaleWatch:
    """Looks at loss scale and skipped steps as they go by; says when they need attention."""

    def __init__(self, precision: str, rule: ScaleRule | None = None) -> None:
        self.precision, self.rule = precision, rule or ScaleRule()
        self._falls: deque[int] = deque()  # steps at which the scale fell
        self._last: tuple[int, float] | None = None
        self.in_a_row = 0

    def see(self, step: int, skipped: int, scale: float) -> Advice | None:
        """`skipped` of the steps since the last call, the last of them numbered `step` - 1, had no update."""
        before, previous = self._last or (step, scale)
        self._last = (step, scale)
        all_skipped = skipped > 0 and skipped >= step - before
        self.in_a_row = self.in_a_row + skipped if all_skipped else 0
        if scale > previous:
            self._falls.clear()
        self._falls.extend([step] * skipped)
        while self._falls and self._falls[0] < step - WINDOW:
            self._falls.popleft()
        at_floor = self.precision != "fp16" or scale <= self.rule.lowest
        if self.in_a_row >= IN_A_ROW and at_floor:
            floor = f" with the loss scale at its floor of {self.rule.lowest:g}" if self.precision == "fp16" else ""
            return Advice(f"{self.in_a_row} steps in a row were not finite{floor}", hopeless=True)
        if len(self._falls) >= FALLS:
            self._falls.clear()
            return Advice(self._falling_text(step, scale), hopeless=False)
        return None

    def forget(self) -> None:
        """Something was changed: give it time to act."""
        self._falls.clear()
        self.in_a_row = 0

    def _falling_text(self, step: int, scale: float) -> str:
        if self.precision == "fp16":
            what = f"step {step}: the loss scale keeps falling, it is {scale:g}: gradients overflow half precision"
            return f"{what}; lower the learning rate (--optim.lr), clip (--optim.clip-norm 1) or use bf16 or fp32"
        what = f"step {step}: {FALLS} steps of the last {WINDOW} were not finite in {self.precision}"
        return f"{what}; lower the learning rate (--optim.lr) or clip (--optim.clip-norm 1)"


class StabilityGuard:
    """Watches every step of a trainer, names the first bad tensor, and does what `train.on_instability` says. "warn"
    says it; "lower-lr" halves the learning rate, again and again down to 1/32; "stop" ends training. Where nothing
    helps any more it raises `UnstableError`; the last checkpoint is then from before. `report` is told too."""

    report: Callable[[Trainer, str], None] | None = None

    def __init__(self, precision: str) -> None:
        self.watch = ScaleWatch(precision)
        self._named = False

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        advice = self.watch.see(record.step, record.skipped, record.loss_scale)
        if record.skipped and not self._named and (advice is not None or self.watch.precision != "fp16"):
            self._named = True  # once: looking costs a step
            self._say(trainer, f"step {record.step}: skipped; first bad tensor: {first_bad_tensor(trainer)}")
        if advice is None:
            return
        action = trainer.config.train.on_instability
        if action == "lower-lr" and trainer.lr_factor * FACTOR >= LOWEST_FACTOR:
            trainer.lr_factor *= FACTOR
            self.watch.forget()
            self._say(trainer, f"{advice.text}; the learning rate is halved, to {trainer.learning_rate:.3g}")
        elif advice.hopeless or action == "stop":
            bad = first_bad_tensor(trainer)
            raise UnstableError(f"{advice.text}; first bad tensor: {bad}; the last checkpoint is from before")
        else:
            self._say(trainer, advice.text)

    def start(self, trainer: Trainer) -> None:
        """At the start of a run, perhaps a resumed one."""
        self._start = (trainer.step, int(trainer.optimizer.skipped))  # steps made and skipped before
        self.watch, self._named = ScaleWatch(self.watch.precision, self.watch.rule), False

    def finish(self, trainer: Trainer) -> None:
        """At its end: one whose last steps were all skipped has not succeeded, however few they were."""
        steps, skipped = trainer.step - self._start[0], int(trainer.optimizer.skipped) - self._start[1]
        last = IN_A_ROW if self.watch.precision == "fp16" else FALLS  # fp16 may still be looking for its scale
        if self.watch.in_a_row >= last or 0 < steps <= skipped:
            bad = first_bad_tensor(trainer)
            raise UnstableError(f"{skipped} of {steps} steps were not finite; first bad tensor: {bad}")
        if skipped:
            LOG.warning("%d of %d steps were skipped: a gradient was not finite", skipped, steps)

    def _say(self, trainer: Trainer, text: str) -> None:
        LOG.warning(text)
        if self.report is not None:
            self.report(trainer, text)


def first_bad_tensor(trainer: Trainer) -> str:
    """Do the last step's work again, in order, and name the first thing that is not finite. Nothing is updated. Where
    steps were queued since, the parameters have moved on, and it may all be finite again."""
    with trainer.clock_stopped():
        model, optimizer = trainer.model, trainer.optimizer
        for name, value in (*model.named_parameters(), ("grid.thickness", model.grid.thickness)):
            if not _finite(value):
                return f"parameter {name}" if name != "grid.thickness" else "the occupancy grid"
        step, stages = max(0, trainer.step - 1), trainer.stepper.stages
        batch = stages.draw(trainer.pixels, step, RayShare(0, max(1, trainer.stepper.n_rays))).arrived()
        background = draw_background(trainer.config, step, len(batch.rays), trainer.device)
        if not _finite(batch.rgba):
            return "the pictures"
        with torch.no_grad():
            samples, _ = stages.place(model, batch.rays, step=step)
            _, rgb_sigma_fn = field_functions(model.field, batch.rays)
            rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
        for name, value in (("density of the field", density), ("colour of the field", rgb)):
            if not _finite(value):
                return name
        scale = gradient_scale(optimizer)
        result = compute_loss(model, batch, background, step=step, loss_scale=scale, stages=stages)
        if not _finite(result.loss):
            return "loss"
        optimizer.attach_gradients()  # a loop of others may have dropped them
        backward(result.loss, scale)
        found = None
        for buffer in optimizer.buffers:
            for name, view in zip(buffer.names, buffer.views(buffer.grads), strict=True):
                found = found or (None if _finite(view) else f"gradient of {name}")
        optimizer.drop_gradients()
        why = "the gradients overflowed only at the larger loss scale" if optimizer.scaled else "it was another batch"
        return found or f"none any more: {why}"


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.detach()).all())
