"""Fine samples for the time that a precision saves: the search, its clocks, and the steps that it times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import fine_samples
from fine_samples import (
    MORE_BLOCKS,
    FineSearch,
    FineTrial,
    PassTimes,
    StepTimer,
    most_fine,
    search_fine,
    time_in_turn,
    time_passes,
    with_fine,
)
from nerfturbo.config import Config, GridConfig, NgpConfig, VanillaConfig
from nerfturbo.presets import preset
from nerfturbo.training.trainer import Trainer
from precision_runs import FP32, Kind, Point, PrecisionResult, PrecisionRun, in_words

from ..tiny import ball_scene

CPU = torch.device("cpu")
FP16 = Kind("fp16", "fp16", "ieee")


def tiny(name: str) -> Config:
    """12 fine samples behind 16 coarse ones (two stages of 16: proposal) on 128 rays."""
    config = preset(name)
    samples: dict[str, Any] = {"n_samples": 12, "coarse_samples": 16}
    field: Any = VanillaConfig(width=32, depth=2)
    if name == "proposal":
        samples |= {"coarse_samples": (16, 16), "anneal_steps": 10, "levels": 3, "log2_entries": 10}
        samples |= {"resolutions": (8, 16)}
        field = NgpConfig(n_levels=4, log2_entries=11, max_resolution=32, width=16)
    batch = {"steps": 60, "batch_samples": 128 * (28 if name == "hierarchy" else 12), "max_rays": 128}
    return replace(
        config,
        grid=GridConfig(resolution=8),
        field=field,
        render=replace(config.render, steps_per_diagonal=32),
        sampler=replace(config.sampler, **samples),
        optim=replace(config.optim, warmup_steps=2, lr=1e-2 if name == "hierarchy" else 3e-2),
        train=replace(config.train, **batch),
    )


@pytest.mark.parametrize("start", [1, 4, 12, 128])
@pytest.mark.parametrize("speed", [0.3, 1.0, 1.01, 2.0, 3.3, 7.0, 50.0])
def test_the_search_ends_within_a_sixteenth_of_what_fits(start: int, speed: float) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return (start / 2 + n) / speed <= 1.5 * start  # half of the start is the coarse pass, which costs the same

    found = most_fine(fits, start, 8 * start)
    exact = int(1.5 * start * speed - start / 2)
    if exact < start:
        assert (found, asked) == (start, [start])
        return
    assert start <= found <= min(exact, 8 * start)
    assert found + max(1, start // 16, found // 16) > min(exact, 8 * start) or found == 8 * start
    assert len(asked) == len(set(asked)) <= 12 and max(asked) <= 8 * start


def test_a_cap_below_the_next_doubling_holds() -> None:
    assert most_fine(lambda n: True, start=12, most=20) == 20
    assert most_fine(lambda n: True, start=12, most=12) == 12


def test_a_machine_that_slows_down_slows_both() -> None:
    load = itertools.count(10)  # every block takes longer than the one before
    _, ratio = time_in_turn(lambda: 0.97 * next(load), lambda: 1.0 * next(load))
    assert ratio == pytest.approx(0.97, abs=0.04)  # one after the other they would seem 1.4 apart
    assert (next(load) - 10) % 2 == 0


def test_pairs_are_added_until_they_agree() -> None:
    asked: list[str] = []

    def clock(name: str, values: Iterator[float]) -> Callable[[], float]:
        return lambda: asked.append(name) or next(values)

    own, base = itertools.repeat(3.0), itertools.repeat(1.0)
    assert time_in_turn(clock("own", own), clock("base", base)) == (3.0, 3.0) and asked == ["base", "own"]  # hopeless
    asked.clear()
    assert time_in_turn(clock("own", itertools.repeat(1.5)), clock("base", base)) == (1.5, 1.5)
    assert asked == ["base", "own", "own", "base", "base", "own", "own", "base", "base", "own"]
    asked.clear()
    lucky = itertools.chain([0.8], itertools.repeat(1.1))  # one block of a machine that was busy with the other
    seconds, ratio = time_in_turn(clock("own", lucky), clock("base", base))
    assert (seconds, ratio) == (1.1, 1.1) and len(asked) == 2 * MORE_BLOCKS


@pytest.mark.parametrize("name", ["hierarchy", "proposal"])
def test_more_fine_samples_lie_on_the_same_rays(name: str) -> None:
    config, scene, counts = tiny(name), ball_scene(), {}
    for n in (12, 30):
        trainer = Trainer(with_fine(config, n), scene)
        record = trainer.advance()
        record = trainer.advance()
        beside = 16 if name == "hierarchy" else 0
        assert record.n_samples == record.n_rays * (n + beside)
        counts[n] = record.n_rays
    assert counts[12] == counts[30] == trainer.config.train.max_rays
    plain = Trainer(config, scene)
    plain.advance()
    assert plain.advance().n_rays == counts[12]


@pytest.mark.parametrize(("name", "kind"), [("hierarchy", FP32), ("proposal", FP32), ("proposal", FP16)])
def test_the_passes_together_are_the_training_step(name: str, kind: Kind) -> None:
    """What is timed apart changes the parameters as a step of training does: no gradient is lost between the passes."""
    config = with_fine(tiny(name), 12)
    config = replace(config, train=replace(config.train, precision=kind.precision))
    whole, apart = (Trainer(config, ball_scene()) for _ in range(2))
    # Until the field knows more than proposals, and up to a step at which they do not rest.
    n_steps = 2 if name == "hierarchy" else 16
    for _ in range(n_steps):
        whole.advance()
        apart.advance()
    before = {key: value.clone() for key, value in whole.model.named_parameters()}
    apart.stepper.set_learning_rate(whole.learning_rate)
    whole.advance()
    seconds = fine_samples._apart(apart, n_steps)
    assert len(seconds) == 3 and min(seconds) > 0.0
    others = dict(apart.model.named_parameters())
    moved = {key for key, value in whole.model.named_parameters() if not torch.equal(value, before[key])}
    assert any(key.startswith("sampler.") for key in moved)
    assert moved > {key for key in before if key.startswith("field.")}
    for key, value in whole.model.named_parameters():
        torch.testing.assert_close(others[key], value, rtol=1e-5, atol=1e-6, msg=key)


class ByCount:
    """In place of a `StepTimer`: a step takes as long as its samples say, and memory ends somewhere."""

    speeds: ClassVar[dict[str, float]] = {"fp32": 1.0, "fp16": 2.5}
    most = 1 << 30

    def __init__(self, config: Config, scene: Any, kind: Kind, *, device: torch.device) -> None:
        self.samples = config.train.batch_samples / self.speeds[kind.name]
        if config.sampler.n_samples > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    def seconds(self) -> float:
        return self.samples / 1e3


def test_a_search_keeps_every_trial_and_survives_the_end_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, scene = with_fine(tiny("hierarchy"), 12), ball_scene()
    monkeypatch.setattr(fine_samples, "StepTimer", ByCount)
    monkeypatch.setattr(fine_samples, "_tidy", lambda device: None)
    monkeypatch.setattr(fine_samples, "time_passes", lambda *_, **__: PassTimes(1.0, 2.0, 0.5))

    def search() -> FineSearch:
        base: Any = ByCount(config, scene, FP32, device=CPU)
        seen: list[FineTrial] = []
        found = search_fine(config, scene, FP16, device=CPU, base=base, most=96, report=seen.append)
        assert tuple(seen) == found.trials
        return found

    found = search()  # 16 coarse samples and 12 fine ones in fp32's time: 2.5 * 28 - 16 = 54
    assert [trial.fine_samples for trial in found.trials[:4]] == [12, 24, 48, 96]
    assert [trial.fits for trial in found.trials[:4]] == [True, True, True, False]
    assert 51 <= found.fine_samples <= 54 and found.saves and found.ratio == pytest.approx(0.4)
    assert FineSearch.of(_plain(found)) == found
    monkeypatch.setattr(ByCount, "most", 40)
    short = search()
    assert 38 <= short.fine_samples <= 40 and "out of memory" in short.trials[2].why
    assert short.trials[2].milliseconds is None
    monkeypatch.setattr(ByCount, "speeds", {"fp32": 1.0, "fp16": 0.8})
    slow = search()
    assert (slow.fine_samples, len(slow.trials), slow.saves) == (12, 1, False)
    assert slow.ratio == pytest.approx(1.25)


def _plain(search: FineSearch) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(search)))


def test_real_steps_are_timed_and_the_grid_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fine_samples, "BLOCK_SECONDS", 0.02)
    config = with_fine(tiny("hierarchy"), 12)
    few, many = (StepTimer(with_fine(config, n), ball_scene(), FP32, device=CPU) for n in (12, 192))
    thickness = few.trainer.model.grid.thickness.clone()
    _, ratio = time_in_turn(many.seconds, few.seconds)
    assert ratio > 1.5  # 224 samples a ray are slower than 44, on any machine
    assert torch.equal(few.trainer.model.grid.thickness, thickness) and few.trainer.step > 1
    passes = time_passes(config, ball_scene(), FP32, device=CPU)
    assert min(passes.coarse, passes.fine, passes.rest) > 0.0


def run(kind: str, fine: int, psnr: float, steps: int = 100) -> PrecisionRun:
    return PrecisionRun(kind, 0, 512, steps, 9.0, 1e3, 1e5, None, (Point(steps, 9.0, psnr, 0.9),), 0, (), fine)


def test_words_say_what_was_bought_and_where_that_is_nothing() -> None:
    passes, own = PassTimes(1.0, 2.0, 0.5), FineTrial(64, 2.0, 0.5, True)
    searches = {
        "fp32": FineSearch("fp32", passes, 4.0, 1.0, 64),
        "fp16": FineSearch("fp16", passes, 2.0, 0.5, 160, (own, FineTrial(192, 4.4, 1.1, False))),
        "tf32": FineSearch("tf32", passes, 2.0, 0.5, 128, (own, FineTrial(128, 3.0, 0.8, True))),
        "bf16": FineSearch("bf16", passes, 8.0, 2.0, 64, (FineTrial(64, 8.0, 2.0, False),)),
    }
    result = PrecisionResult(
        same_time=(run("fp32", 64, 30.0), run("fp16", 160, 30.5), run("bf16", 64, 28.0, 50)), searches=searches
    )
    fp16, tf32, bf16 = in_words(result)
    assert "buys 160 fine samples per ray for 64" in fp16 and fp16.endswith("+0.50 dB")
    assert "the most that were tried" in tf32 and "dB" not in tf32  # not trained yet
    assert "no time is saved, and no fine samples are bought" in bf16
    assert "50 steps in 9.0 s, fp32 100 steps in 9.0 s: -2.00 dB" in bf16
