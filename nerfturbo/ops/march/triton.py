"""Marching in four launches: prepare, count per ray, offsets, write per ray. Ray order is an invariant. What each does,
and why skipping misses nothing: docs/ops/march.md. Counting leaves what it found, a bit a step, for writing; past its
room both must decide alike about each lattice point, so both call the same functions, with explicit `fma` and launched
with `enable_fp_fusion=False`. fp32, no atomics.

The occupancy grid: `decay_and_max` is three launches (keep old values, decay, maximum), since a cell may be listed
twice and must decay once. The maximum is an integer atomic: the bits of non-negative floats are ordered as they are.
`threshold_bits` is two: PARTS programs add up their share, then every program adds the PARTS sums itself and packs.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Aabb, PackedSamples
from .. import _triton as gpu
from .._triton import INTERPRETED, TAIL_BLOCK, cdiv, check_kernel_float, launchable, next_power_of_2
from ..packed.triton import GROUP, empty_counts, empty_samples, fit_offsets, write_tail
from ..positions.triton import box_interval
from . import OccupancyBits, StepRule

LANES = tl.constexpr(32)  # segments behind one word of flags
COLUMNS = tl.constexpr(12)  # numbers kept per ray
BLOCK_CELLS = tl.constexpr(4)  # cells along an edge of a block of the summary
MARGIN = tl.constexpr(3.8)  # cells around a block that its summary covers: 4, less room for rounding


@triton.jit
def lattice(u, rule, CONE: tl.constexpr):
    """t(u) of the step rule (near, far, step_size, t_c, u_c, log_growth)."""
    t = rule[0] + u * rule[2]
    if CONE:
        t = tl.where(u < rule[4], t, rule[3] * tl.exp(tl.maximum(u - rule[4], 0.0) * rule[5]))
    return t


@triton.jit
def middle_of(u, rule, CONE: tl.constexpr):
    """The middle of the lattice step that begins at u."""
    if CONE:
        return (lattice(u, rule, CONE) + lattice(u + 1.0, rule, CONE)) * 0.5
    else:
        return tl.fma(u + 0.5, rule[2], rule[0])


@triton.jit
def _inverse_lattice(t, rule, CONE: tl.constexpr):
    u = tl.div_rn(t - rule[0], rule[2])
    if CONE:
        u = tl.where(t < rule[3], u, rule[4] + tl.log(tl.maximum(t, rule[3]) / rule[3]) / rule[5])
    return u


@triton.jit
def prepare_rays(p_origins, p_directions, p_jitter, p_limits, p_rays, i_ray, m, strides, rule, box, CONE: tl.constexpr):
    """Write what a walk along a ray needs: origin and direction in cells of the finest level from the grid's centre,
    t_min, t_max, first lattice step, jitter, number of steps, and the largest component of the direction."""
    ox, oy, oz = gpu.load_point(p_origins, i_ray, m, strides[0], strides[1])
    dx, dy, dz = gpu.load_point(p_directions, i_ray, m, strides[2], strides[3])
    t_min, t_max = box_interval(ox, oy, oz, dx, dy, dz, box, rule[0], rule[1])
    if p_limits is not None:
        t_min = tl.maximum(t_min, tl.load(p_limits + 2 * i_ray, mask=m, other=0.0))
        t_max = tl.minimum(t_max, tl.load(p_limits + 2 * i_ray + 1, mask=m, other=0.0))
    jitter = tl.zeros_like(ox)
    if p_jitter is not None:
        jitter = tl.load(p_jitter + i_ray, mask=m, other=0.0).to(tl.float32)
    first = tl.maximum(tl.floor(_inverse_lattice(t_min, rule, CONE) - jitter) - 1.0, 0.0)
    last = tl.ceil(_inverse_lattice(t_max, rule, CONE) - jitter) + 1.0
    # The limit is for directions far from unit length, which must not hang the device.
    n_steps = tl.where(m & (t_max > t_min), tl.minimum(last - first, 1048576.0), 0.0)
    dx, dy, dz = dx * box[9], dy * box[10], dz * box[11]
    p = p_rays + i_ray * COLUMNS
    tl.store(p, (ox - box[6]) * box[9], mask=m)
    tl.store(p + 1, (oy - box[7]) * box[10], mask=m)
    tl.store(p + 2, (oz - box[8]) * box[11], mask=m)
    tl.store(p + 3, dx, mask=m)
    tl.store(p + 4, dy, mask=m)
    tl.store(p + 5, dz, mask=m)
    tl.store(p + 6, t_min, mask=m)
    tl.store(p + 7, t_max, mask=m)
    tl.store(p + 8, first, mask=m)
    tl.store(p + 9, jitter, mask=m)
    tl.store(p + 10, n_steps, mask=m)
    tl.store(p + 11, tl.maximum(tl.maximum(tl.abs(dx), tl.abs(dy)), tl.abs(dz)), mask=m)


@triton.jit
def load_ray(p):
    """One ray as `prepare_rays` left it, without the number of steps."""
    origin = (tl.load(p), tl.load(p + 1), tl.load(p + 2))
    direction = (tl.load(p + 3), tl.load(p + 4), tl.load(p + 5))
    return origin, direction, tl.load(p + 6), tl.load(p + 7), tl.load(p + 8), tl.load(p + 9), tl.load(p + 11)


@triton.jit
def _locate(x, y, z, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr):
    """The level of points given in cells from the centre, 2^-level, and the points in that level's cells, from 0 on."""
    half: tl.constexpr = RESOLUTION * 0.5
    level = tl.zeros_like(x).to(tl.int32)
    scale = tl.full(x.shape, 1.0, tl.float32)
    if LEVELS > 1:
        largest = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        for i in tl.static_range(LEVELS - 1):
            beyond = largest > half * 2**i
            level += beyond.to(tl.int32)
            scale = tl.where(beyond, scale * 0.5, scale)
        x, y, z = x * scale, y * scale, z * scale
    return level, scale, x + half, y + half, z + half


@triton.jit
def _clamp(x, last: tl.constexpr):
    return tl.minimum(tl.maximum(x.to(tl.int32), 0), last)


@triton.jit
def test_segment(
    p_bits, u, origin, direction, t_min, t_max, rule,
    CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
):  # fmt: skip
    """0 or 1: whether the lattice steps that begin at u are samples."""
    middle = middle_of(u, rule, CONE)
    inside = (middle >= t_min) & (middle < t_max)
    x = tl.fma(middle, direction[0], origin[0])
    y = tl.fma(middle, direction[1], origin[1])
    z = tl.fma(middle, direction[2], origin[2])
    level, scale, x, y, z = _locate(x, y, z, LEVELS, RESOLUTION)
    i_cell = (level * RESOLUTION + _clamp(x, RESOLUTION - 1)) * RESOLUTION + _clamp(y, RESOLUTION - 1)
    i_cell = i_cell * RESOLUTION + _clamp(z, RESOLUTION - 1)
    word = tl.load(p_bits + (i_cell >> 5), mask=inside, other=0)
    return (word >> (i_cell & 31)) & 1


@triton.jit
def active_segments(
    p_summary, u, n_segments, origin, direction, largest, rule,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
):  # fmt: skip
    """A word whose bit i says that segment i, of STEPS steps from u[i] on, may hold samples. Each of PARTS parts asks
    the summary at its middle; a part longer than the summary's margin counts as occupied."""
    i_segment = tl.arange(0, LANES)
    active = i_segment < n_segments
    if PARTS > 0:
        found = tl.zeros([LANES], tl.int32)
        blocks: tl.constexpr = RESOLUTION // BLOCK_CELLS
        for part in tl.static_range(PARTS):
            start = lattice(u + part * (STEPS // PARTS), rule, CONE)
            end = lattice(u + (part + 1) * (STEPS // PARTS), rule, CONE)
            middle = (start + end) * 0.5
            x = tl.fma(middle, direction[0], origin[0])
            y = tl.fma(middle, direction[1], origin[1])
            z = tl.fma(middle, direction[2], origin[2])
            level, scale, x, y, z = _locate(x, y, z, LEVELS, RESOLUTION)
            i_block = (level * blocks + _clamp(x * 0.25, blocks - 1)) * blocks + _clamp(y * 0.25, blocks - 1)
            i_block = i_block * blocks + _clamp(z * 0.25, blocks - 1)
            long = (end - start) * 0.5 * largest * scale > MARGIN
            found |= tl.load(p_summary + i_block, mask=active & (long == 0), other=1)
        active = active & (found != 0)
    return tl.sum(active.to(tl.int32) << i_segment, 0)  # bits do not overlap: the sum is the or


@triton.jit
def pop_lowest(word):
    """Index of the lowest bit set, by the exponent of its float, and the word without it."""
    low = word & -word
    exponent = low.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return exponent - 127, word ^ low


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def summarize(p_bits, p_summary, i_column, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, WORDS: tl.constexpr):
    """A byte per block of BLOCK_CELLS^3 cells: 1 where the block or a neighbour of it holds an occupied cell, and along
    the borders between levels. One column of blocks along z; WORDS is what a row of cells takes, a power of two."""
    blocks: tl.constexpr = RESOLUTION // BLOCK_CELLS
    level = i_column // (blocks * blocks)
    i_x = i_column // blocks % blocks
    i_y = i_column % blocks
    i_word = tl.arange(0, WORDS)[None, :]
    x = (i_x - 1) * BLOCK_CELLS + tl.arange(0, 16)[:, None]
    m = (tl.arange(0, 16)[:, None] < 3 * BLOCK_CELLS) & (x >= 0) & (x < RESOLUTION) & (i_word < RESOLUTION // 32)
    found = tl.zeros([16, WORDS], tl.int32)
    for k in range(3 * BLOCK_CELLS):
        y = (i_y - 1) * BLOCK_CELLS + k
        i_row = (level * RESOLUTION + x) * RESOLUTION + y
        found |= tl.load(p_bits + i_row * (RESOLUTION // 32) + i_word, mask=m & (y >= 0) & (y < RESOLUTION), other=0)
    row = tl.reduce(found, 0, _or)  # (WORDS,): the cells along z, all columns around together
    i_z = tl.arange(0, 8 * WORDS)  # blocks along z, eight to a word
    first = i_z * BLOCK_CELLS
    here = tl.gather(row, first >> 5, 0) >> (first & 31)
    below = tl.gather(row, tl.maximum(first - BLOCK_CELLS, 0) >> 5, 0) >> ((first - BLOCK_CELLS) & 31)
    above = tl.gather(row, tl.minimum(first + BLOCK_CELLS, 32 * WORDS - 1) >> 5, 0) >> ((first + BLOCK_CELLS) & 31)
    above = tl.where(i_z == blocks - 1, 0, above)
    occupied = ((here | tl.where(i_z == 0, 0, below) | above) & 15) != 0
    if LEVELS > 1:
        last = blocks - 1
        edge = (i_x == 0) | (i_x == last) | (i_y == 0) | (i_y == last) | (i_z == 0) | (i_z == last)
        low: tl.constexpr = (RESOLUTION // 4 - BLOCK_CELLS) // BLOCK_CELLS
        high: tl.constexpr = (RESOLUTION * 3 // 4 + BLOCK_CELLS - 1) // BLOCK_CELLS
        inner = (i_x >= low) & (i_x <= high) & (i_y >= low) & (i_y <= high) & (i_z >= low) & (i_z <= high)
        occupied = occupied | (edge & (level < LEVELS - 1)) | (inner & (level > 0))
    tl.store(p_summary + i_column * blocks + i_z, occupied.to(tl.int8), mask=i_z < blocks)


PREPARED = 64  # rays of one preparing program
LONGEST_PART = 3.8 * 2.0  # cells that the summary covers around a point, in both directions
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
STEPS = 256 if INTERPRETED else 32  # lattice steps of a segment, tested at once
MOST_WORDS = 1 << 25  # bytes for what counting found
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
        n_active = gpu.used_rows(p_n_active, n_rays)
        prepare_rays(
            p_origins, p_directions, p_jitter, p_limits, p_rays, i_ray, i_ray < n_active, strides, rule, box, CONE
        )
    else:
        if p_summary is not None:  # known when compiling; the other branch is not
            summarize(p_bits, p_summary, block - ray_blocks, LEVELS, RESOLUTION, WORDS)


@launchable(do_not_specialize=["n_rays"])
def _count_kernel(
    p_rays, p_bits, p_summary, p_n_active, p_counts, p_sums, p_found, n_rays, rule,
    GROUP: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr,
    RESOLUTION: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    n_active = gpu.used_rows(p_n_active, n_rays)
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
                    b_found = tl.zeros([LANES], tl.int32)
                    while word != 0:
                        segment, word = pop_lowest(word)
                        u = (first + (k + segment * STEPS + i_step).to(tl.float32)) + jitter
                        hit = test_segment(p_bits, u, origin, direction, t_min, t_max, rule, CONE, LEVELS, RESOLUTION)
                        b_count += hit
                        if FOUND:  # bits do not overlap: the sum is the or
                            b_found = tl.where(i_segment == segment, tl.sum(hit << i_step, 0), b_found)
                    if FOUND:
                        if k < FOUND * STEPS:
                            tl.store(p_found + i_ray * FOUND + k // STEPS + i_segment, b_found)
            count = tl.sum(b_count, 0)
            tl.store(p_counts + i_ray, count)
            total += count
        tl.store(p_sums + group, total)


@triton.jit
def _write_segment(p_starts, p_ends, p_out_rays, i_ray, place, u, hit, rule, STEPS: tl.constexpr, CONE: tl.constexpr):
    """The samples of one segment, from `place` on; returns the place behind them."""
    i_row = place + tl.cumsum(hit, 0) - 1
    m = hit != 0
    tl.store(p_starts + i_row, lattice(u, rule, CONE), mask=m)
    tl.store(p_ends + i_row, lattice(u + 1.0, rule, CONE), mask=m)
    tl.store(p_out_rays + i_row, i_ray + tl.zeros([STEPS], tl.int32), mask=m)
    return place + tl.sum(hit, 0)


@triton.jit
def _write_ray(
    p_rays, p_bits, p_summary, p_found, p_starts, p_ends, p_out_rays, i_ray, place, end, rule, STEPS: tl.constexpr,
    PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    i_step = tl.arange(0, STEPS)
    i_segment = tl.arange(0, LANES)
    n_steps = tl.load(p_rays + i_ray * COLUMNS + 10).to(tl.int32)
    origin, direction, t_min, t_max, first, jitter, largest = load_ray(p_rays + i_ray * COLUMNS)
    k = 0
    if FOUND:
        while (k < tl.minimum(n_steps, FOUND * STEPS)) & (place < end):
            b_found = tl.load(p_found + i_ray * FOUND + k // STEPS + i_segment)
            word = tl.sum((b_found != 0).to(tl.int32) << i_segment, 0)
            while word != 0:
                segment, word = pop_lowest(word)
                u = (first + (k + segment * STEPS + i_step).to(tl.float32)) + jitter
                hit = (tl.sum(tl.where(i_segment == segment, b_found, 0), 0) >> i_step) & 1
                place = _write_segment(p_starts, p_ends, p_out_rays, i_ray, place, u, hit, rule, STEPS, CONE)
            k += LANES * STEPS
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
            place = _write_segment(p_starts, p_ends, p_out_rays, i_ray, place, u, hit, rule, STEPS, CONE)
        k += LANES * STEPS


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _write_kernel(
    p_rays, p_bits, p_summary, p_found, p_offsets, p_starts, p_ends, p_out_rays, n_rays, n_rows, ray_programs, rule,
    STEPS: tl.constexpr, PARTS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr,
    FOUND: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        for i_ray in range(tl.program_id(0), n_rays, ray_programs):
            place = tl.load(p_offsets + i_ray)
            end = tl.load(p_offsets + i_ray + 1)
            if end > place:
                _write_ray(
                    p_rays, p_bits, p_summary, p_found, p_starts, p_ends, p_out_rays, i_ray, place, end, rule,
                    STEPS, PARTS, CONE, LEVELS, RESOLUTION, FOUND,
                )  # fmt: skip
    else:
        write_tail(p_starts, p_ends, p_out_rays, ray_programs, tl.load(p_offsets + n_rays), n_rows, TAIL)


def _rule_arguments(rule: StepRule) -> tuple[float, ...]:
    return (rule.near, rule.far, rule.step_size, *rule.bend, math.log1p(rule.cone_angle))


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


def _room(n_rays: int, grid: OccupancyBits, rule: StepRule) -> int:
    """Words a ray, of 32 lattice steps each, in which counting leaves what it found; 0: writing looks again."""
    steps = grid.aabb.diagonal * 2.0 ** (grid.levels - 1) / rule.step_size + 4.0
    words = LANES.value * min(cdiv(math.ceil(steps), LANES.value * STEPS), 4)
    return words if STEPS == 32 and n_rays * words * 4 <= MOST_WORDS else 0


@functools.lru_cache(maxsize=64)
def _fitting_parts(cells: float, aabb: Aabb, cone: bool) -> int:
    segment = cells / min(aabb.size)  # in cells
    fitting = [parts for parts in (1, 2, 4) if segment / parts <= LONGEST_PART]
    if cone:
        fitting = fitting[-1:]  # steps grow: the finest parts fit for longest
    return fitting[0] if fitting else 0


def _prepare(origins, directions, grid, rule, *, jitter, limits, n_active, parts) -> tuple[Tensor, Tensor | None]:
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


def march(origins, directions, grid, rule, *, jitter, limits, capacity, n_active) -> PackedSamples:
    check_kernel_float(origins=origins, directions=directions, jitter=jitter, limits=limits)
    n_rays, device, parts = origins.shape[0], origins.device, _parts(grid, rule)
    counts, sums = empty_counts(n_rays, device)
    numbers = _rule_arguments(rule)
    shape = {"STEPS": STEPS, "PARTS": parts, "CONE": rule.cone_angle > 0.0}
    shape |= {"LEVELS": grid.levels, "RESOLUTION": grid.resolution, "FOUND": _room(n_rays, grid, rule)}
    rays, summary = torch.empty(0, COLUMNS.value, device=device), None
    found = torch.empty(n_rays, shape["FOUND"], dtype=torch.int32, device=device) if shape["FOUND"] else None
    if n_rays:
        given = {"jitter": jitter, "limits": limits, "n_active": n_active}
        rays, summary = _prepare(origins, directions, grid, rule, **given, parts=parts)
        _count_kernel[(gpu.ray_programs(cdiv(n_rays, GROUP), device),)](
            rays, grid.bits, summary, n_active, counts, sums, found, n_rays, numbers, GROUP=GROUP, **shape, **OPTIONS
        )
    offsets, kept = fit_offsets(counts, sums, capacity)
    n_rows = int(offsets[-1]) if capacity is None else capacity
    new = empty_samples(n_rows, origins)
    if n_rows:
        programs = gpu.ray_programs(n_rays, device)
        _write_kernel[(programs + (0 if capacity is None else gpu.tail_programs(n_rows)),)](
            rays, grid.bits, summary, found, offsets, *new, n_rays, n_rows, programs, numbers, **shape,
            TAIL=TAIL_BLOCK, **OPTIONS,
        )  # fmt: skip
    return PackedSamples(*new, offsets, kept)


BLOCK = 1024
PARTS = 512


@launchable(do_not_specialize=["n"])
def _gather_kernel(p_density, p_cells, p_old, n, BLOCK: tl.constexpr):
    i, m = gpu.own_block(n, BLOCK)
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    tl.store(p_old + i, tl.load(p_density + i_cell, mask=m, other=0.0), mask=m)


@launchable(do_not_specialize=["n"])
def _decay_kernel(p_density, p_cells, p_old, n, decay, BLOCK: tl.constexpr):
    i, m = gpu.own_block(n, BLOCK)
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    old = tl.load(p_old + i, mask=m, other=-1.0)
    tl.store(p_density + i_cell, old * decay, mask=m & (old >= 0.0))


@launchable(do_not_specialize=["n"])
def _maximum_kernel(p_density_bits, p_cells, p_old, p_fresh, n, stride_fresh, BLOCK: tl.constexpr):
    i, m = gpu.own_block(n, BLOCK)
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    old = tl.load(p_old + i, mask=m, other=-1.0)
    fresh = tl.load(p_fresh + i.to(tl.int64) * stride_fresh, mask=m, other=0.0).to(tl.float32)
    useful = (fresh > 0.0) & (fresh < float("inf"))  # false for NaN
    m = m & useful & (old >= 0.0)
    tl.atomic_max(p_density_bits + i_cell, fresh.to(tl.int32, bitcast=True), mask=m, sem="relaxed")


@launchable(do_not_specialize=["n_cells"])
def _sum_kernel(p_density, p_sums, p_counts, n_cells, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_count = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, n_cells, PARTS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(p_density + i, mask=i < n_cells, other=-1.0)
        seen = value >= 0.0
        b_sum += tl.where(seen, value, 0.0)
        b_count += seen.to(tl.int32)
    tl.store(p_sums + tl.program_id(0), tl.sum(b_sum, 0))
    tl.store(p_counts + tl.program_id(0), tl.sum(b_count, 0))


@launchable(do_not_specialize=["n_words"])
def _bits_kernel(
    p_density, p_sums, p_counts, p_bits, p_mean, n_words, threshold, PARTS: tl.constexpr, WORDS: tl.constexpr
):
    i_part = tl.arange(0, PARTS)
    count = tl.sum(tl.load(p_counts + i_part), 0)
    mean = tl.sum(tl.load(p_sums + i_part), 0) / tl.maximum(count, 1).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(p_mean, mean)
    i_word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    i_bit = tl.arange(0, 32)
    m = i_word < n_words
    value = tl.load(p_density + i_word[:, None] * 32 + i_bit[None, :], mask=m[:, None], other=-1.0)
    occupied = (value > tl.minimum(mean, threshold)).to(tl.int32)
    tl.store(p_bits + i_word, tl.sum(occupied << i_bit[None, :], 1), mask=m)  # bits do not overlap: the sum is the or


@torch.no_grad()
def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    check_kernel_float(fresh=fresh)
    n = cells.shape[0]
    if n == 0:
        return
    cells, grid = cells.contiguous(), (cdiv(n, BLOCK),)
    old = torch.empty(n, dtype=torch.float32, device=density.device)
    _gather_kernel[grid](density, cells, old, n, BLOCK=BLOCK)
    _decay_kernel[grid](density, cells, old, n, decay, BLOCK=BLOCK)
    _maximum_kernel[grid](density.view(torch.int32), cells, old, fresh, n, fresh.stride(0), BLOCK=BLOCK)


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    n_cells, n_words = density.shape[0], bits.shape[0]
    sums = torch.empty(PARTS, dtype=torch.float32, device=density.device)
    counts = torch.empty(PARTS, dtype=torch.int32, device=density.device)
    mean = torch.empty((), dtype=torch.float32, device=density.device)
    parts = 8 if INTERPRETED else PARTS
    _sum_kernel[(parts,)](density, sums, counts, n_cells, PARTS=parts, BLOCK=BLOCK)
    words = BLOCK // 32
    _bits_kernel[(max(1, cdiv(n_words, words)),)](
        density, sums, counts, bits, mean, n_words, float(threshold), PARTS=parts, WORDS=words
    )
    return mean
