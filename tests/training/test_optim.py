"""The optimizer's laws: schedules, clipping, accumulation, the running mean, and what a skipped step may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import Config, OptimConfig
from nerfturbo.ops import GradientSink, use_backend
from nerfturbo.training import Trainer, load_model, optim
from nerfturbo.training.loss import ray_budget
from nerfturbo.training.optim import learning_rate
from nerfturbo.training.step import StepRecord

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def trainer(steps: int = 4, **values: object) -> Trainer:
    config = tiny_config(steps=steps)
    return Trainer(replace(config, optim=replace(config.optim, **values)), ball_scene())


def with_train(config: Config, **values: object) -> Config:
    return replace(config, train=replace(config.train, **values))


def rates(schedule: str) -> list[float]:
    config = OptimConfig(lr=1.0, warmup_steps=10, hold_fraction=0.0, final_lr_fraction=0.1, schedule=schedule)  # type: ignore[arg-type]
    return [round(learning_rate(config, step, step / 1000), 4) for step in (0, 9, 250, 500, 750, 1000)]


def test_schedules_warm_up_and_end_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "MILESTONES", (0.5, 0.7))
    monkeypatch.setattr(optim, "MILESTONE_FACTOR", 0.5)
    assert rates("constant") == [0.1, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("multistep") == [0.1, 1.0, 1.0, 0.5, 0.25, 0.25]
    cosine, exponential = rates("cosine"), rates("exponential")
    assert cosine[0] == exponential[0] == 0.1 and cosine[-1] == exponential[-1] == 0.1
    halved = [a / b for a, b in zip(exponential, rates("inverse"), strict=True)]  # by the steps that were made
    assert halved == pytest.approx([1.0 + step / 1500 for step in (0, 9, 250, 500, 750, 1000)], abs=1e-2)
    for kind in ("cosine", "exponential", "inverse"):  # past its end a run stays there
        config = OptimConfig(schedule=kind)
        assert learning_rate(config, 999, 1.3) == learning_rate(config, 999, 1.0)
    assert cosine[3] == pytest.approx(0.55) and exponential[3] == pytest.approx(10**-0.5, abs=1e-4)


def poison(made: Trainer, at: set[int]) -> None:
    """Make the gradient of some steps infinite."""
    step = made.optimizer.step

    def poisoned() -> None:
        if made.step in at:
            made.optimizer.buffers[0].grads[0] = float("inf")
        step()

    made.optimizer.step = poisoned  # type: ignore[method-assign]


def test_a_skipped_step_changes_no_parameter_no_moment_and_no_schedule() -> None:
    made = trainer(steps=6)
    states: list[torch.Tensor] = []
    rates: list[float] = []
    made.callbacks.append(lambda t, record: states.append(t.optimizer.buffers[0].values.clone()))
    made.callbacks.append(lambda t, record: rates.append(t.learning_rate))
    poison(made, {2, 3})
    made.fit()
    assert torch.equal(states[1], states[2]) and torch.equal(states[1], states[3])
    assert not torch.equal(states[3], states[4])
    assert (made.skipped, int(made.optimizer.skipped), int(made.optimizer.step_count)) == (2, 2, 4)
    assert rates[1] == rates[2] == rates[3] > rates[4]
    assert torch.isfinite(made.model.grid.thickness).all()


def test_clipping_shortens_the_gradient_to_the_norm_whatever_the_loss_scale() -> None:
    moments = []
    for precision in ("fp32", "fp16"):
        config = with_train(tiny_config(steps=1), precision=precision)
        made = Trainer(replace(config, optim=replace(config.optim, clip_norm=1e-3)), ball_scene())
        made.fit()
        first = torch.cat([buffer.state.first for buffer in made.optimizer.buffers])
        assert float(first.norm()) == pytest.approx(0.1 * 1e-3, rel=0.02)  # (1 - beta1) g after one step
        moments.append(first)
    assert (moments[0] - moments[1]).norm() < 0.05 * moments[0].norm()


def test_without_reaching_the_norm_clipping_changes_nothing() -> None:
    one, two = trainer(clip_norm=1e6), trainer()
    one.fit(), two.fit()
    for first, second in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.allclose(first, second, rtol=1e-5, atol=1e-7)


def test_accumulated_batches_are_one_large_batch() -> None:
    """Two batches of 32 rays are one of 64: the same rays, the same gradient."""
    base = tiny_config(steps=1)
    base = replace(base, sampler=replace(base.sampler, prune=False))
    whole = Trainer(with_train(base, max_rays=64), ball_scene())
    parts = Trainer(with_train(base, max_rays=32, accumulate=2), ball_scene())
    records = []
    for made in (whole, parts):
        made.callbacks.append(lambda _, record: records.append(record))
        made.fit()
    assert records[0].n_rays == records[1].n_rays == 64
    assert records[0].mse == pytest.approx(records[1].mse, rel=0.05)  # jitter differs with the index of the ray
    first = [torch.cat([buffer.state.first for buffer in made.optimizer.buffers]) for made in (whole, parts)]
    assert torch.nn.functional.cosine_similarity(first[0], first[1], dim=0) > 0.95
    assert float(first[0].norm()) == pytest.approx(float(first[1].norm()), rel=0.1)


@pytest.mark.parametrize(("every", "decay"), [(1, 0.3), (2, 0.45), (2, 0.9)])  # the last is not reached
def test_the_running_mean_is_what_its_formula_says_and_comes_back_from_a_checkpoint(
    tmp_path: Path, every: int, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "EMA_EVERY", every)
    made = trainer(steps=5, ema_decay=decay)
    expected = [buffer.values.clone() for buffer in made.optimizer.buffers]

    def follow(t: Trainer, record: object) -> None:
        if t.step % every:
            return
        updates = t.step / every
        memory = min(decay**every, (1 + updates) / (10 + updates)) if updates > 1 else 0.0
        for mean, buffer in zip(expected, t.optimizer.buffers, strict=True):
            mean.mul_(memory).add_(buffer.values, alpha=1 - memory)

    made.callbacks.append(follow)
    made.fit()
    weights = [buffer.values.clone() for buffer in made.optimizer.buffers]
    with made.optimizer.averaged():
        for buffer, mean in zip(made.optimizer.buffers, expected, strict=True):
            assert torch.allclose(buffer.values, mean, atol=1e-6)
        averaged = made.model.render_image(ball_scene("test").cameras, 0).rgb
    assert all(torch.equal(b.values, w) for b, w in zip(made.optimizer.buffers, weights, strict=True))
    model = load_model(made.save(tmp_path))
    assert torch.equal(model.render_image(ball_scene("test").cameras, 0).rgb, averaged)
    resumed = trainer(steps=5, ema_decay=decay)
    resumed.resume(tmp_path / "step_00000005")
    assert all(torch.equal(b.values, w) for b, w in zip(resumed.optimizer.buffers, weights, strict=True))
    for one, two in zip(resumed.optimizer.averages, made.optimizer.averages, strict=True):
        assert torch.equal(one, two)
    later = trainer(steps=5, ema_decay=0.9)
    later.resume(trainer(steps=1).save(tmp_path / "without"))  # a run that kept no mean
    assert all(torch.equal(m, b.values) for m, b in zip(later.optimizer.averages, later.optimizer.buffers, strict=True))


def test_looking_at_a_young_mean_changes_nothing_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first update the mean is the weights; a save or a preview then is no part of what it becomes."""
    monkeypatch.setattr(optim, "EMA_EVERY", 4)
    looked, whole = trainer(steps=7, ema_decay=0.5), trainer(steps=7, ema_decay=0.5)
    poison(looked, {1}), poison(whole, {1})

    def look(t: Trainer, record: StepRecord) -> None:
        t.save(tmp_path)
        weights = t.optimizer.buffers[0].values.clone()
        with t.optimizer.averaged():
            assert record.step >= 4 or torch.equal(t.optimizer.buffers[0].values, weights)

    looked.callbacks.append(look)
    looked.fit(), whole.fit()
    assert whole.skipped == 1
    for one, two in zip(looked.optimizer.averages, whole.optimizer.averages, strict=True):
        assert torch.equal(one, two)


def test_the_optimizer_of_other_loops_follows_its_groups() -> None:
    """A scheduler of torch changes the rate of each group; the native optimizer takes them over at the next step."""
    model = trainer().model
    made = optim.FieldAdam(model, OptimConfig(lr=1e-2))
    for index, group in enumerate(made.param_groups):
        group["lr"] = 1e-3 * (index + 1)
    made.step()
    assert float(made.native.lr) == pytest.approx(1e-3)
    expected = [pytest.approx(1e-3 * (index + 1)) for index in range(len(made.native.buffers))]
    assert [float(buffer.lr) for buffer in made.native.buffers] == expected
    other = optim.FieldAdam(trainer().model, OptimConfig(lr=1e-2))
    other.load_state_dict(made.state_dict())
    assert [group["lr"] for group in other.param_groups] == expected


def test_a_scale_of_others_is_divided_by() -> None:
    """A GradScaler has scaled the loss; without clipping too the update is that of the gradient itself."""
    moments = []
    for scale in (None, torch.tensor(64.0)):
        made = trainer().optimizer
        for buffer in made.buffers:
            buffer.grads.fill_(1e-3 if scale is None else 64e-3)
        made.step(scale)
        moments.append(made.buffers[0].state.first)
    torch.testing.assert_close(*moments)
    assert moments[0].any()


def test_a_sampler_that_knows_how_many_rays_fill_a_batch_limits_them() -> None:
    model = Trainer(tiny_config(), ball_scene()).model
    assert ray_budget(model).max_rays == 64
    model.sampler.max_rays = lambda samples: samples // 16
    assert ray_budget(model).max_rays == 32
    model.sampler.max_rays = lambda samples: samples
    assert ray_budget(model).max_rays == 64


@pytest.mark.parametrize(("piece", "n_pieces"), [(1, 3), (768, 2), (1 << 22, 1)])
def test_every_gradient_is_exchanged_once(piece: int, n_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks in one piece, then a table's levels from the last on, in any number of pieces; what autograd made beside
    the buffers is in them. A backward that was held back is run by the pieces alone, each row once."""
    monkeypatch.setattr(optim, "PIECE", piece)
    config = tiny_config()
    made = Trainer(replace(config, field=replace(config.field, n_levels=3)), ball_scene()).optimizer
    networks, table = made.buffers
    for buffer in made.buffers:
        for parameter in buffer.parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
    rows: list[tuple[int, int]] = []
    made.held.on = True
    sink = GradientSink((table.grad_views[0],), held=made.held)
    sink.add(lambda first, last: rows.append((first, last)))
    pieces = made.exchanged()
    assert not rows and not made.held.on and made.exchanged()[-1][0] == []
    assert [len(runs) for runs, _ in pieces] == [0, *[1] * n_pieces]
    for runs, values in pieces:
        assert (values == 2.0).all()
        values.add_(1.0)
        for run in runs:
            run()
    assert (networks.grads == 3.0).all() and (table.grads == 3.0).all()
    assert rows[0][1] == len(table.grad_views[0]) and rows[-1][0] == 0
    assert [first for first, _ in rows[:-1]] == [last for _, last in rows[1:]]


def test_a_level_of_tables_decays_by_its_own_size() -> None:
    class Tables(torch.nn.Module):
        level_sizes, kept_levels = [4, 2, 8, 8, 6], 1

        def __init__(self) -> None:
            super().__init__()
            self.tables = torch.nn.ParameterList([torch.zeros(28)])

    model, other = Tables(), torch.nn.Parameter(torch.zeros(6))
    found = optim.level_decays(optim.table_levels(model, [model.tables[0], other]), 12.0)
    assert found == ((0, 4, 0.0), (4, 6, 12.0), (6, 22, 3.0), (22, 34, 4.0))  # 2 * 12 / size, runs of one decay joined
    assert optim.level_decays(optim.table_levels(model, [other]), 0.0) == ()
    made = trainer(table_decay=12.0).optimizer
    assert [bool(buffer.rule.decays) for buffer in made.buffers] == [False, True]  # networks, tables
