"""Plug-and-play rendering: closed forms, skipping changes nothing, pruning changes nothing, clear errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nerfturbo.config import GridConfig, NgpConfig
from nerfturbo.errors import InputError
from nerfturbo.fields import InstantNGP
from nerfturbo.ops.packed import packed_cumsum, packed_sum
from nerfturbo.ops.positions import ray_aabb
from nerfturbo.rendering import color_loss, ray_marching, render_rays, volume_rendering
from nerfturbo.rendering.losses import weigh_gradient
from nerfturbo.rendering.render import _sphere
from nerfturbo.sampling import OccupancyGrid
from nerfturbo.types import Aabb, PackedSamples, Rays

BOX = Aabb.cube(1.0)
STEP = 0.01


def make_rays(n: int, seed: int = 0) -> Rays:
    draw = torch.Generator().manual_seed(seed)
    origins = torch.nn.functional.normalize(torch.randn(n, 3, generator=draw), dim=-1) * 3.0
    aims = (torch.rand(n, 3, generator=draw) - 0.5) * 1.2
    return Rays(origins, torch.nn.functional.normalize(aims - origins, dim=-1))


def uniform_samples(rays: Rays, aabb: Aabb, n_samples: int) -> PackedSamples:
    """`n_samples` equal intervals per ray between its entry into the box and its exit; none for a ray that misses."""
    t_min, t_max = ray_aabb(rays.origins, rays.directions, aabb, near=0.0, far=float("inf"))
    steps = torch.arange(n_samples + 1, dtype=t_min.dtype)
    edges = t_min[:, None] + (t_max - t_min)[:, None] * steps / n_samples
    hit = t_max > t_min
    return PackedSamples.from_counts(hit.int() * n_samples, edges[hit, :-1].flatten(), edges[hit, 1:].flatten())


class Ball:
    """Constant density and colour inside a ball."""

    def __init__(self, radius: float = 0.5, density: float = 3.0) -> None:
        self.radius, self.sigma = radius, density

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return torch.where(positions.norm(dim=-1) < self.radius, self.sigma, 0.0)

    def __call__(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.tensor([0.2, 0.5, 0.9]).expand(positions.shape[0], 3), self.density(positions)


def full_grid() -> OccupancyGrid:
    return OccupancyGrid(BOX, GridConfig(resolution=32), step_size=STEP)


def chord(rays: Rays, radius: float) -> Tensor:
    along = -(rays.origins * rays.directions).sum(-1)
    closest = (rays.origins + rays.directions * along[:, None]).norm(dim=-1)
    return 2.0 * (radius**2 - closest**2).clamp(min=0.0).sqrt()


def test_opacity_of_a_ball_is_its_closed_form():
    rays, ball = make_rays(200), Ball()
    out = render_rays(ball, rays, full_grid())
    exact = 1.0 - torch.exp(-ball.sigma * chord(rays, ball.radius))
    assert (out.opacity - exact).abs().max() < 3.0 * STEP * ball.sigma
    assert torch.allclose(out.rgb, out.opacity[:, None] * torch.tensor([0.2, 0.5, 0.9]), atol=1e-5)


def test_skipping_empty_space_changes_no_pixel():
    rays, ball = make_rays(300), Ball()
    grid = full_grid()
    before = render_rays(ball, rays, grid, prune=False)
    centres = grid.cell_positions(torch.arange(grid.n_cells))
    half_diagonal = 0.5 * math.sqrt(3.0) * BOX.size[0] / 32
    grid.set_occupied(centres.norm(dim=-1) < ball.radius + half_diagonal)
    after = render_rays(ball, rays, grid, prune=False)
    assert after.samples is not None and before.samples is not None
    assert after.samples.capacity < 0.35 * before.samples.capacity
    assert (before.rgb - after.rgb).abs().max() < 1e-6


def test_pruning_only_drops_what_is_not_seen():
    rays, ball = make_rays(300), Ball(density=200.0)
    grid = full_grid()
    whole, pruned = (render_rays(ball, rays, grid, prune=prune) for prune in (False, True))
    assert pruned.samples is not None and whole.samples is not None
    assert pruned.samples.capacity < 0.8 * whole.samples.capacity
    assert (whole.rgb - pruned.rgb).abs().max() < 1e-3


def test_either_threshold_asks_for_densities_and_none_asks_nothing():
    rays, ball = make_rays(50), Ball(density=2.0)
    asked = []

    def density(starts: Tensor, ends: Tensor, index: Tensor) -> Tensor:
        asked.append(len(index))
        return ball.density(rays.origins[index] + rays.directions[index] * ((starts + ends) * 0.5)[:, None])

    for eps, alpha, times in ((0.0, 0.0, 0), (0.0, 1e-3, 1), (1e-4, 0.0, 2), (1e-4, 1e-3, 3)):
        ray_marching(rays, full_grid(), sigma_fn=density, early_stop_eps=eps, alpha_thre=alpha)
        assert len(asked) == times


def test_background_fills_what_is_not_opaque():
    rays = make_rays(50)
    out = render_rays(Ball(density=0.0), rays, full_grid(), background=torch.tensor([0.1, 0.2, 0.3]))
    assert torch.allclose(out.rgb, torch.tensor([0.1, 0.2, 0.3]).expand(50, 3))
    per_ray = torch.rand(50, 3)
    assert torch.allclose(render_rays(Ball(density=0.0), rays, full_grid(), background=per_ray).rgb, per_ray)


def test_depth_is_where_the_surface_is():
    rays = Rays(torch.tensor([[0.0, 0.0, 3.0]]), torch.tensor([[0.0, 0.0, -1.0]]))
    out = render_rays(Ball(density=500.0), rays, full_grid())
    assert abs(out.depth.item() - 2.5) < 2 * STEP


def test_rays_that_miss_and_no_rays():
    away = Rays(torch.full((3, 3), 5.0), torch.nn.functional.normalize(torch.ones(3, 3), dim=-1))
    out = render_rays(Ball(), away, full_grid(), background=torch.ones(3))
    assert torch.equal(out.rgb, torch.ones(3, 3)) and out.opacity.sum() == 0
    none = Rays(torch.zeros(0, 3), torch.zeros(0, 3))
    assert render_rays(Ball(), none, full_grid()).rgb.shape == (0, 3)


def test_any_number_of_channels():
    rays = make_rays(20)
    samples = uniform_samples(rays, BOX, 16)
    out = volume_rendering(lambda a, b, i: (torch.ones(a.shape[0], 7), torch.ones(a.shape[0])), samples)
    assert out.rgb.shape == (20, 7)
    assert torch.allclose(out.rgb, out.opacity[:, None].expand(20, 7), atol=1e-6)


def test_fixed_capacity_gives_the_same_pixels():
    rays, grid = make_rays(64), full_grid()
    exact = ray_marching(rays, grid)
    fixed = ray_marching(rays, grid, capacity=exact.capacity + 100)
    assert fixed.capacity == exact.capacity + 100
    assert torch.equal(fixed.offsets, exact.offsets) and int(fixed.n_rays_kept) == 64  # type: ignore[arg-type]
    small = ray_marching(rays, grid, capacity=exact.capacity // 2)
    kept = int(small.n_rays_kept)  # type: ignore[arg-type]
    assert 0 < kept < 64 and int(small.offsets[-1]) <= exact.capacity // 2
    assert torch.equal(small.offsets[: kept + 1], exact.offsets[: kept + 1])


def test_alpha_threshold_is_capped_by_the_grid_mean():
    """Uncapped, a threshold above every alpha of a young field would delete every sample and every gradient."""
    rays, grid = make_rays(64), full_grid()
    grid.update(0, lambda p: torch.full((p.shape[0],), 0.1))
    kept = ray_marching(rays, grid, sigma_fn=lambda a, b, i: torch.full_like(a, 0.11), alpha_thre=0.5)
    assert kept.capacity > 0
    old = full_grid()
    old.update(0, lambda p: torch.full((p.shape[0],), 1000.0))
    thin = {"sigma_fn": lambda a, b, i: torch.full_like(a, 0.11), "alpha_thre": 0.4}
    assert ray_marching(rays, old, **thin).capacity == 0
    both = ray_marching(rays, [old, grid], scene_indices=torch.arange(64) % 2, **thin)
    assert both.capacity == kept.capacity  # the younger of two decides


def test_gradients_reach_the_field():
    field = InstantNGP(BOX, NgpConfig(n_levels=4, log2_entries=10, max_resolution=32, width=16))
    out = render_rays(field, make_rays(32), full_grid(), background=torch.ones(3))
    color_loss(out.rgb, torch.zeros(32, 3)).backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_rendering_is_the_formula():
    """Weights are transmittance times alpha; a pixel is their sum with the colours."""
    rays, ball = make_rays(40), Ball()
    samples = uniform_samples(rays, BOX, 64)
    density = ball.density(samples.positions(rays))
    thickness = density * (samples.t_ends - samples.t_starts)
    transmittance = torch.exp(-packed_cumsum(thickness, samples.offsets, exclusive=True))
    weights = torch.where(samples.used, transmittance * -torch.expm1(-thickness), 0.0)
    colors = torch.rand(samples.capacity, 2)
    out = volume_rendering(lambda a, b, i: (colors, density), samples)
    assert torch.allclose(packed_sum(weights[:, None] * colors, samples.offsets), out.rgb, atol=1e-6)
    assert torch.allclose(out.weights, weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_loss_counts_only_kept_rays(kind: str):
    rgb, target = torch.rand(10, 3), torch.rand(10, 3)
    kept = color_loss(rgb, target, kind=kind, n_rays_kept=torch.tensor(4, dtype=torch.int32))  # type: ignore[arg-type]
    assert math.isclose(kept.item(), color_loss(rgb[:4], target[:4], kind=kind).item(), rel_tol=1e-5)  # type: ignore[arg-type]
    none = color_loss(rgb, target, kind=kind, n_rays_kept=torch.tensor(0, dtype=torch.int32))  # type: ignore[arg-type]
    assert none.item() == 0.0


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_loss_weighs_the_rays(kind: str):
    rgb, target, weights = torch.rand(10, 3), torch.rand(10, 3), 2.0 * torch.rand(10)
    each = torch.stack([color_loss(rgb[i : i + 1], target[i : i + 1], kind=kind) for i in range(10)])  # type: ignore[arg-type]
    weighed = color_loss(rgb, target, kind=kind, weights=weights)  # type: ignore[arg-type]
    assert math.isclose(weighed.item(), (weights * each).mean().item(), rel_tol=1e-5)


def test_weighing_a_gradient_is_weighing_the_loss():
    values, weights = torch.randn(5, 4, requires_grad=True), torch.rand(5)
    (weighed,) = torch.autograd.grad(weigh_gradient(values, weights).square().sum(), values)
    (direct,) = torch.autograd.grad((weights[:, None] * values.square()).sum(), values)
    assert torch.allclose(weighed, direct)


def test_density_with_an_extra_dimension_is_named():
    rays = make_rays(4)
    samples = uniform_samples(rays, BOX, 8)
    with pytest.raises(InputError, match=r"density: expected shape \(n_samples,\) = \(32,\), got \(32, 1\); squeeze"):
        volume_rendering(lambda a, b, i: (torch.ones(32, 3), torch.ones(32, 1)), samples)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_loss_of_doubles_is_that_of_floats(kind) -> None:
    rgb, target = torch.rand(2, 7, 3, generator=torch.Generator().manual_seed(3)).unbind(0)
    one, two = color_loss(rgb, target, kind=kind), color_loss(rgb.double(), target.double(), kind=kind)
    assert two.dtype == torch.float64 and float(two) == pytest.approx(float(one), rel=1e-5)


def test_places_about_a_point_are_spread_evenly() -> None:
    """Unit vectors whose mean is zero and whose moments are those of the sphere."""
    around = _sphere(torch.device("cpu")).double()
    assert torch.allclose(around.norm(dim=-1), torch.ones(len(around), dtype=torch.float64), atol=1e-6)
    assert float(around.mean(0).norm()) < 0.02
    assert torch.allclose(around.T @ around / len(around), torch.eye(3, dtype=torch.float64) / 3.0, atol=0.02)
    assert float((around @ around.T - 2.0 * torch.eye(len(around))).amax()) < 0.9  # no two alike
