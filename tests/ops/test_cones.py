"""Points of pixels' cones: where they lie, what they stand for, and that backends agree."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.positions import CONE_WIDTH, cone_positions, fold_scale, sample_positions, unfold
from nerfturbo.types import Aabb, PackedSamples

from .cases import Target, assert_close, generator, make_rays, make_samples, require, samples_to

BOX = Aabb((-1.0, -0.8, -1.2), (1.0, 1.1, 0.9))
UNIT = Aabb((0.0,) * 3, (1.0,) * 3)


def _case(n_rays: int, device: str = "cpu") -> tuple[tuple[torch.Tensor, ...], PackedSamples]:
    origins, directions = make_rays(n_rays)
    radii = 0.001 + 0.05 * torch.rand(n_rays, generator=generator(3))
    samples = make_samples(n_rays, 5, tail=9)
    return tuple(value.to(device) for value in (origins, directions, radii)), samples_to(samples, device)


@pytest.mark.parametrize("contraction", ["none", "sphere", "cube"])
@pytest.mark.parametrize("points", [1, 6])
def test_matches_reference(sized: tuple[Target, int], points: int, contraction: str, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    rays, samples = _case(n_rays, target.device)
    space = {"points": points, "aabb": BOX, "contraction": contraction}
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = cone_positions(*rays, samples, **space)  # type: ignore[arg-type]
    with use_backend("reference"):
        want = cone_positions(*rays, samples, **space)  # type: ignore[arg-type]
    for name, one, other in zip(("positions", "footprints"), got, want, strict=True):
        assert bool(torch.isfinite(one).all()), "of the tail too"
        assert_close(name, one, other)


@pytest.mark.parametrize("contraction", ["none", "cube"])
def test_one_point_is_the_middle_of_the_ray(contraction: str):
    rays, samples = _case(20)
    space = {"aabb": BOX, "contraction": contraction}
    positions, footprints = cone_positions(*rays, samples, points=1, **space)  # type: ignore[arg-type]
    middle = sample_positions(*rays[:2], samples, **space)  # type: ignore[arg-type]
    assert_close("positions", positions[:, 0], middle)
    radius = rays[2][samples.ray_indices.long()] * samples.midpoints() / (sum(BOX.size) / 3.0)
    assert_close("footprints", footprints[:, 0], 0.5 * radius * fold_scale(middle, contraction))  # type: ignore[arg-type]


def test_six_points_have_the_mean_and_the_covariance_of_the_cone():
    """Against points drawn in the cone; the covariance is that of the hexagon, whose points differ in t."""
    n, start, end, radius = 4000, 1.0, 3.0, 0.2
    direction = torch.nn.functional.normalize(torch.tensor([[0.3, -0.5, -0.8]]), dim=-1)
    starts = torch.full((n,), start) + torch.arange(n) * 1e-5  # many turns
    samples = PackedSamples.from_counts(torch.tensor([n]), starts, torch.full((n,), end))
    ray = (torch.zeros(1, 3), direction, torch.tensor([radius]))
    found = cone_positions(*ray, samples, points=6, aabb=UNIT)[0].reshape(-1, 3)
    draw = generator(5)
    t = (start**3 + (end**3 - start**3) * torch.rand(400_000, generator=draw)) ** (1 / 3)  # as many as the disc is wide
    disc = torch.randn(400_000, 3, generator=draw)
    disc = torch.nn.functional.normalize(disc - (disc @ direction[0])[:, None] * direction, dim=-1)
    reach = radius * t * torch.rand(400_000, generator=draw).sqrt()
    drawn = t[:, None] * direction + reach[:, None] * disc
    size = drawn.var(0).sum().sqrt()
    assert float((found.mean(0) - drawn.mean(0)).norm()) < 0.02 * size
    assert float((found.t().cov() - drawn.t().cov()).norm()) < 0.05 * size**2


def test_points_lie_on_the_cone_and_between_its_ends():
    rays, samples = _case(40)
    positions = cone_positions(*rays, samples, points=6, aabb=UNIT)[0][: int(samples.n_samples)]
    index = samples.ray_indices[: len(positions)].long()
    away = positions - rays[0][index][:, None]
    along = (away * rays[1][index][:, None]).sum(-1)
    across = (away - along[..., None] * rays[1][index][:, None]).norm(dim=-1)
    assert bool((along > samples.t_starts[: len(along), None]).all())
    assert bool((along < samples.t_ends[: len(along), None]).all())
    assert bool((along[:, 1:] > along[:, :-1]).all())
    assert_close("radius", across, rays[2][index][:, None] * along * math.sqrt(0.5), 1e-4)


def test_turns_belong_to_the_ray_and_not_to_its_place():
    """What is rendered must not depend on how rays are cut into parts; in training each draw turns anew."""
    (origins, directions, radii), samples = _case(9)
    whole = cone_positions(origins, directions, radii, samples, points=6, aabb=BOX)[0]
    last = samples.ray_indices[: int(samples.n_samples)] == 8
    rows = last.nonzero()[:, 0]
    part = PackedSamples.from_counts(torch.tensor([len(rows)]), samples.t_starts[rows], samples.t_ends[rows])
    alone = cone_positions(origins[8:], directions[8:], radii[8:], part, points=6, aabb=BOX)[0]
    assert len(rows) and torch.equal(alone, whole[rows])
    moved = PackedSamples.from_counts(torch.tensor([len(rows)]), part.t_starts + 1e-4, part.t_ends + 1e-4)
    turned = cone_positions(origins[8:], directions[8:], radii[8:], moved, points=6, aabb=BOX)[0]
    assert float((turned - alone).norm(dim=-1).max()) > 1e-3


def test_footprints_follow_the_contraction():
    """Far away space is folded, and what a point stands for with it."""
    ray = (torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.01]))
    samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([99.0]), torch.tensor([101.0]))
    space = {"points": 6, "aabb": Aabb.cube(1.0), "contraction": "sphere"}
    positions, footprints = cone_positions(*ray, samples, **space)  # type: ignore[arg-type]
    away = unfold(positions, "sphere")[0, :, 2] * 2.0 - 1.0
    assert float(away.min()) > 98.0 and float(away.max()) < 102.0
    wide = CONE_WIDTH[6] * 0.01 * 100.0 / 2.0
    assert float(footprints.mean()) == pytest.approx(wide * float(fold_scale(positions, "sphere").mean()), rel=0.02)


def test_no_rays_and_no_samples(target: Target):
    require(target)
    with use_backend(target.backend):  # type: ignore[arg-type]
        for counts in (torch.zeros(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)):
            samples = samples_to(PackedSamples.from_counts(counts, torch.zeros(0), torch.zeros(0)), target.device)
            rays = (torch.zeros(len(counts), 3), torch.ones(len(counts), 3), torch.ones(len(counts)))
            found = cone_positions(*(value.to(target.device) for value in rays), samples, points=6, aabb=BOX)
            assert [tuple(value.shape) for value in found] == [(0, 6, 3), (0, 6)]


def test_errors_name_the_argument():
    (origins, directions, radii), samples = _case(3)
    with pytest.raises(InputError, match=r"radii: expected shape \(3,\)"):
        cone_positions(origins, directions, radii[:2], samples, points=6, aabb=BOX)
    with pytest.raises(InputError, match="points: expected 1 or 6, got 3"):
        cone_positions(origins, directions, radii, samples, points=3, aabb=BOX)
