"""Marching: every sample in an occupied cell, none missed, whole rays into a fixed capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import OccupancyBits, StepRule, march, ray_aabb, use_backend
from nerfturbo.ops.march import pack_bits
from nerfturbo.ops.march.reference import is_occupied
from nerfturbo.types import Aabb, PackedSamples

from .cases import (
    Target,
    assert_packed,
    assert_same_samples,
    generator,
    grid_to,
    make_grid,
    make_rays,
    require,
    spare_interpreter,
)

STEP = StepRule(step_size=0.02)
RULES = {
    "plain": STEP,
    "near-far": StepRule(step_size=0.03, near=2.3, far=3.4),
    "cone": StepRule(step_size=0.01, near=0.1, cone_angle=1 / 128),
    "cone-from-near": StepRule(step_size=0.01, near=2.0, cone_angle=0.02),
    "coarse": StepRule(step_size=0.3),  # longer than a cell: samples may jump over occupied ones
}


def _both(target: Target, origins: Tensor, directions: Tensor, grid: OccupancyBits, rule: StepRule, **options):
    origins, directions, grid = origins.to(target.device), directions.to(target.device), grid_to(grid, target.device)
    options = {key: value.to(target.device) if isinstance(value, Tensor) else value for key, value in options.items()}
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            results.append(march(origins, directions, grid, rule, **options))
    return results


def _exact(target: Target, rule: StepRule) -> bool:
    """numba decides on the same bits as the reference, as long as no exponential is involved."""
    return target.backend == "cpu" and rule.cone_angle == 0.0


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_matches_reference(sized: tuple[Target, int], name: str, levels: int, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    spare_interpreter(target, unless=levels == 1 or name in ("plain", "cone"))
    rule = RULES[name] if not target.interpreted else replace(RULES[name], step_size=max(RULES[name].step_size, 0.05))
    origins, directions = make_rays(n_rays, radius=3.0 if levels == 1 else 2.0)
    jitter = torch.rand(n_rays, generator=generator(1))
    grid = make_grid(target.pick(32, 8), levels)
    got, want = _both(target, origins, directions, grid, rule, jitter=jitter)
    assert_same_samples(got, want, rule, exact=_exact(target, rule))


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.6, 1.1])
def test_any_occupancy(target: Target, fraction: float):
    require(target)
    origins, directions = make_rays(target.pick(300, 8))
    rule = replace(STEP, step_size=0.02 if not target.interpreted else 0.1)
    resolution = target.pick(48, 16)  # rows of cells that begin and end within a word
    got, want = _both(target, origins, directions, make_grid(resolution, fraction=fraction), rule)
    assert_same_samples(got, want, rule, exact=_exact(target, rule))
    assert got.capacity == want.capacity and (fraction > 0.0 or got.capacity == 0)


def test_from_inside_and_without_jitter(target: Target):
    """Cameras inside the box, as in a room, at several levels."""
    require(target)
    origins, directions = make_rays(target.pick(300, 8), radius=0.3)
    rule = StepRule(step_size=0.05, near=0.05)
    got, want = _both(target, origins, directions, make_grid(16, 3), rule)
    assert_same_samples(got, want, rule, exact=_exact(target, rule))


@pytest.mark.parametrize("axis", range(3))
def test_rounding_of_far_cameras_loses_no_sample(target: Target, axis: int):
    """Along an axis, where lattice and faces meet and the margin of a step is all that keeps them apart."""
    require(target)
    spare_interpreter(target, unless=axis == 2)
    origins = 1.5 * torch.rand(target.pick(300, 8), 3, generator=generator(4)) - 0.75
    origins[:, axis] = -300.0
    directions = torch.eye(3)[axis].repeat(len(origins), 1)
    rule = StepRule(step_size=0.05 if not target.interpreted else 0.2, near=298.0)
    got, want = _both(target, origins, directions, make_grid(16), rule)
    assert_same_samples(got, want, rule, exact=_exact(target, rule))


def test_limits(target: Target):
    require(target)
    n_rays = target.pick(300, 12)
    origins, directions = make_rays(n_rays)
    low = 2.0 + torch.rand(n_rays, generator=generator(2))
    limits = torch.stack([low, low + 1.5 * torch.rand(n_rays, generator=generator(3)) - 0.2], -1)
    limits[0] = torch.tensor([-5.0, 1e9])
    rule = replace(STEP, step_size=0.05)
    got, want = _both(target, origins, directions, make_grid(16), rule, limits=limits)
    assert_same_samples(got, want, rule, exact=_exact(target, rule))
    middle, ray = got.midpoints(), got.ray_indices.long()
    limits = limits.to(target.device)
    assert bool(((middle >= limits[ray, 0]) & (middle < limits[ray, 1])).all())


def test_rays_beyond_the_active_count_get_nothing(target: Target):
    require(target)
    n_rays = target.pick(200, 12)
    origins, directions = make_rays(n_rays)
    grid, rule = make_grid(16), replace(STEP, step_size=0.05)
    for active in (0, 5, n_rays, n_rays + 9):
        count = torch.tensor(active, dtype=torch.int32)
        got, want = _both(target, origins, directions, grid, rule, n_active=count, capacity=4096)
        assert_same_samples(got, want, rule, exact=_exact(target, rule))
        assert not (got.offsets[min(active, n_rays) :] - got.offsets[-1]).any()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 1.7])
def test_capacity_keeps_whole_rays_from_the_first_on(target: Target, share: float, poisoned_empty: None):
    """Compared with the same backend's exact-length result: a prefix of rays, then nothing, then a clean tail."""
    require(target)
    n_rays = target.pick(200, 12)
    origins, directions = (t.to(target.device) for t in make_rays(n_rays))
    grid, rule = grid_to(make_grid(16), target.device), replace(STEP, step_size=0.05)
    with use_backend(target.backend):
        full = march(origins, directions, grid, rule)
        capacity = max(1, int(share * full.capacity))
        got = march(origins, directions, grid, rule, capacity=capacity)
    assert_packed(got)
    assert full.n_rays_kept is None
    assert got.capacity == capacity
    assert got.n_rays_kept is not None
    assert got.n_rays_kept.dtype == torch.int32
    kept, used = int(got.n_rays_kept), int(got.offsets[-1])
    assert torch.equal(got.offsets[: kept + 1], full.offsets[: kept + 1])
    assert bool((got.offsets[kept:] == used).all())
    assert kept == n_rays or int(full.offsets[kept + 1]) > capacity
    assert torch.equal(got.t_starts[:used], full.t_starts[:used])
    assert torch.equal(got.t_ends[:used], full.t_ends[:used])


def test_no_rays_and_rays_that_miss(target: Target):
    require(target)
    grid = make_grid(16, fraction=1.1)
    for origins, directions in (
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.full((5, 3), 9.0), torch.tensor([[0.0, 1.0, 0.0]]).expand(5, 3)),
        (torch.full((2, 3), float("nan")), torch.tensor([[0.0, 1.0, 0.0]]).expand(2, 3)),
    ):
        for capacity in (None, 8):
            got, want = _both(target, origins, directions, grid, STEP, capacity=capacity)
            assert_same_samples(got, want, STEP, exact=True)
            assert got.capacity == (capacity or 0)
            assert not got.offsets.any()


def _march(target: Target, origins: Tensor, directions: Tensor, grid: OccupancyBits, rule: StepRule) -> PackedSamples:
    with use_backend(target.backend):
        return march(origins.to(target.device), directions.to(target.device), grid_to(grid, target.device), rule)


def test_full_grid_is_uniform_sampling(target: Target):
    require(target)
    origins, directions = make_rays(target.pick(100, 8))
    grid = OccupancyBits(torch.full((16**3 // 32,), -1, dtype=torch.int32), Aabb.cube(1.0), 16)
    rule = StepRule(step_size=0.05)
    samples = _march(target, origins, directions, grid, rule)
    t_min, t_max = ray_aabb(origins, directions, grid.aabb)
    for ray, (first, count) in enumerate(samples.packed_info.tolist()):
        inside = [k for k in range(200) if t_min[ray] + 1e-4 <= (k + 0.5) * 0.05 < t_max[ray] - 1e-4]
        got = (samples.t_starts[first : first + count].double() / 0.05).round().long().tolist()
        assert set(inside) <= set(got)
        assert len(got) <= len(inside) + 2
        assert got == sorted(got)


def test_midpoints_are_occupied_and_none_is_missed(target: Target):
    """Brute force: every lattice midpoint well inside an occupied cell has its sample, every sample its cell."""
    require(target)
    origins, directions = make_rays(target.pick(150, 6))
    grid = make_grid(16, fraction=0.1)
    rule = StepRule(step_size=0.04, near=0.5)
    samples = _march(target, origins, directions, grid, rule)
    ray = samples.ray_indices.long().cpu()
    points = origins[ray] + directions[ray] * samples.midpoints().cpu()[:, None]
    low, high = grid.aabb.tensor()
    cell = (points - low) / (high - low) * 16
    clear = ((cell - cell.round()).abs() > 1e-3).all(-1)
    assert bool(is_occupied(grid, points)[clear].all())
    k = torch.arange(160)
    middle = rule.near + (k + 0.5) * rule.step_size
    lattice = origins[:, None] + directions[:, None] * middle[:, None]
    cell = (lattice - low) / (high - low) * 16
    clear = ((cell > 1e-3) & (cell < 16 - 1e-3) & ((cell - cell.round()).abs() > 1e-3)).all(-1)
    wanted = clear & is_occupied(grid, lattice)
    have = torch.zeros_like(wanted)
    have[ray, ((samples.t_starts.cpu() - rule.near) / rule.step_size).round().long()] = True
    assert int(wanted.sum()) > 50 // target.pick(1, 10)
    assert bool(have[wanted].all())


def test_permuting_rays_permutes_the_result(target: Target):
    require(target)
    origins, directions = make_rays(target.pick(64, 8))
    order = torch.randperm(len(origins), generator=generator())
    grid, rule = make_grid(16), StepRule(step_size=0.05)
    plain = _march(target, origins, directions, grid, rule)
    shuffled = _march(target, origins[order], directions[order], grid, rule)
    for new, old in enumerate(order.tolist()):
        for name in ("t_starts", "t_ends"):
            a = getattr(plain, name)[plain.offsets[old] : plain.offsets[old + 1]]
            b = getattr(shuffled, name)[shuffled.offsets[new] : shuffled.offsets[new + 1]]
            assert torch.equal(a, b)


def test_jitter_shifts_the_lattice(target: Target):
    require(target)
    origins, directions = torch.tensor([[0.0, 0.0, -2.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    grid = OccupancyBits(torch.full((8**3 // 32,), -1, dtype=torch.int32), Aabb.cube(1.0), 8)
    got, _ = _both(target, origins, directions, grid, StepRule(step_size=0.25), jitter=torch.tensor([0.5]))
    torch.testing.assert_close(got.t_starts.cpu(), torch.arange(0.875, 2.7, 0.25), atol=1e-6, rtol=0.0)


def test_steps_grow_with_the_cone(target: Target):
    require(target)
    origins, directions = make_rays(4, radius=0.1)
    grid = OccupancyBits(torch.full((2 * 8**3 // 32,), -1, dtype=torch.int32), Aabb.cube(1.0), 8, 2)
    rule = StepRule(step_size=0.02, near=0.1, cone_angle=0.05)
    samples = _march(target, origins, directions, grid, rule)
    lengths = (samples.t_ends - samples.t_starts).cpu()
    wanted = torch.where(
        samples.t_ends.cpu() < 0.4, torch.full_like(lengths, 0.02), samples.t_starts.cpu() * rule.cone_angle
    )
    across = (samples.t_starts.cpu() < 0.4) & (samples.t_ends.cpu() >= 0.4)
    torch.testing.assert_close(lengths[~across], wanted[~across], rtol=1e-3, atol=1e-5)


def test_finest_level_decides():
    """A point inside the inner box asks the inner level only; outside it, the outer one."""
    inner, outer = torch.zeros(8**3, dtype=torch.bool), torch.ones(8**3, dtype=torch.bool)
    grid = OccupancyBits(pack_bits(torch.cat([inner, outer])), Aabb.cube(1.0), 8, 2)
    origins, directions = torch.tensor([[0.01, 0.02, -3.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    samples = march(origins, directions, grid, StepRule(step_size=0.1))
    middle = samples.midpoints() - 3.0
    assert samples.capacity == 20
    assert bool(((middle.abs() > 1.0) & (middle.abs() < 2.0)).all())


def test_errors_name_the_argument():
    grid = make_grid(8)
    origins = torch.zeros(3, 3)
    with pytest.raises(InputError, match="directions: expected shape"):
        march(origins, origins[:2], grid, STEP)
    with pytest.raises(InputError, match="jitter: expected shape"):
        march(origins, origins, grid, STEP, jitter=torch.zeros(2))
    with pytest.raises(InputError, match="limits: expected shape"):
        march(origins, origins, grid, STEP, limits=torch.zeros(3))
    with pytest.raises(InputError, match="capacity: expected at least 1"):
        march(origins, origins, grid, STEP, capacity=0)
    with pytest.raises(InputError, match="step_size: expected a finite number > 0"):
        StepRule(step_size=0.0)
    with pytest.raises(InputError, match="far: expected more than near"):
        StepRule(step_size=0.1, near=2.0, far=1.0)
    with pytest.raises(InputError, match="bits: expected shape"):
        OccupancyBits(torch.zeros(3, dtype=torch.int32), Aabb.cube(1.0), 8)
    with pytest.raises(InputError, match="resolution: expected a multiple of 4"):
        OccupancyBits(torch.zeros(3, dtype=torch.int32), Aabb.cube(1.0), 9)
