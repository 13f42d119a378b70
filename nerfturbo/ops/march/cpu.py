"""Marching from cell to cell, with exactly the samples that testing every lattice point would give.

One look at a cell decides for all lattice points in it; where a whole brick of BRICK^3 cells is empty, for all in the
brick. Decisions use the reference's float32 operations in its order, without fused multiply-add, and a leap ends short
of the cell's face by more than rounding can move a point. (With a cone angle the two exponentials may round differently
in the last bit.) A task = a chunk of rays: count, prefix sum over whole rays, write.

NumPy makes the bits and bricks of the occupancy grid; their mean is fp64. Deterministic.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from .._checks import refuse
from .._cpu import array, as_float32, jit, launch
from ..packed.cpu import empty_samples, fit_offsets
from ..positions.cpu import ray_aabb
from . import OccupancyBits, StepRule

CHUNK = 64  # rays
BRICK = 4  # cells per axis
ROUNDING = np.float32(4e-6)  # relative to the coordinates: several times what rounding can move a point
WALK, WRITE = np.int64(0), np.int64(1)
X, Y, Z = np.int64(0), np.int64(1), np.int64(2)
ZERO, HALF, ONE, TINY = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(1e-12)


class _Rule(NamedTuple):
    """The step rule as float32; `log_growth` is 0 without a cone angle."""

    near: np.float32
    step: np.float32
    bend: np.float32  # t_c, where steps begin to grow
    bend_index: np.float32  # u_c
    log_growth: np.float32


class _Grid(NamedTuple):
    bits: np.ndarray  # uint32
    bricks: np.ndarray  # (levels, n, n, n) bool; n = 0 where bricks do not fit the levels' boxes
    center: np.ndarray  # (3,) float32
    half: np.ndarray  # (3,) float32, half the size of level 0
    resolution: int
    levels: int


@jit(exact=True, inline=True)
def _lattice(rule, u):
    """t(u) of the step rule."""
    if rule.log_growth == ZERO or u < rule.bend_index:
        return rule.near + u * rule.step
    return rule.bend * np.float32(math.exp(max(u - rule.bend_index, ZERO) * rule.log_growth))


@jit(exact=True, inline=True)
def _inverse(rule, t):
    """u(t), the inverse of `_lattice`."""
    if rule.log_growth == ZERO or t < rule.bend:
        return (t - rule.near) / rule.step
    return rule.bend_index + np.float32(math.log(max(t, rule.bend) / rule.bend)) / rule.log_growth


@jit(exact=True, inline=True)
def _midpoint(rule, u):
    return (_lattice(rule, u) + _lattice(rule, u + ONE)) * HALF


@jit(exact=True, inline=True)
def _look(grid, x, y, z):
    """Is the point in an occupied cell? With it, 2^level and the box of like cells: first cell, cells per axis."""
    ux, uy = (x - grid.center[0]) / grid.half[0], (y - grid.center[1]) / grid.half[1]
    uz = (z - grid.center[2]) / grid.half[2]
    largest, level, scale, r = max(abs(ux), max(abs(uy), abs(uz))), 0, ONE, grid.resolution
    while level < grid.levels - 1 and largest * scale > ONE:
        level, scale = level + 1, scale * HALF
    cells = HALF * np.float32(r)
    cx = min(max(int(math.floor((ux * scale + ONE) * cells)), 0), r - 1)
    cy = min(max(int(math.floor((uy * scale + ONE) * cells)), 0), r - 1)
    cz = min(max(int(math.floor((uz * scale + ONE) * cells)), 0), r - 1)
    bx, by, bz = cx // BRICK, cy // BRICK, cz // BRICK
    if grid.bricks.shape[1] > 0 and not grid.bricks[level, bx, by, bz]:
        return False, ONE / scale, bx * BRICK, by * BRICK, bz * BRICK, BRICK
    i = ((level * r + cx) * r + cy) * r + cz
    occupied = (grid.bits[i >> 5] >> np.uint32(i & 31)) & np.uint32(1) != 0
    return occupied, ONE / scale, cx, cy, cz, 1


@jit(exact=True, inline=True)
def _leave(grid, axis, growth, cell, size, origin, inverse, margin):
    """When a ray passes the last face of the cells cell ... cell + size - 1, early by the margin."""
    face = cell + size if inverse > ZERO else cell
    unit = np.float32(face) * (np.float32(2.0) / np.float32(grid.resolution)) - ONE
    shift = -margin if inverse > ZERO else margin
    return (grid.center[axis] + unit * grid.half[axis] * growth + shift - origin) * inverse


@jit(exact=True, inline=True)
def _last_before(rule, jitter, k, t):
    """The last lattice index from k on whose midpoint is surely not past t."""
    last = max(np.float32(math.floor(_inverse(rule, t) - jitter - HALF)), k)
    if rule.log_growth != ZERO:  # there midpoints lie a little past t(u + 1/2)
        while last > k and _midpoint(rule, last + jitter) > t:
            last -= ONE
    return last


@jit(exact=True, inner=True)
def _walk(o, d, ray, jitter, grid, rule, t_min, t_max, k_first, k_last, write, starts, ends, rays, target):
    """From cell to cell between two lattice indices: count the samples and, with WRITE, store them from `target` on.
    Returns the count and the first and last index that was kept."""
    ox, oy, oz, dx, dy, dz = o[ray, 0], o[ray, 1], o[ray, 2], d[ray, 0], d[ray, 1], d[ray, 2]
    ix = ONE / (dx if abs(dx) > TINY else TINY)
    iy = ONE / (dy if abs(dy) > TINY else TINY)
    iz = ONE / (dz if abs(dz) > TINY else TINY)
    margin = ROUNDING * (abs(ox) + abs(oy) + abs(oz) + t_max)
    count, kept_first, kept_last, k = 0, k_last, k_first - ONE, k_first
    while k <= k_last:
        middle = _midpoint(rule, k + jitter)
        if middle >= t_max:
            break
        if middle < t_min:
            k += ONE
            continue
        occupied, growth, x, y, z, size = _look(grid, ox + dx * middle, oy + dy * middle, oz + dz * middle)
        leave = min(t_max - margin, _leave(grid, X, growth, x, size, ox, ix, margin))
        leave = min(leave, _leave(grid, Y, growth, y, size, oy, iy, margin))
        leave = min(leave, _leave(grid, Z, growth, z, size, oz, iz, margin))
        last = min(_last_before(rule, jitter, k, leave), k_last) if leave > middle else k
        if occupied:
            if count == 0:
                kept_first = k
            kept_last = last
            n = int(last - k) + 1
            if write == WRITE:
                for j in range(n):
                    u = k + np.float32(j) + jitter
                    starts[target + count + j] = _lattice(rule, u)
                    ends[target + count + j] = _lattice(rule, u + ONE)
                    rays[target + count + j] = ray
            count += n
        k = last + ONE
    return count, kept_first, kept_last


@jit(exact=True)
def _count(first, last, origins, directions, jitter, limits, n_active, grid, rule, t_min, t_max, spans, counts):
    """counts (n_rays,), and in spans (n_rays, 2) the first and last lattice index of each ray's samples."""
    nothing, no_rays = np.empty(0, np.float32), np.empty(0, np.int32)
    for ray in range(first, last):
        counts[ray] = 0
        if limits.shape[0] > 0:
            t_min[ray], t_max[ray] = max(t_min[ray], limits[ray, 0]), min(t_max[ray], limits[ray, 1])
        if ray >= n_active or not t_max[ray] > t_min[ray]:
            continue
        shift = jitter[ray] if jitter.shape[0] > 0 else ZERO
        k_first = max(np.float32(math.floor(_inverse(rule, t_min[ray]) - shift)) - ONE, ZERO)
        k_last = np.float32(math.ceil(_inverse(rule, t_max[ray]))) + ONE  # the walk ends at t_max
        counts[ray], spans[ray, 0], spans[ray, 1] = _walk(
            origins, directions, ray, shift, grid, rule, t_min[ray], t_max[ray], k_first, k_last,
            WALK, nothing, nothing, no_rays, np.int64(0),
        )  # fmt: skip


@jit(exact=True)
def _write(first, last, origins, directions, jitter, grid, rule, t_min, t_max, spans, offsets, starts, ends, rays):
    for ray in range(first, last):
        if offsets[ray + 1] > offsets[ray]:
            shift = jitter[ray] if jitter.shape[0] > 0 else ZERO
            _walk(
                origins, directions, ray, shift, grid, rule, t_min[ray], t_max[ray], spans[ray, 0], spans[ray, 1],
                WRITE, starts, ends, rays, np.int64(offsets[ray]),
            )  # fmt: skip


def _rule(rule: StepRule) -> _Rule:
    numbers = (rule.near, rule.step_size, *rule.bend, math.log1p(rule.cone_angle))
    return _Rule(*(np.float32(number) for number in numbers))


def summarize_grid(grid: OccupancyBits) -> Tensor:
    """(levels, n, n, n) bool: bricks with an occupied cell; n = 0 where bricks do not fit the levels' boxes."""
    # Bricks of an outer level must not reach into the box of the level inside it, a quarter of its cells away.
    if grid.levels > 1 and grid.resolution % (4 * BRICK) != 0:
        return torch.zeros(grid.levels, 0, 0, 0, dtype=torch.bool)
    n, cells = grid.resolution // BRICK, array(grid.bits).view(np.uint8)
    fours = np.stack([cells & 15, cells >> 4], axis=-1).reshape(grid.levels, n, BRICK, n, BRICK, n)  # along z
    return torch.from_numpy(fours.max(4).max(2) != 0)


def _grid(grid: OccupancyBits, bricks: Tensor | None = None) -> _Grid:
    low, high = np.array(grid.aabb.low, np.float32), np.array(grid.aabb.high, np.float32)
    bricks = summarize_grid(grid) if bricks is None else bricks
    bits = array(grid.bits).view(np.uint32)
    return _Grid(bits, bricks.numpy(), (low + high) * HALF, (high - low) * HALF, grid.resolution, grid.levels)


@torch.no_grad()
def march(origins, directions, grid, rule, *, jitter, limits, capacity, n_active) -> PackedSamples:
    n_rays = origins.shape[0]
    outer = grid.aabb.scaled(2.0 ** (grid.levels - 1))
    t_range = ray_aabb(origins, directions, outer, near=rule.near, far=rule.far)
    rays = (as_float32("origins", origins), as_float32("directions", directions))
    shift = np.empty(0, np.float32) if jitter is None else as_float32("jitter", jitter)
    bounds = np.empty((0, 2), np.float32) if limits is None else as_float32("limits", limits)
    active = n_rays if n_active is None else int(n_active)
    space, steps = _grid(grid), _rule(rule)
    spans, counts = np.empty((n_rays, 2), np.float32), np.empty(n_rays, np.int32)
    launch(_count, n_rays, CHUNK, *rays, shift, bounds, active, space, steps, *t_range, spans, counts)
    offsets, kept = fit_offsets(counts, capacity)
    new = empty_samples(offsets, capacity, kept)
    written = (offsets, new.t_starts, new.t_ends, new.ray_indices)
    launch(_write, n_rays, CHUNK, *rays, shift, space, steps, *t_range, spans, *written)
    return new


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    _check_in_place("bits", bits)
    values = array(as_float32("density", density))
    total, count = np.fmax(values, ZERO).sum(dtype=np.float64), np.count_nonzero(values >= ZERO)
    mean = np.float32(total / max(count, 1))
    packed = np.packbits(values > np.float32(min(mean, threshold)), bitorder="little")
    bits.numpy()[:] = packed.view(np.int32)
    return torch.tensor(mean)


def _check_in_place(name: str, tensor: Tensor) -> None:
    got = f"strides {tensor.stride()}"
    refuse(not tensor.is_contiguous(), name, "a contiguous tensor, it is written in place", got)
