"""Depth supervision: the loss is what it says, and known depths put surfaces where they are in views never seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exact_depth import exact_keypoints, ray_distance
from nerfturbo.config import LossConfig
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.keypoints import Keypoints
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.presets import preset
from nerfturbo.training import loss as loss_module
from nerfturbo.training.loss import FARTHEST, depth_errors, depth_loss, place_samples
from nerfturbo.training.trainer import Trainer
from nerfturbo.types import PackedSamples, Rays
from tests.tiny import ball_keypoints, ball_scene, tiny_config


def even_samples(n_rays: int, n: int, far: float = 4.0) -> PackedSamples:
    edges = torch.linspace(0.0, far, n + 1, dtype=torch.float64)
    counts = torch.full((n_rays,), n)
    return PackedSamples.from_counts(counts, edges[:-1].repeat(n_rays), edges[1:].repeat(n_rays))


def test_it_is_the_mean_distance_of_where_light_ends() -> None:
    samples, z = even_samples(3, 40), torch.tensor([1.05, 2.05, 2.05], dtype=torch.float64)
    density = torch.zeros(3, 40, dtype=torch.float64)
    density[0, 10] = 1e9  # all light ends at the point
    density[1, 10] = 1e9  # and here before it, at 1.05
    loss = depth_errors(density.view(-1), samples, z)
    assert loss[0] < 1e-12 and float(loss[1]) == pytest.approx(math.log(2.05 / 1.05))
    assert float(loss[2]) == FARTHEST  # nothing there: opaque anywhere near would be better


def test_fog_before_a_point_does_not_make_up_for_light_that_passes_it() -> None:
    """Half of the light ends before the point and half behind it, at its distance in the mean."""
    samples, z = even_samples(1, 40), torch.tensor([2.05], dtype=torch.float64)
    density = torch.zeros(40, dtype=torch.float64)
    density[10], density[30] = math.log(2.0) / 0.1, 1e9  # at 1.05 and at 3.05
    loss = depth_errors(density, samples, z)
    assert float(loss) == pytest.approx(0.5 * (math.log(2.05 / 1.05) + math.log(3.05 / 2.05)))


def test_gradients_clear_the_way_and_fill_the_place() -> None:
    samples, z = even_samples(1, 40), torch.tensor([2.05], dtype=torch.float64)
    density = torch.full((40,), 0.3, dtype=torch.float64, requires_grad=True)
    depth_errors(density, samples, z).sum().backward()
    assert density.grad is not None
    assert (density.grad[:8] > 0.0).all() and (density.grad[18:23] < 0.0).all()
    few = even_samples(2, 6)
    values = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([1.7, 3.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: depth_errors(given, few, target), (values,))


def test_rays_that_did_not_fit_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capacity that holds a part of the rays gives a finite loss of these alone."""
    monkeypatch.setattr(loss_module, "DEPTH_RAYS", 64)
    scene = replace(ball_scene(), keypoints=ball_keypoints(ball_scene()))
    config = replace(tiny_config(), loss=LossConfig(depth=1.0))
    config = replace(config, train=replace(config.train, batch_samples=8))
    config = replace(config, sampler=replace(config.sampler, prune=False))
    model = Trainer(config, scene).model
    seen: list[Tensor] = []
    monkeypatch.setattr(loss_module, "depth_errors", lambda *given: seen.append(depth_errors(*given)) or seen[-1])

    def place(*given: object, **options: object) -> tuple[PackedSamples, Tensor]:
        samples, marched = place_samples(*given, **options)  # type: ignore[arg-type]
        assert samples.n_rays_kept is not None
        seen.append(samples.n_rays_kept)
        return samples, marched

    loss = depth_loss(model, step=0, fixed=True, first=0, place=place)
    kept, errors = int(seen[0]), seen[1].detach()
    assert 0 < kept < 64 and float(errors[kept]) == FARTHEST  # a ray without samples
    assert loss.item() == pytest.approx(errors[:kept].mean().item()) and loss.item() < FARTHEST


def test_it_is_a_mean_over_weighted_rays() -> None:
    config, found = replace(tiny_config(), loss=LossConfig(depth=1.0)), []
    for factor in (1.0, 4.0):
        known = ball_keypoints(ball_scene())
        known = Keypoints(known.rays, known.distances, known.weights * factor)
        model = Trainer(config, replace(ball_scene(), keypoints=known)).model
        found.append(depth_loss(model, step=0, fixed=False, first=0, place=place_samples).item())
    assert 0.0 < found[0] <= FARTHEST and found[1] == pytest.approx(found[0])


def test_known_depths_of_ones_own_are_taken_and_checked() -> None:
    scene = ball_scene()
    config = replace(tiny_config(steps=2), loss=LossConfig(depth=0.1))
    trainer = Trainer(config, replace(scene, keypoints=ball_keypoints(scene)))
    assert trainer.model.keypoints is not None and len(trainer.model.keypoints) == len(scene)
    trainer.fit()
    with pytest.raises(InputError, match="COLMAP reconstruction"):
        Trainer(config, scene)
    rays = Rays(torch.zeros(2, 3), torch.eye(3)[:2])
    with pytest.raises(InputError, match=r"distances: expected one per ray, \(2,\), got \(3,\)"):
        Keypoints(rays, torch.ones(3), torch.ones(2))


def test_exact_distances_agree_with_the_pictures() -> None:
    scene = builtin_scene("toybox", "test", resolution=24, n_views=2)
    for index in range(2):
        alpha = scene.images.image(index)[..., 3].reshape(-1)
        hits = ray_distance("toybox", scene.cameras.image_rays(index)).isfinite()
        assert torch.equal(hits[alpha == 1.0], torch.ones_like(hits[alpha == 1.0]))
        assert not hits[alpha == 0.0].any() and (alpha == 1.0).any() and (alpha == 0.0).any()


def test_exact_depths_belong_to_built_in_scenes() -> None:
    with pytest.raises(InputError, match="toybox"):
        exact_keypoints(ball_scene(), 3, seed=0)


def test_few_views_with_known_depths_have_the_right_surfaces_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pictures of the toy box, and how far away 241 places of them are: in views that were not trained on, rays
    end nearer to the surface (half as far from it, with three seeds), and pictures get no worse (1.2 dB better)."""
    monkeypatch.setattr(loss_module, "DEPTH_RAYS", 64)
    few = builtin_scene("toybox", "train", resolution=40, n_views=5)
    test = builtin_scene("toybox", "test", resolution=40, n_views=3)
    known, asked = exact_keypoints(few, 120, seed=0), exact_keypoints(test, 120, seed=1)
    base = preset("ngp-cpu")
    base = replace(base, train=replace(base.train, steps=120, batch_samples=1 << 12))
    error, psnr = {}, {}
    for weight in (0.0, 0.05):
        trainer = Trainer(replace(base, loss=LossConfig(depth=weight)), replace(few, keypoints=known))
        trainer.fit()
        model = trainer.model.eval()
        with torch.no_grad():
            depth = model.render_rays(asked.rays).depth
        error[weight] = float((depth.clamp(min=1e-6) / asked.distances).log().abs().median())
        psnr[weight] = evaluate(model, test, with_ssim=False).psnr
    assert error[0.05] < 0.75 * error[0.0], error
    assert psnr[0.05] > psnr[0.0], psnr


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_it_is_captured_with_the_step(deterministic: None) -> None:
    scene = builtin_scene("toybox", "train", resolution=100, n_views=6)
    scene = replace(scene, keypoints=exact_keypoints(scene, 100, seed=0))
    states = []
    for capture in (True, False):
        config = replace(preset("ngp"), loss=LossConfig(depth=0.05))
        config = replace(config, train=replace(config.train, steps=48, batch_samples=1 << 15, capture=capture))
        trainer = Trainer(config, scene, device="cuda")
        trainer.fit()
        states.append(trainer.model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
