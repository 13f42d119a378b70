"""Error-guided draws: hard tiles more often, never less than half as often as uniformly, and the same mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import LossConfig
from nerfturbo.data.batches import ErrorMap, PixelSampler
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.adam import RayBudget, StepState
from nerfturbo.ops.pixels import PixelMask, pack_words
from nerfturbo.rendering.losses import color_loss, weigh_gradient
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training import Trainer
from nerfturbo.training.loss import compare_colors, compute_loss, draw_background
from nerfturbo.training.step import step_gradients, step_update
from nerfturbo.types import PackedSamples

from ..tiny import ball_scene, tiny_config
from .test_batches import mixed_scene

BIG = ball_scene(n_views=3, size=40)  # 3 x 3 tiles of 16 a picture


def shares(errors: ErrorMap) -> torch.Tensor:
    return torch.diff(errors.guide.ends, prepend=errors.guide.ends.new_zeros(1)).double()


def test_without_errors_the_draws_are_uniform() -> None:
    errors = ErrorMap(BIG.images, None)
    assert errors.tile == 16 and errors.guide.ends.shape == (27,)
    areas = torch.tensor([256.0, 256, 128, 256, 256, 128, 128, 128, 64]).repeat(3)
    assert torch.allclose(shares(errors) / shares(errors).sum(), (areas / areas.sum()).double(), atol=1e-8)


def test_shares_follow_the_errors_and_keep_half_of_the_uniform_ones() -> None:
    errors = ErrorMap(BIG.images, None)
    uniform = shares(errors) / shares(errors).sum()
    tiles = torch.arange(27)
    wrong = torch.full((27,), 0.01)
    wrong[4] = 0.5
    errors.add(tiles, wrong, torch.ones(27, dtype=torch.bool))
    errors.refresh()
    now = shares(errors) / shares(errors).sum()
    assert float((now / uniform).min()) >= 0.5 and float(now[4] / uniform[4]) > 3.0
    mean = float((errors.errors * uniform).sum())
    expected = uniform * (0.5 + 0.5 * errors.errors / mean)
    assert torch.allclose(now, expected, atol=1e-6)
    errors.add(tiles, torch.zeros(27), torch.ones(27, dtype=torch.bool))
    errors.refresh()
    assert float(errors.errors[4]) == pytest.approx(0.25, abs=1e-4)  # a running mean


def test_rays_that_do_not_count_add_nothing_and_the_order_does_not_matter() -> None:
    first, second = ErrorMap(BIG.images, None), ErrorMap(BIG.images, None)
    draw = torch.Generator().manual_seed(0)
    tiles, values = torch.randint(0, 27, (500,), generator=draw), torch.rand(500, generator=draw)
    counted = torch.rand(500, generator=draw) < 0.5
    order = torch.randperm(500, generator=draw)
    first.add(tiles, values, counted)
    second.add(tiles[order], torch.where(counted, values, 9.0)[order], counted[order])
    first.refresh()
    second.refresh()
    assert torch.equal(first.guide.ends, second.guide.ends)


def test_masked_tiles_are_never_drawn() -> None:
    flags = torch.ones(3, 40, 40, dtype=torch.bool)
    flags[:, :16, :16] = False
    flags[:, 20, 20] = False
    mask = PixelMask.of_words(pack_words(flags.reshape(-1)))
    scene = replace(BIG, images=replace(BIG.images, mask=mask))
    sampler = PixelSampler(scene, "cpu", 0, guided=True)
    batch = sampler.draw(0, 20_000)
    assert batch.tiles is not None and batch.weights is not None
    assert not bool(((batch.tiles == 0) | (batch.tiles == 9) | (batch.tiles == 18)).any())
    assert float((batch.weights == 0.0).float().mean()) < 0.01  # the one masked pixel of its tile
    assert float(batch.weights.mean()) == pytest.approx(1.0, abs=0.02)


def test_weighted_losses_estimate_the_mean_over_all_pixels() -> None:
    """The gradient too: whatever is drawn, its expectation is that of uniform draws."""
    sampler = PixelSampler(BIG, "cpu", 0, guided=True)
    assert sampler.error_map is not None
    sampler.error_map.add(torch.arange(27), torch.linspace(0.0, 1.0, 27), torch.ones(27, dtype=torch.bool))
    sampler.refresh()
    truth = BIG.images.pixels[:, :3].float() / 255.0
    exact, n = truth.square().mean(), 200_000
    batch = sampler.draw(0, n)
    assert batch.weights is not None
    guess = torch.zeros(n, 3, requires_grad=True)
    loss = color_loss(guess, batch.rgba[:, :3], kind="mse", weights=batch.weights)
    assert float(loss.detach()) == pytest.approx(float(exact), rel=0.01)
    (gradient,) = torch.autograd.grad(loss, guess)
    assert torch.allclose(gradient.sum(0), -2.0 * truth.mean(0) / 3.0, rtol=0.02)


def test_weighing_a_gradient_is_weighing_the_loss() -> None:
    values = torch.randn(5, 4, requires_grad=True)
    weights = torch.rand(5)
    (weighed,) = torch.autograd.grad((weigh_gradient(values, weights).square().sum(-1)).sum(), values)
    (direct,) = torch.autograd.grad((weights * values.square().sum(-1)).sum(), values)
    assert torch.allclose(weighed, direct)


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_fields_with_and_without_fused_ops_weigh_alike(kind: str) -> None:
    """The fused loss gets its weights through the gradient of the logits, the plain one as factors."""
    config = tiny_config(steps=2)
    config = replace(config, loss=LossConfig(kind=kind), train=replace(config.train, draw="error"))
    with use_backend("reference"):
        model, sampler = NerfModel(config, SceneBounds.of(BIG)), PixelSampler(BIG, "cpu", 0, guided=True)
        batch = sampler.draw(5, 200)
        assert batch.weights is not None
        scaled = replace(batch, weights=batch.weights * torch.rand(200, generator=torch.Generator().manual_seed(1)))
        background = draw_background(config, 5, 200, sampler.device)
        result = compute_loss(model, scaled, background, step=5)
        fused = torch.autograd.grad(result.loss, list(model.field.parameters()))
        field = model.field

        class Plain(torch.nn.Module):  # hides the fused functions of the field
            def density(self, positions: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
                return field.density(positions, times)

            def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return field(*arguments)

        model.field = Plain()  # type: ignore[assignment]
        plain = compute_loss(model, scaled, background, step=5)
        others = torch.autograd.grad(plain.loss, list(field.parameters()))
    assert float(plain.loss.detach()) == pytest.approx(float(result.loss.detach()), rel=1e-4)
    for a, b in zip(fused, others, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-7)


def test_errors_are_distances_from_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    config = tiny_config(steps=2)
    config = replace(config, train=replace(config.train, draw="error"))
    with use_backend("reference"):
        model, sampler = NerfModel(config, SceneBounds.of(BIG)), PixelSampler(BIG, "cpu", 0, guided=True)
        batch = sampler.draw(5, 200)
        monkeypatch.setattr(type(batch), "add_errors", lambda self, values, kept: seen.append(values))
        white = replace(batch, rgba=torch.ones_like(batch.rgba))
        compute_loss(model, white, draw_background(config, 5, 200, sampler.device), step=5)
    assert len(seen) == 1 and float(seen[0].min()) >= 0.0 and float(seen[0].max()) < 1.0


def test_the_errors_of_plain_colours_are_their_mean_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    batch = PixelSampler(BIG, "cpu", 0, guided=True).draw(5, 2)
    monkeypatch.setattr(type(batch), "add_errors", lambda self, values, kept: seen.append(values))
    samples = PackedSamples.from_counts(torch.tensor([0, 0]), torch.zeros(0), torch.zeros(0))
    color, target = torch.tensor([[0.5, 0.2, 0.9], [0.0, 0.1, 0.2]]), torch.tensor([[0.8, 0.2, 0.3], [0.0, 0.1, 0.2]])
    compare_colors(color, target, batch, samples, tiny_config(steps=2), note=True)
    torch.testing.assert_close(seen[0], torch.tensor([0.3, 0.0]))


def test_training_guides_its_draws() -> None:
    config = tiny_config(steps=40)
    config = replace(config, train=replace(config.train, draw="error"))
    with use_backend("reference"):
        trainer = Trainer(config, BIG)
        errors = trainer.pixels.error_map
        assert errors is not None and bool((errors.errors < 0.0).all())
        trainer.fit()
    met = errors.errors >= 0.0
    assert float(met.float().mean()) > 0.9
    assert float(shares(errors).max() / shares(errors).median()) > 1.2


def test_a_step_with_fixed_shapes_counts_active_rays_only() -> None:
    config = tiny_config(steps=2)
    config = replace(config, train=replace(config.train, draw="error"))
    with use_backend("reference"):
        trainer = Trainer(config, BIG)
        state = StepState.create(step=0, n_active=8, length=4, device=trainer.device)
        budget, optimizer = RayBudget(512, 3072, 64), trainer.optimizer
        result = step_gradients(trainer.model, trainer.pixels, optimizer, state, budget)
        step_update(result, optimizer, state, budget)
    assert trainer.pixels.error_map is not None
    assert int(trainer.pixels.error_map.state_tensors()[2].sum()) == 8


def test_a_device_cannot_be_guided_by_what_it_cannot_read() -> None:
    with pytest.raises(InputError, match="guided: expected pictures that the device can read"):
        PixelSampler(mixed_scene(), "meta", 0, pixels="host", guided=True)
    PixelSampler(mixed_scene(), "cpu", 0, pixels="host", guided=True).draw(0, 10)  # here they are one and the same
