"""Marching in four launches: prepare, count per ray, offsets (`_offsets`), write per ray. Ray order is an invariant.

Prepare: one lane per ray intersects the box and leaves twelve numbers; other programs of the same launch summarise
the bitfield, a byte per block of 4^3 cells and its neighbourhood (`_march`).
Count and write: a warp takes GROUP rays, one after the other. Each lane asks the summary about one of the next 32
segments of 32 lattice steps; then the warp tests the steps of the segments that may hold samples, a lane a step. So
empty space costs a look at a byte per segment, and neighbours on a ray share words of the bitfield.

fp32 throughout, no atomics, nothing read back when a capacity is given. Rays past `n_active`, a device scalar, cost a
comparison. See docs/ops/march.md.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Aabb, PackedSamples
from ..march import OccupancyBits, StepRule
from ._common import INTERPRETED, TAIL_BLOCK, CompileCase, check_kernel_float, ray_programs, tail_programs
from ._launch import cdiv, launchable, next_power_of_2
from ._march import (
    COLUMNS,
    LANES,
    active_segments,
    lattice,
    load_ray,
    pop_lowest,
    prepare_rays,
    summarize,
    test_segment,
)
from ._offsets import GROUP, empty_counts, fit_offsets
from .packed import empty_samples, write_tail

PREPARED = 64  # rays of one preparing program
LONGEST_PART = 3.8 * 2.0  # cells that the summary covers around a point, in both directions
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
STEPS = 256 if INTERPRETED else 32  # lattice steps of a segment, tested at once
SKIP_EMPTY = not INTERPRETED  # summarising takes many programs; tests turn it on where they mean it


@launchable(do_not_specialize=["n_rays", "ray_blocks"])
def _prepare_kernel(
    p_origins, p_directions, p_jitter, p_limits, p_n_active, p_bits, p_rays, p_summary, n_rays, ray_blocks,
    strides, rule, box, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, WORDS: tl.constexpr,
    RAYS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < ray_blocks:
        i_ray = block * RAYS + tl.arange(0, RAYS)
        n_active = n_rays
        if p_n_active is not None:
            n_active = tl.minimum(tl.load(p_n_active), n_rays)
        prepare_rays(
            p_origins, p_directions, p_jitter, p_limits, p_rays, i_ray, i_ray < n_active, strides, rule, box, CONE
        )
    else:
        if p_summary is not None:  # known when compiling; the other branch is not
            summarize(p_bits, p_summary, block - ray_blocks, LEVELS, RESOLUTION, WORDS)


@launchable(do_not_specialize=["n_rays"])
def _count_kernel(
    p_rays, p_bits, p_summary, p_n_active, p_counts, p_sums, n_rays, rule,
    GROUP: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr,
    RESOLUTION: tl.constexpr,
):  # fmt: skip
    n_active = n_rays
    if p_n_active is not None:
        n_active = tl.minimum(tl.load(p_n_active), n_rays)
    i_step = tl.arange(0, STEPS)
    i_segment = tl.arange(0, LANES)
    for group in range(tl.program_id(0), tl.cdiv(n_rays, GROUP), tl.num_programs(0)):
        total = 0
        for i_ray in range(group * GROUP, tl.minimum(group * GROUP + GROUP, n_rays)):
            b_count = tl.zeros([STEPS], tl.int32)
            if i_ray < n_active:
                n_steps = tl.load(p_rays + i_ray * COLUMNS + 10).to(tl.int32)
                origin, direction, t_min, t_max, first, jitter, largest = load_ray(p_rays + i_ray * COLUMNS)
                for k in range(0, n_steps, LANES * STEPS):
                    u = (first + (k + i_segment * STEPS).to(tl.float32)) + jitter
                    word = active_segments(
                        p_summary, u, tl.cdiv(n_steps - k, STEPS), origin, direction, largest, rule,
                        STEPS, PARTS, CONE, LEVELS, RESOLUTION,
                    )  # fmt: skip
                    while word != 0:
                        segment, word = pop_lowest(word)
                        u = (first + (k + segment * STEPS + i_step).to(tl.float32)) + jitter
                        b_count += test_segment(
                            p_bits, u, origin, direction, t_min, t_max, rule, CONE, LEVELS, RESOLUTION
                        )
            count = tl.sum(b_count, 0)
            tl.store(p_counts + i_ray, count)
            total += count
        tl.store(p_sums + group, total)


@triton.jit
def _write_ray(
    p_rays, p_bits, p_summary, p_starts, p_ends, p_out_rays, i_ray, place, end, rule,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
):  # fmt: skip
    i_step = tl.arange(0, STEPS)
    i_segment = tl.arange(0, LANES)
    n_steps = tl.load(p_rays + i_ray * COLUMNS + 10).to(tl.int32)
    origin, direction, t_min, t_max, first, jitter, largest = load_ray(p_rays + i_ray * COLUMNS)
    k = 0
    while (k < n_steps) & (place < end):
        u = (first + (k + i_segment * STEPS).to(tl.float32)) + jitter
        word = active_segments(
            p_summary, u, tl.cdiv(n_steps - k, STEPS), origin, direction, largest, rule,
            STEPS, PARTS, CONE, LEVELS, RESOLUTION,
        )  # fmt: skip
        while (word != 0) & (place < end):
            segment, word = pop_lowest(word)
            u = (first + (k + segment * STEPS + i_step).to(tl.float32)) + jitter
            hit = test_segment(p_bits, u, origin, direction, t_min, t_max, rule, CONE, LEVELS, RESOLUTION)
            i_row = place + tl.cumsum(hit, 0) - 1
            m = hit != 0
            tl.store(p_starts + i_row, lattice(u, rule, CONE), mask=m)
            tl.store(p_ends + i_row, lattice(u + 1.0, rule, CONE), mask=m)
            tl.store(p_out_rays + i_row, i_ray + tl.zeros([STEPS], tl.int32), mask=m)
            place += tl.sum(hit, 0)
        k += LANES * STEPS


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _write_kernel(
    p_rays, p_bits, p_summary, p_offsets, p_starts, p_ends, p_out_rays, n_rays, n_rows, ray_programs, rule,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        for i_ray in range(tl.program_id(0), n_rays, ray_programs):
            place = tl.load(p_offsets + i_ray)
            end = tl.load(p_offsets + i_ray + 1)
            if end > place:
                _write_ray(
                    p_rays, p_bits, p_summary, p_starts, p_ends, p_out_rays, i_ray, place, end, rule,
                    STEPS, PARTS, CONE, LEVELS, RESOLUTION,
                )  # fmt: skip
    else:
        write_tail(p_starts, p_ends, p_out_rays, ray_programs, tl.load(p_offsets + n_rays), n_rows, TAIL)


def _rule_arguments(rule: StepRule) -> tuple[float, ...]:
    if rule.cone_angle == 0.0:
        return (rule.near, rule.far, rule.step_size, 0.0, 0.0, 0.0)
    t_c = max(rule.near, rule.step_size / rule.cone_angle)
    u_c = (t_c - rule.near) / rule.step_size
    return (rule.near, rule.far, rule.step_size, t_c, u_c, math.log1p(rule.cone_angle))


@functools.lru_cache(maxsize=64)
def _box_arguments(aabb: Aabb, resolution: int, levels: int) -> tuple[float, ...]:
    """Low and high of the outermost level, the centre, and cells of the innermost level per unit of length."""
    outer = aabb.scaled(2.0 ** (levels - 1))
    return (*outer.low, *outer.high, *aabb.center, *(resolution / size for size in aabb.size))


def _parts(grid: OccupancyBits, rule: StepRule) -> int:
    """In how many parts a segment asks the summary, so many that each fits its margin; 0: skipping does not pay."""
    if not SKIP_EMPTY or grid.resolution % 32:
        return 0
    return _fitting_parts(STEPS * rule.step_size * grid.resolution, grid.aabb, rule.cone_angle > 0.0)


@functools.lru_cache(maxsize=64)
def _fitting_parts(cells: float, aabb: Aabb, cone: bool) -> int:
    segment = cells / min(aabb.size)  # in cells
    fitting = [parts for parts in (1, 2, 4) if segment / parts <= LONGEST_PART]
    if cone:
        fitting = fitting[-1:]  # steps grow: the finest parts fit for longest
    return fitting[0] if fitting else 0


def _prepare(
    origins: Tensor,
    directions: Tensor,
    grid: OccupancyBits,
    rule: StepRule,
    *,
    jitter: Tensor | None,
    limits: Tensor | None,
    n_active: Tensor | None,
    parts: int,
) -> tuple[Tensor, Tensor | None]:
    """The rays as the walks read them, and the summary of the bitfield where they ask it."""
    n_rays, device, blocks = origins.shape[0], origins.device, grid.resolution // 4
    rays = torch.empty(n_rays, COLUMNS.value, dtype=torch.float32, device=device)
    summary = torch.empty(grid.levels, blocks, blocks, blocks, dtype=torch.int8, device=device) if parts else None
    ray_blocks = cdiv(n_rays, PREPARED)
    _prepare_kernel[(ray_blocks + (grid.levels * blocks**2 if parts else 0),)](
        origins, directions, None if jitter is None else jitter.contiguous(),
        None if limits is None else limits.float().contiguous(), n_active, grid.bits, rays, summary, n_rays,
        ray_blocks, (*origins.stride(), *directions.stride()), _rule_arguments(rule),
        _box_arguments(grid.aabb, grid.resolution, grid.levels),
        CONE=rule.cone_angle > 0.0, LEVELS=grid.levels, RESOLUTION=grid.resolution,
        WORDS=next_power_of_2(max(1, grid.resolution // 32)), RAYS=PREPARED, **OPTIONS,
    )  # fmt: skip
    return rays, summary


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
    n_rays, device, parts = origins.shape[0], origins.device, _parts(grid, rule)
    counts, sums = empty_counts(n_rays, device)
    numbers = _rule_arguments(rule)
    shape = {"STEPS": STEPS, "PARTS": parts, "CONE": rule.cone_angle > 0.0}
    shape |= {"LEVELS": grid.levels, "RESOLUTION": grid.resolution}
    rays, summary = torch.empty(0, COLUMNS.value, device=device), None
    if n_rays:
        rays, summary = _prepare(
            origins, directions, grid, rule, jitter=jitter, limits=limits, n_active=n_active, parts=parts
        )
        _count_kernel[(ray_programs(cdiv(n_rays, GROUP), device),)](
            rays, grid.bits, summary, n_active, counts, sums, n_rays, numbers, GROUP=GROUP, **shape, **OPTIONS
        )
    offsets, kept = fit_offsets(counts, sums, capacity)
    n_rows = int(offsets[-1]) if capacity is None else capacity
    new = empty_samples(n_rows, origins)
    if n_rows:
        programs = ray_programs(n_rays, device)
        _write_kernel[(programs + (0 if capacity is None else tail_programs(n_rows)),)](
            rays, grid.bits, summary, offsets, *new, n_rays, n_rows, programs, numbers, **shape, TAIL=TAIL_BLOCK,
            **OPTIONS,
        )  # fmt: skip
    return PackedSamples(*new, offsets, kept)


def _cases() -> list[CompileCase]:
    rule, rays = {"rule": ("fp32",) * 6}, {"p_rays": "*fp32", "p_bits": "*i32", "p_summary": "*i8"}
    prepare = {"p_origins": "*fp32", "p_directions": "*fp32", "p_jitter": "*fp32", "p_limits": "*fp32"}
    prepare |= {"p_n_active": "*i32", **rays, "n_rays": "i32", "ray_blocks": "i32", "strides": ("i32",) * 4}
    prepare |= {**rule, "box": ("fp32",) * 12}
    count = {**rays, "p_n_active": "*i32", "p_counts": "*i32", "p_sums": "*i32", "n_rays": "i32", **rule}
    write = {**rays, "p_offsets": "*i32", "p_starts": "*fp32", "p_ends": "*fp32", "p_out_rays": "*i32", **rule}
    write |= dict.fromkeys(("n_rays", "n_rows", "ray_programs"), "i32")
    full = prepare, count, write
    cases = []
    for cone, levels, parts in ((False, 1, 1), (True, 5, 4), (False, 2, 0)):
        shape, name = {"CONE": cone, "LEVELS": levels, "RESOLUTION": 128}, f"{levels} levels"
        steps = {"STEPS": 32, "PARTS": parts}
        rest = {"WORDS": 4, "RAYS": PREPARED}, {**steps, "GROUP": GROUP}, {**steps, "TAIL": TAIL_BLOCK}
        for kernel, signature, own in zip((_prepare_kernel, _count_kernel, _write_kernel), full, rest, strict=True):
            given, constexprs = dict(signature), shape | own
            if not parts:  # a grid that is not summarised, and every ray active
                absent = {"p_summary", "p_n_active", "p_jitter", "p_limits"} & given.keys()
                constexprs |= dict.fromkeys(absent)
                given = {key: value for key, value in given.items() if key not in absent}
            cases.append(CompileCase(kernel, given, constexprs, name=name))
    return cases


COMPILE_CASES = _cases()
