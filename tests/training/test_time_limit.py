"""A time limit ends training in time, however slow the steps are; fast ones are queued as ever.

There is no GPU here: a stepper queues as `DeviceStep` does, on a clock that the steps alone move.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nerfturbo.training import trainer as module
from nerfturbo.training.graph import QUEUED
from nerfturbo.training.step import StepRecord, TrainingStep
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, tiny_config


class Queue:
    """One chunk runs while another waits: `advance` comes back when the chunk before is done."""

    def __init__(self, stepper: TrainingStep, step_seconds: float) -> None:
        self.stepper, self.step_seconds = stepper, step_seconds
        self.now, self.ends, self.sizes = 0.0, [], []

    def __getattr__(self, name: str) -> object:
        return getattr(self.stepper, name)

    def advance(self, step: int, limit: int) -> StepRecord:
        n_steps = min(limit, QUEUED)
        start = max(self.now, self.ends[-1] if self.ends else 0.0)
        self.ends.append(start + n_steps * self.step_seconds)
        self.sizes.append(n_steps)
        self.now = max(self.now, self.ends[max(0, len(self.ends) - 2)])
        return StepRecord(step + n_steps, 0.1, 0.1, 1, 1, 1, n_steps, n_steps)

    def finish(self) -> None:
        self.now = max(self.now, self.ends[-1] if self.ends else 0.0)


def queued(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, *, time_limit: float | None, steps: int = 10**9
) -> tuple[Trainer, Queue]:
    config = tiny_config(steps=steps)
    trainer = Trainer(replace(config, train=replace(config.train, time_limit=time_limit)), ball_scene())
    assert isinstance(trainer.stepper, TrainingStep)
    queue = Queue(trainer.stepper, step_seconds)
    trainer.stepper = queue  # type: ignore[assignment]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: queue.now))
    return trainer, queue


@pytest.mark.parametrize("step_seconds", [0.001, 0.015, 0.03, 0.1, 0.2, 0.7])
def test_a_limit_is_passed_by_half_a_second_or_two_steps_at_most(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float
) -> None:
    for limit in (20.0, 20.3, 21.1):
        trainer, queue = queued(monkeypatch, step_seconds, time_limit=limit)
        assert trainer.fit().stopped_by == "time limit"
        assert limit <= trainer.train_seconds == queue.now
        assert trainer.train_seconds - limit <= max(0.5, 2.0 * step_seconds) + 1e-6


def test_fast_steps_are_queued_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, queue = queued(monkeypatch, 0.015, time_limit=20.0)
    trainer.fit()
    assert set(queue.sizes) == {QUEUED}


def test_steps_that_become_slow_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, queue = queued(monkeypatch, 0.001, time_limit=20.0)
    trainer.callbacks.append(lambda made, _: setattr(queue, "step_seconds", 0.1 if made.progress > 0.5 else 0.001))
    trainer.fit()
    assert queue.sizes[0] == QUEUED and queue.sizes[-1] == 2
    assert trainer.train_seconds < 20.5


def test_without_a_limit_no_clock_decides_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, queue = queued(monkeypatch, 0.7, time_limit=None, steps=100)
    assert trainer.fit().stopped_by == "steps"
    assert queue.sizes == [QUEUED] * (100 // QUEUED) + [100 % QUEUED] and trainer.step == 100
