"""Scores at marks: in order, with the clock stopped, and the last one at the end of training."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from nerfturbo.bench import scene as module
from nerfturbo.bench.scene import Mark, SceneRun, median_marks, run_scene_benchmark, scene_record
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.training import trainer as trainer_module

from ..tiny import ball_scene, tiny_config


def run_of(*values: float) -> SceneRun:
    marks = tuple(Mark(float(k), k + 0.1, 10 * k, value, None) for k, value in enumerate(values, start=1))
    return SceneRun(0, marks, 1, 1.0, 1.0, 1.0, 1.0)


def test_the_median_is_taken_mark_by_mark() -> None:
    assert median_marks([run_of(20.0, 30.0), run_of(22.0, 28.0), run_of(21.0, 35.0)]) == [(1.0, 21.0), (2.0, 30.0)]


def test_marks_are_taken_with_the_clock_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a hundredth of a second whenever it is read, and by 0.6 s while a score is taken."""
    real, now = module.evaluate, 0.0

    def read() -> float:
        nonlocal now
        now += 0.01
        return now

    def slow(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal now
        now += 0.6
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "evaluate", slow)
    for user in (module, trainer_module):
        monkeypatch.setattr(user, "time", SimpleNamespace(perf_counter=read))
    seen: list[Mark] = []
    scenes = (ball_scene(), ball_scene("test", n_views=2))
    with use_backend("reference"):
        run = run_scene_benchmark(tiny_config(), scenes, [0.6, 0.3], eval_views=1, report=seen.append)
    assert list(run.marks) == seen and [mark.mark for mark in seen] == [0.3, 0.6]
    assert 0.3 <= seen[0].seconds < 0.6 + 0.3 and seen[0].step < seen[1].step == run.steps
    assert run.wall_seconds > run.train_seconds + 1.2
    config = replace(tiny_config(), data=replace(tiny_config().data, source="builtin:ball"))
    record = scene_record([run], config, scenes[1], device="cpu", eval_views=1)
    values = json.loads(json.dumps(asdict(record)))["values"]
    assert values["protocol"]["views"] == "1 of 2, evenly spaced" and len(values["median_psnr"]) == 2
    assert values["baselines"]["constant_psnr"] > 0.0


def test_an_interrupted_run_has_no_marks_that_it_did_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.Trainer.advance

    def interrupted(trainer, *args):  # type: ignore[no-untyped-def]
        if trainer.step >= 2:
            raise KeyboardInterrupt
        return real(trainer, *args)

    monkeypatch.setattr(module.Trainer, "advance", interrupted)
    seen: list[Mark] = []
    with use_backend("reference"), pytest.raises(KeyboardInterrupt):
        run_scene_benchmark(tiny_config(), (ball_scene(), ball_scene("test")), [100.0], report=seen.append)
    assert seen == []


def test_marks_must_be_positive() -> None:
    for marks in ([], [0.0], [-1.0, 2.0]):
        with pytest.raises(InputError, match="marks"):
            run_scene_benchmark(tiny_config(), (ball_scene(), ball_scene("test")), marks)
