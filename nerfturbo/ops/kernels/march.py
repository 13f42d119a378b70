"""Marching in three launches: count per ray, offsets (`_offsets`), write per ray. Ray order is an invariant.

One program = one ray in one warp, which tests STEPS lattice points at a time: neighbours on a ray share words of the
bitfield, and no lane waits for another ray. The count also leaves the first and last step with a sample, so that the
write walks only there. Both launches must decide alike about each point, so the arithmetic up to that decision is
the same function with explicit `fma`, and nothing else is contracted (`enable_fp_fusion=False`).

fp32 throughout, no atomics. Rays past `n_active`, a device scalar, leave at once. See docs/ops/march.md.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import PackedSamples
from ..march import OccupancyBits, StepRule
from ._common import TAIL_BLOCK, CompileCase, check_kernel_float, tail_programs
from ._offsets import fit_offsets
from .aabb import box_interval, load_xyz
from .packed import empty_samples, write_tail

COUNT_STEPS = 128
WRITE_STEPS = 32


@triton.jit
def _lattice(u, near, step_size, t_c, u_c, log_growth, CONE: tl.constexpr):
    t = near + u * step_size
    if CONE:
        t = tl.where(u < u_c, t, t_c * tl.exp(tl.maximum(u - u_c, 0.0) * log_growth))
    return t


@triton.jit
def _inverse_lattice(t, near, step_size, t_c, u_c, log_growth, CONE: tl.constexpr):
    u = tl.div_rn(t - near, step_size)
    if CONE:
        u = tl.where(t < t_c, u, u_c + tl.log(tl.maximum(t, t_c) / t_c) / log_growth)
    return u


@triton.jit
def _is_occupied(p_bits, x, y, z, m, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr):
    """0 or 1 for points given in cells of the finest level, from the centre; points outside clamp to border cells."""
    half: tl.constexpr = RESOLUTION * 0.5
    level = tl.zeros_like(x).to(tl.int32)
    if LEVELS > 1:
        largest = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        scale = tl.full(x.shape, 1.0, tl.float32)
        for i in tl.static_range(LEVELS - 1):
            beyond = largest > half * 2**i
            level += beyond.to(tl.int32)
            scale = tl.where(beyond, scale * 0.5, scale)
        x, y, z = x * scale, y * scale, z * scale
    i_x = tl.minimum(tl.maximum((x + half).to(tl.int32), 0), RESOLUTION - 1)
    i_y = tl.minimum(tl.maximum((y + half).to(tl.int32), 0), RESOLUTION - 1)
    i_z = tl.minimum(tl.maximum((z + half).to(tl.int32), 0), RESOLUTION - 1)
    i_cell = ((level * RESOLUTION + i_x) * RESOLUTION + i_y) * RESOLUTION + i_z
    word = tl.load(p_bits + (i_cell >> 5), mask=m, other=0)
    return (word >> (i_cell & 31)) & 1


@triton.jit
def _ray_range(p_origins, p_directions, p_jitter, p_limits, i_ray, strides, rule, box, CONE: tl.constexpr):
    """A ray in cells from the grid's centre, its interval of t, its first and last lattice step, and its jitter."""
    near, far, step_size, t_c, u_c, log_growth = rule
    ox, oy, oz = load_xyz(p_origins, i_ray, strides[0], strides[1], True)
    dx, dy, dz = load_xyz(p_directions, i_ray, strides[2], strides[3], True)
    t_min, t_max = box_interval(
        ox, oy, oz, dx, dy, dz, box[0], box[1], box[2], box[3], box[4], box[5], near, far
    )  # fmt: skip
    if p_limits is not None:
        t_min = tl.maximum(t_min, tl.load(p_limits + 2 * i_ray))
        t_max = tl.minimum(t_max, tl.load(p_limits + 2 * i_ray + 1))
    jitter = 0.0
    if p_jitter is not None:
        jitter = tl.load(p_jitter + i_ray).to(tl.float32)
    first = tl.floor(_inverse_lattice(t_min, near, step_size, t_c, u_c, log_growth, CONE) - jitter) - 1.0
    last = tl.ceil(_inverse_lattice(t_max, near, step_size, t_c, u_c, log_growth, CONE) - jitter) + 1.0
    first = tl.maximum(first, 0.0)
    # The limit is for directions far from unit length, which must not hang the device.
    n_steps = tl.where(t_max > t_min, tl.minimum(last - first, 1048576.0), 0.0)
    origin = ((ox - box[6]) * box[9], (oy - box[7]) * box[10], (oz - box[8]) * box[11])
    direction = (dx * box[9], dy * box[10], dz * box[11])
    return origin, direction, t_min, t_max, first.to(tl.int32), n_steps.to(tl.int32), jitter


@triton.jit
def _test_steps(
    p_bits, step, origin, direction, t_min, t_max, jitter, rule,
    CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
):  # fmt: skip
    """t where the lattice steps begin and end, and whether (0 or 1) each is a sample."""
    near, far, step_size, t_c, u_c, log_growth = rule
    u = step.to(tl.float32) + jitter
    t0 = _lattice(u, near, step_size, t_c, u_c, log_growth, CONE)
    t1 = _lattice(u + 1.0, near, step_size, t_c, u_c, log_growth, CONE)
    middle = (t0 + t1) * 0.5
    inside = (middle >= t_min) & (middle < t_max)
    x = tl.fma(middle, direction[0], origin[0])
    y = tl.fma(middle, direction[1], origin[1])
    z = tl.fma(middle, direction[2], origin[2])
    return t0, t1, _is_occupied(p_bits, x, y, z, inside, LEVELS, RESOLUTION)


@triton.jit
def _count_kernel(
    p_origins, p_directions, p_bits, p_jitter, p_limits, p_n_active, p_counts, p_steps, strides, rule, box,
    CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    i_ray = tl.program_id(0)
    count = 0
    lowest = 0x7FFFFFFF
    highest = -1
    active = True
    if p_n_active is not None:
        active = i_ray < tl.load(p_n_active)
    if active:
        origin, direction, t_min, t_max, first, n_steps, jitter = _ray_range(
            p_origins, p_directions, p_jitter, p_limits, i_ray, strides, rule, box, CONE
        )
        b_count = tl.zeros([STEPS], tl.int32)
        b_low = tl.full([STEPS], 0x7FFFFFFF, tl.int32)
        b_high = tl.full([STEPS], -1, tl.int32)
        for k in range(0, n_steps, STEPS):
            step = first + k + tl.arange(0, STEPS)  # the test of t_min and t_max ends a ray, not the number of steps
            t0, t1, hit = _test_steps(
                p_bits, step, origin, direction, t_min, t_max, jitter, rule, CONE, LEVELS, RESOLUTION
            )
            b_count += hit
            b_low = tl.minimum(b_low, tl.where(hit != 0, step, 0x7FFFFFFF))
            b_high = tl.where(hit != 0, step, b_high)
        count = tl.sum(b_count, 0)
        lowest = tl.min(b_low, 0)
        highest = tl.max(b_high, 0)
    tl.store(p_counts + i_ray, count)
    tl.store(p_steps + 2 * i_ray, lowest)
    tl.store(p_steps + 2 * i_ray + 1, highest)


@triton.jit(do_not_specialize=["n_rays", "n_rows"])
def _write_kernel(
    p_origins, p_directions, p_bits, p_jitter, p_limits, p_offsets, p_steps, p_starts, p_ends, p_rays, n_rays, n_rows,
    strides, rule, box, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, STEPS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    i_ray = tl.program_id(0)
    if i_ray < n_rays:
        place = tl.load(p_offsets + i_ray)
        end = tl.load(p_offsets + i_ray + 1)
        if end > place:
            origin, direction, t_min, t_max, first, n_steps, jitter = _ray_range(
                p_origins, p_directions, p_jitter, p_limits, i_ray, strides, rule, box, CONE
            )
            lowest = tl.load(p_steps + 2 * i_ray)
            highest = tl.load(p_steps + 2 * i_ray + 1)
            for k in range(lowest, highest + 1, STEPS):
                step = k + tl.arange(0, STEPS)
                t0, t1, hit = _test_steps(
                    p_bits, step, origin, direction, t_min, t_max, jitter, rule, CONE, LEVELS, RESOLUTION
                )
                i_row = place + tl.cumsum(hit, 0) - 1
                m = hit != 0
                tl.store(p_starts + i_row, t0, mask=m)
                tl.store(p_ends + i_row, t1, mask=m)
                tl.store(p_rays + i_row, i_ray + tl.zeros([STEPS], tl.int32), mask=m)
                place += tl.sum(hit, 0)
    else:
        write_tail(p_starts, p_ends, p_rays, n_rays, tl.load(p_offsets + n_rays), n_rows, TAIL)


def _rule_arguments(rule: StepRule) -> tuple[float, ...]:
    if rule.cone_angle == 0.0:
        return (rule.near, rule.far, rule.step_size, 0.0, 0.0, 0.0)
    t_c = max(rule.near, rule.step_size / rule.cone_angle)
    u_c = (t_c - rule.near) / rule.step_size
    return (rule.near, rule.far, rule.step_size, t_c, u_c, math.log1p(rule.cone_angle))


def _box_arguments(grid: OccupancyBits) -> tuple[float, ...]:
    """Low and high of the outermost level, the centre, and cells of the innermost level per unit of length."""
    outer = grid.aabb.scaled(2.0 ** (grid.levels - 1))
    return (*outer.low, *outer.high, *grid.aabb.center, *(grid.resolution / size for size in grid.aabb.size))


@torch.no_grad()
def march(
    origins: Tensor,
    directions: Tensor,
    grid: OccupancyBits,
    rule: StepRule,
    *,
    jitter: Tensor | None,
    limits: Tensor | None,
    capacity: int | None,
    n_active: Tensor | None,
) -> PackedSamples:
    check_kernel_float(origins=origins, directions=directions, jitter=jitter, limits=limits)
    n_rays, device = origins.shape[0], origins.device
    jitter = None if jitter is None else jitter.contiguous()
    limits = None if limits is None else limits.float().contiguous()
    counts = torch.empty(n_rays, dtype=torch.int32, device=device)
    steps = torch.empty(n_rays, 2, dtype=torch.int32, device=device)
    common = {
        "strides": (*origins.stride(), *directions.stride()),
        "rule": _rule_arguments(rule),
        "box": _box_arguments(grid),
        "CONE": rule.cone_angle > 0.0,
        "LEVELS": grid.levels,
        "RESOLUTION": grid.resolution,
        "num_warps": 1,
        "enable_fp_fusion": False,
    }
    rays = (origins.detach(), directions.detach(), grid.bits, jitter, limits)
    if n_rays:
        _count_kernel[(n_rays,)](*rays, n_active, counts, steps, STEPS=COUNT_STEPS, **common)
    offsets, kept = fit_offsets(counts, capacity)
    n_rows = int(offsets[-1]) if capacity is None else capacity
    new = empty_samples(n_rows, origins)
    if n_rows:
        tail = 0 if capacity is None else tail_programs(n_rows)
        _write_kernel[(n_rays + tail,)](
            *rays, offsets, steps, *new, n_rays, n_rows, STEPS=WRITE_STEPS, TAIL=TAIL_BLOCK, **common
        )
    return PackedSamples(*new, offsets, kept)


def _cases() -> list[CompileCase]:
    types = {"strides": ("i32",) * 4, "rule": ("fp32",) * 6, "box": ("fp32",) * 12}
    rays = {"p_origins": "*fp32", "p_directions": "*fp32", "p_bits": "*i32", "p_jitter": "*fp32", "p_limits": "*fp32"}
    counts = {"p_n_active": "*i32", "p_counts": "*i32", "p_steps": "*i32"}
    out = {"p_offsets": "*i32", "p_steps": "*i32", "p_starts": "*fp32", "p_ends": "*fp32", "p_rays": "*i32"}
    sizes = {"n_rays": "i32", "n_rows": "i32"}
    cases = []
    for cone, levels in ((False, 1), (True, 5)):
        options = {"CONE": cone, "LEVELS": levels, "RESOLUTION": 128}
        name = f"{levels} levels"
        cases.append(
            CompileCase(_count_kernel, rays | counts | types, options | {"STEPS": COUNT_STEPS}, name=name),
        )
        cases.append(
            CompileCase(
                _write_kernel,
                rays | out | sizes | types,
                options | {"STEPS": WRITE_STEPS, "TAIL": TAIL_BLOCK},
                name=name,
            )
        )
    return cases


COMPILE_CASES = _cases()
