"""The loop: it learns, stops for each reason, stops its clock, and goes on bit for bit after a checkpoint."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.errors import CheckpointError
from nerfturbo.ops import use_backend
from nerfturbo.presets import preset
from nerfturbo.training import Trainer, latest_checkpoint, load_model
from nerfturbo.training.callbacks import MetricsLog, every, every_seconds, save_checkpoints, skipped_fraction
from nerfturbo.training.step import StepRecord

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _kernels() -> object:
    with use_backend("auto"):
        yield


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = dict(trainer.model.state_dict())
    return found | {f"optimizer.{name}": value for name, value in trainer.optimizer.state_tensors().items()}


def assert_equal_states(one: Trainer, two: Trainer) -> None:
    first, second = state_of(one), state_of(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert (one.step, one.stepper.n_rays) == (two.step, two.stepper.n_rays)


def test_training_lowers_the_loss_and_counts_what_it_does() -> None:
    losses: list[float] = []
    trainer = Trainer(tiny_config(steps=80), ball_scene(), callbacks=[lambda _, record: losses.append(record.loss)])
    summary = trainer.fit()
    assert (summary.steps, summary.stopped_by, len(losses)) == (80, "steps", 80)
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert summary.rays == 80 * 64
    assert summary.samples > 0 and summary.train_seconds > 0.0


def test_save_kill_resume_equals_never_stopped(tmp_path: Path) -> None:
    whole = Trainer(tiny_config(steps=24), ball_scene())
    whole.fit()
    first = Trainer(
        tiny_config(steps=24), ball_scene(), callbacks=[every(11, save_checkpoints(tmp_path / "checkpoints"))]
    )
    first.callbacks.append(lambda trainer, record: setattr(trainer, "should_stop", record.step >= 13))
    assert first.fit().stopped_by == "callback"  # two steps past the checkpoint: lost, as by a kill
    second = Trainer(tiny_config(steps=24), ball_scene())
    second.resume(latest_checkpoint(tmp_path))
    assert second.step == 11
    second.fit()
    assert_equal_states(whole, second)


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not() -> None:
    runs = [Trainer(tiny_config(steps=3, seed=seed), ball_scene()) for seed in (5, 5, 6)]
    for trainer in runs:
        trainer.fit()
    assert_equal_states(runs[0], runs[1])
    names = [name for name, _ in runs[0].model.named_parameters()]
    assert any(not torch.equal(state_of(runs[0])[name], state_of(runs[2])[name]) for name in names)


def test_the_time_limit_ends_training_and_drives_the_schedule() -> None:
    config = tiny_config(steps=100_000)
    trainer = Trainer(replace(config, train=replace(config.train, time_limit=0.5)), ball_scene())
    summary = trainer.fit()
    assert summary.stopped_by == "time limit"
    assert 0.5 <= summary.train_seconds < 5.0
    assert trainer.progress == 1.0


def test_what_happens_with_the_clock_stopped_is_not_training_time() -> None:
    def rest(trainer: Trainer, record: StepRecord) -> None:
        with trainer.clock_stopped():
            time.sleep(0.5)

    trainer = Trainer(tiny_config(steps=2), ball_scene(), callbacks=[rest])
    start = time.perf_counter()
    summary = trainer.fit()
    assert time.perf_counter() - start - summary.train_seconds > 0.95


def test_ctrl_c_ends_fit_and_fit_goes_on_afterwards() -> None:
    def interrupt(trainer: Trainer, record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    trainer = Trainer(tiny_config(steps=4), ball_scene(), callbacks=[interrupt])
    assert trainer.fit().stopped_by == "interrupted"
    assert trainer.fit().stopped_by == "steps"
    assert trainer.step == 4


def test_a_loaded_model_renders_what_the_trained_one_renders(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(steps=3), ball_scene())
    trainer.fit()
    model = load_model(trainer.save(tmp_path))
    cameras = ball_scene("test").cameras
    assert torch.equal(model.render_image(cameras, 0).rgb, trainer.model.render_image(cameras, 0).rgb)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(steps=1), ball_scene())
    checkpoint = trainer.save(tmp_path)
    config = tiny_config(steps=1)
    other = Trainer(replace(config, field=replace(config.field, width=32)), ball_scene())
    before = {name: value.clone() for name, value in state_of(other).items()}
    with pytest.raises(CheckpointError, match=r"density_net.*expected shape .*belongs to another model"):
        other.resume(checkpoint)
    assert other.step == 0
    assert all(torch.equal(before[name], value) for name, value in state_of(other).items())


def test_every_and_every_seconds() -> None:
    steps: list[int] = []
    trainer = Trainer(tiny_config(steps=7), ball_scene(), callbacks=[every(3, lambda t, r: steps.append(r.step))])
    never = every_seconds(1000.0, lambda t, r: pytest.fail("too early"))
    always = every_seconds(0.0, lambda t, r: steps.append(-r.step))
    slow: list[int] = []
    seldom = every_seconds(0.0, lambda t, r: slow.append(r.step) or time.sleep(0.2), pause=1000.0)
    trainer.callbacks += [never, always, seldom]
    trainer.fit()
    assert slow == [1]
    assert [step for step in steps if step > 0] == [3, 6]
    assert [-step for step in steps if step < 0] == [1, 2, 3, 4, 5, 6, 7]


def test_the_log_holds_steps_and_previews_and_its_rates_add_up(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "log.jsonl", every_steps=4)
    log.monitor = lambda: time.sleep(0.05) or {}  # what it asks for may take its time
    trainer = Trainer(tiny_config(steps=12), ball_scene(), callbacks=[log])
    trainer.fit()
    log.add_preview(trainer, 20.5)
    assert [record["step"] for record in log.records] == [1, 4, 8, 12, 12]
    assert [record["kind"] for record in log.records] == ["step"] * 4 + ["preview"]
    rays, last = 0.0, 0.0
    for record in log.records[:4]:
        rays += record["rays_per_second"] * (record["seconds"] - last)
        last = record["seconds"]
    assert rays == pytest.approx(trainer.rays, rel=0.05)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 5


def test_skipped_fraction_is_zero_for_a_full_grid_without_pruning() -> None:
    config = tiny_config(steps=1)
    config = replace(config, sampler=replace(config.sampler, prune=False))
    records: list[StepRecord] = []
    trainer = Trainer(config, ball_scene(), callbacks=[lambda _, record: records.append(record)])
    trainer.model.grid.set_occupied(torch.ones(1, 8, 8, 8, dtype=torch.bool))
    trainer.model.grid.update = lambda *args, **kwargs: None  # type: ignore[method-assign]
    trainer.fit()
    assert skipped_fraction(trainer, records[-1]) == pytest.approx(0.0, abs=0.05)


def test_for_scene_fits_the_config_and_the_plain_constructor_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scene = replace(ball_scene(), grid_levels=3)
    with caplog.at_level("INFO", logger="nerfturbo"):
        fitted = Trainer.for_scene(scene, tiny_config(steps=5), time_limit=9.0)
    assert fitted.config.grid.levels == 3 and fitted.config.sampler.cone_angle > 0.0
    assert fitted.config.train.time_limit == 9.0 and fitted.config.train.steps > 10**6
    assert any("grid.levels 3" in record.message for record in caplog.records)
    caplog.clear()
    plain = Trainer(tiny_config(steps=5), scene)
    assert plain.config == tiny_config(steps=5)
    assert any("Trainer.for_scene" in record.message for record in caplog.records)
    assert Trainer.for_scene(ball_scene(), steps=7).config == replace(
        preset("auto", "cpu"), train=replace(preset("auto", "cpu").train, steps=7)
    )


def test_after_a_step_without_enough_memory_training_goes_on_as_if_it_had_had_it() -> None:
    """Its gradients are dropped: the step is made again, and the weights are those of a run without trouble."""
    trainers = [Trainer(tiny_config(steps=5), ball_scene()) for _ in range(2)]
    differentiate, calls = trainers[1].stepper.differentiate, []

    def hungry(*args: object) -> None:
        differentiate(*args)
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainers[1].stepper.differentiate = hungry
    with use_backend("reference"):
        trainers[0].fit()
        with pytest.raises(torch.OutOfMemoryError):
            trainers[1].fit()
        assert trainers[1].step == 2 and trainers[1].fit().steps == 5
    for one, other in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
