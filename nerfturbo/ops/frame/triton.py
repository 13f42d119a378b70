"""Front-to-back rounds: two launches a round besides the field's, one for the samples, one for compositing them.

Samples: one lane per place of the queue walks to its ray's next samples and keeps them as a lattice step and a word of
bits; one atomic add per program of BLOCK rays then hands out rows, without gaps. A lane tests one lattice step at a
time, with `march`'s own test, and leaps over what cannot hold a sample. A program for which there is no room leaves its
rays as they were. Compositing: one lane per place; the weights of its few samples pass through memory once, so that any
number of channels is summed by the same loop. Survivors enter the next queue by one atomic add.

Programs are as many as the device holds and share the blocks of the queue; walking ones draw their next block from a
counter, since some walks are ten times as long as others. Which rows and places a ray gets depends on timing, its
values do not. fp32; nothing is read back. See docs/rendering.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Aabb
from .. import _triton as gpu
from .._triton import INTERPRETED, cdiv, launchable, next_power_of_2
from ..march import OccupancyBits
from ..march import triton as marching
from ..positions import unit_box
from ..positions.triton import box_interval
from . import COLOR, DEPTH, STEP, TAKEN, THROUGH, WALKED, WINDOW, LiveRays, NextSamples, RoundLimits

SHORT = tl.constexpr(1e-3)  # cells by which a leap stops short of a face: more than rounding moves a point
ROOM = tl.constexpr(0.2)  # cells by which a leap over blocks stops short, as march's margin does
SAFE = tl.constexpr(0.05)  # lattice steps likewise; also what the middle of a growing step lies past its half


@triton.jit
def _left(x, cell, direction, inverse):
    """Time to a cell's face along one axis, in units of the finest level: `inverse` is 1 / |direction|."""
    return tl.where(direction > 0.0, cell.to(tl.float32) + 1.0 - x, x - cell.to(tl.float32)) * inverse


@triton.jit
def _free_time(
    p_distance, x, y, z, direction, inverse, m, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, SKIP: tl.constexpr
):
    """For points in empty cells: how long rays stay clear of other cells that may be occupied."""
    level, scale, x, y, z = marching._locate(x, y, z, LEVELS, RESOLUTION)
    last: tl.constexpr = RESOLUTION - 1
    cx, cy, cz = marching._clamp(x, last), marching._clamp(y, last), marching._clamp(z, last)
    shortest = tl.minimum(tl.minimum(inverse[0], inverse[1]), inverse[2])  # the time of one cell
    time = tl.minimum(_left(x, cx, direction[0], inverse[0]), _left(y, cy, direction[1], inverse[1]))
    time = tl.minimum(time, _left(z, cz, direction[2], inverse[2])) - shortest * SHORT
    if SKIP:
        blocks: tl.constexpr = RESOLUTION // marching.BLOCK_CELLS
        i_block = (level * blocks + cx // marching.BLOCK_CELLS) * blocks + cy // marching.BLOCK_CELLS
        free = tl.load(p_distance + i_block * blocks + cz // marching.BLOCK_CELLS, mask=m, other=0).to(tl.float32)
        time = tl.where(free > 0.0, shortest * (free * marching.BLOCK_CELLS - ROOM), time)
    return time / scale


@triton.jit
def find_samples(
    p_bits, p_distance, origin, direction, t_min, t_max, k, end, limit, rule,
    CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, SKIP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """From lattice steps k on: the step of each ray's first sample, a word that tells the samples from there, how many,
    and the step to go on with, -1 where the ray ends. Rays with t_max <= t_min have ended."""
    tiny: tl.constexpr = 1e-12
    inverse = (
        1.0 / tl.maximum(tl.abs(direction[0]), tiny),
        1.0 / tl.maximum(tl.abs(direction[1]), tiny),
        1.0 / tl.maximum(tl.abs(direction[2]), tiny),
    )
    first = k
    word = tl.zeros_like(limit)
    count = tl.zeros_like(limit)
    walking = t_max > t_min
    ended = walking == 0
    while tl.max(walking.to(tl.int32), 0) > 0:
        middle = marching.middle_of(k, rule, CONE)
        beyond = ((middle < t_max) & (k < end)) == 0
        ended = ended | (walking & beyond)
        walking = walking & (beyond == 0)
        hit = marching.test_segment(
            p_bits, k, origin, direction, t_min, tl.where(walking, t_max, t_min), rule, CONE, LEVELS, RESOLUTION
        )
        x = tl.fma(middle, direction[0], origin[0])
        y = tl.fma(middle, direction[1], origin[1])
        z = tl.fma(middle, direction[2], origin[2])
        empty = walking & (hit == 0) & (middle >= t_min)
        time = _free_time(p_distance, x, y, z, direction, inverse, empty, LEVELS, RESOLUTION, SKIP)
        first = tl.where(word == 0, k, first)
        word |= hit << ((k - first).to(tl.int32) & (WINDOW - 1))
        count += hit
        if CONE:  # the first lattice step after k whose middle may lie past middle + time
            after = tl.floor(marching._inverse_lattice(middle + time, rule, CONE) - (0.5 + SAFE)) + 1.0
        else:
            after = k + tl.floor(time / rule[2] - SAFE) + 1.0
        after = tl.where(after > k + 1.0, after, k + 1.0)  # also where time is not a number
        k = tl.where(walking, tl.where(empty, after, k + 1.0), k)
        walking = walking & (count < limit) & ((word == 0) | (k - first < WINDOW))
    return first, word, count, tl.where(ended, -1.0, k)


@triton.jit
def load_live_rays(p_origins, p_directions, ray, m, step, rule, box, walked, CONE: tl.constexpr):
    """Rays as `prepare_rays` leaves them, their part inside the box, and the lattice steps to begin and to end with."""
    ox, oy, oz = gpu.load_point(p_origins, ray, m, 3, 1)
    dx, dy, dz = gpu.load_point(p_directions, ray, m, 3, 1)
    t_min, t_max = box_interval(ox, oy, oz, dx, dy, dz, box, rule[0], rule[1])
    first = tl.maximum(tl.floor(marching._inverse_lattice(t_min, rule, CONE)) - 1.0, 0.0)
    origin = ((ox - box[6]) * box[9], (oy - box[7]) * box[10], (oz - box[8]) * box[11])
    direction = (dx * box[9], dy * box[10], dz * box[11])
    t_max = tl.where(m, t_max, t_min)
    return (ox, oy, oz), (dx, dy, dz), origin, direction, t_min, t_max, tl.maximum(step, first), first + walked


BLOCK = 256 if INTERPRETED else 32  # rays of a program: a warp, whose lanes walk on while one of them has to
FINISH_BLOCK = 256
DISTANCE_BLOCK = 2048 if INTERPRETED else 256
FAR = 8  # blocks
# The two sides of the queue change places from round to round: one kernel must serve both.
UNALIGNED = ["p_queue", "p_next_queue", "p_live", "p_next_live", "p_used"]
MAX_LOGIT = tl.constexpr(15.0)
AT_THROUGH, AT_STEP, AT_TAKEN = tl.constexpr(THROUGH), tl.constexpr(STEP), tl.constexpr(TAKEN)
AT_DEPTH, AT_COLOR = tl.constexpr(DEPTH), tl.constexpr(COLOR)


@launchable
def _summary_kernel(p_bits, p_summary, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, WORDS: tl.constexpr):
    marching.summarize(p_bits, p_summary, tl.program_id(0), LEVELS, RESOLUTION, WORDS)


@launchable(do_not_specialize=["n_blocks"])
def _distance_kernel(p_in, p_out, n_blocks, STRIDE: tl.constexpr, SIDE: tl.constexpr, FAR: tl.constexpr,
                     FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One axis of a distance in the maximum norm: min over j of max(|i - j|, value at j), at most FAR."""
    i, m = gpu.own_block(n_blocks, BLOCK)
    place = i // STRIDE % SIDE
    least = tl.full([BLOCK], FAR, tl.int32)
    for step in tl.static_range(-FAR + 1, FAR):
        inside = m & (place + step >= 0) & (place + step < SIDE)
        value = tl.load(p_in + i + step * STRIDE, mask=inside, other=0).to(tl.int32)
        if FIRST:  # the summary: 1 where samples may be near
            value = tl.where(value != 0, 0, FAR)
        value = tl.maximum(value, step if step > 0 else -step)
        least = tl.where(inside, tl.minimum(least, value), least)
    tl.store(p_out + i, least.to(tl.int8), mask=m)


@triton.jit
def _store_samples(
    p_positions, p_starts, p_ends, p_rays, rows, origin, direction, ray, first, word, row, rule, unit,
    CONE: tl.constexpr,
):  # fmt: skip
    """One row per bit of each lane's word, from its first row on."""
    while tl.max((word != 0).to(tl.int32), 0) > 0:
        m = word != 0
        bit, word = marching.pop_lowest(word)
        k = first + bit.to(tl.float32)
        t0 = marching.lattice(k, rule, CONE)
        t1 = marching.lattice(k + 1.0, rule, CONE)
        middle = (t0 + t1) * 0.5
        tl.store(p_starts + row, t0, mask=m)
        tl.store(p_ends + row, t1, mask=m)
        tl.store(p_rays + row, ray, mask=m)
        tl.store(p_positions + row, (origin[0] + middle * direction[0] - unit[0]) * unit[3], mask=m)
        tl.store(p_positions + rows + row, (origin[1] + middle * direction[1] - unit[1]) * unit[4], mask=m)
        p_third = p_positions + 2 * rows.to(tl.int64)
        tl.store(p_third + row, (origin[2] + middle * direction[2] - unit[2]) * unit[5], mask=m)
        row += m.to(tl.int32)


@triton.jit
def _clear_rows(p_positions, p_starts, p_ends, p_rays, first, rows, BLOCK: tl.constexpr):
    """Rows that were handed out to rays for which the rest of them was too few."""
    for start in range(first, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        nothing = tl.zeros([BLOCK], tl.float32)
        tl.store(p_starts + row, nothing, mask=row < rows)
        tl.store(p_ends + row, nothing, mask=row < rows)
        tl.store(p_rays + row, tl.zeros([BLOCK], tl.int32), mask=row < rows)
        for axis in tl.static_range(3):
            tl.store(p_positions + axis * rows.to(tl.int64) + row, nothing, mask=row < rows)


@launchable(do_not_specialize=["rows", "n_rays"], do_not_specialize_on_alignment=UNALIGNED)
def _next_kernel(
    p_origins, p_directions, p_state, p_queue, p_live, p_next_live, p_used, p_bits, p_distance,
    p_positions, p_starts, p_ends, p_rays, p_spans, rows, n_rays, rule, box, unit, limits,
    COLUMNS: tl.constexpr, CONE: tl.constexpr, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, SKIP: tl.constexpr,
    WINDOW: tl.constexpr, WALKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_live = tl.load(p_live)
    if tl.program_id(0) == 0:
        tl.store(p_next_live, 0)  # nobody adds to it before this kernel has ended
    block = tl.program_id(0)
    while block < tl.cdiv(n_live, BLOCK):
        following = tl.num_programs(0) + tl.atomic_add(p_used + 1, 1, sem="relaxed")  # asked for before it is needed
        place = block * BLOCK + tl.arange(0, BLOCK)
        m = place < n_live
        row = tl.zeros([BLOCK], tl.int32)
        count = tl.zeros([BLOCK], tl.int32)
        if tl.load(p_used, volatile=True) < rows:
            ray = tl.load(p_queue + place, mask=m, other=0)
            p_ray = p_state + ray.to(tl.int64) * COLUMNS
            step = tl.load(p_ray + AT_STEP, mask=m, other=0.0)
            taken = tl.load(p_ray + AT_TAKEN, mask=m, other=0.0)
            limit = tl.minimum(tl.maximum((taken * limits[2]).to(tl.int32), limits[0]), limits[1])
            near, along, origin, direction, t_min, t_max, k, end = load_live_rays(
                p_origins, p_directions, ray, m, step, rule, box, WALKED, CONE
            )
            first, word, count, step = find_samples(
                p_bits, p_distance, origin, direction, t_min, t_max, k, end, limit, rule,
                CONE, LEVELS, RESOLUTION, SKIP, WINDOW,
            )  # fmt: skip
            total = tl.sum(count, 0)
            base = tl.atomic_add(p_used, total, sem="relaxed")
            if base + total <= rows:
                row = base + tl.cumsum(count, 0) - count
                tl.store(p_ray + AT_STEP, step, mask=m)
                tl.store(p_ray + AT_TAKEN, taken + count.to(tl.float32), mask=m)
                _store_samples(
                    p_positions, p_starts, p_ends, p_rays, rows, near, along, ray, first, word, row, rule, unit, CONE
                )
            else:
                count = tl.zeros([BLOCK], tl.int32)
                _clear_rows(p_positions, p_starts, p_ends, p_rays, base, rows, BLOCK)
        tl.store(p_spans + place, row, mask=m)
        tl.store(p_spans + n_rays + place, count, mask=m)
        block = following


@triton.jit
def _absorb_rays(
    p_ray, p_starts, p_ends, p_density, p_rgb, p_weights, row, count, m, n_channels, strides,
    early_stop_eps, alpha_thre, LOGITS: tl.constexpr,
):  # fmt: skip
    """Composite each lane's rows from `row` on; returns the transmittance behind them."""
    longest = tl.max(count, 0)
    through = tl.load(p_ray + AT_THROUGH, mask=m, other=0.0)
    if longest > 0:
        has = m & (count > 0)
        depth = tl.load(p_ray + AT_DEPTH, mask=has, other=0.0)
        for j in range(longest):
            i_row = row + j
            lit = has & (j < count) & (through >= early_stop_eps)
            t0 = tl.load(p_starts + i_row, mask=lit, other=0.0)
            t1 = tl.load(p_ends + i_row, mask=lit, other=0.0)
            sigma = tl.load(p_density + i_row.to(tl.int64) * strides[0], mask=lit, other=0.0).to(tl.float32)
            if LOGITS:
                sigma = tl.exp(tl.where(sigma > MAX_LOGIT, MAX_LOGIT, sigma))
            alpha = gpu.one_minus_exp(sigma * (t1 - t0))
            lit = lit & (alpha >= alpha_thre)  # false for NaN
            weight = tl.where(lit, through * alpha, 0.0)
            tl.store(p_weights + i_row, weight, mask=has & (j < count))
            depth += weight * (t0 + t1) * 0.5
            through = tl.where(lit, through * tl.exp(-sigma * (t1 - t0)), through)
        tl.store(p_ray + AT_THROUGH, through, mask=has)
        tl.store(p_ray + AT_DEPTH, depth, mask=has)
        for channel in range(n_channels):
            colour = tl.load(p_ray + AT_COLOR + channel, mask=has, other=0.0)
            for j in range(longest):
                i_row = row + j
                weight = tl.load(p_weights + i_row, mask=has & (j < count), other=0.0)
                p_channel = p_rgb + i_row.to(tl.int64) * strides[1] + channel * strides[2]
                value = tl.load(p_channel, mask=weight > 0.0, other=0.0).to(tl.float32)
                if LOGITS:
                    value = tl.sigmoid(value)
                colour += weight * value
            tl.store(p_ray + AT_COLOR + channel, colour, mask=has)
    return through


@launchable(do_not_specialize=["n_rays"], do_not_specialize_on_alignment=UNALIGNED)
def _absorb_kernel(
    p_state, p_queue, p_next_queue, p_live, p_next_live, p_used, p_spans, p_starts, p_ends, p_density, p_rgb, p_weights,
    p_alpha_thre, n_rays, n_channels, strides, early_stop_eps, alpha_thre,
    COLUMNS: tl.constexpr, LOGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if p_alpha_thre is not None:
        alpha_thre = tl.load(p_alpha_thre)
    n_live = tl.load(p_live)
    if tl.program_id(0) == 0:
        tl.store(p_used, 0)  # for the next round
        tl.store(p_used + 1, 0)
    for block in range(tl.program_id(0), tl.cdiv(n_live, BLOCK), tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        m = place < n_live
        ray = tl.load(p_queue + place, mask=m, other=0)
        row = tl.load(p_spans + place, mask=m, other=0)
        count = tl.load(p_spans + n_rays + place, mask=m, other=0)
        p_ray = p_state + ray.to(tl.int64) * COLUMNS
        through = _absorb_rays(
            p_ray, p_starts, p_ends, p_density, p_rgb, p_weights, row, count, m, n_channels, strides,
            early_stop_eps, alpha_thre, LOGITS,
        )  # fmt: skip
        step = tl.load(p_ray + AT_STEP, mask=m, other=-1.0)
        alive = m & (step >= 0.0) & (through >= early_stop_eps)
        behind = tl.cumsum(alive.to(tl.int32), 0)
        total = tl.sum(alive.to(tl.int32), 0)
        if total > 0:
            base = tl.atomic_add(p_next_live, total, sem="relaxed")
            tl.store(p_next_queue + base + behind - 1, ray, mask=alive)


@launchable(do_not_specialize=["n_rays"])
def _finish_kernel(
    p_state, p_background, p_rgb, p_opacity, p_depth, n_rays, n_channels, stride_ray, stride_channel,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_ray, m = gpu.own_block(n_rays, BLOCK)
    p_ray = p_state + i_ray.to(tl.int64) * COLUMNS
    through = tl.load(p_ray + AT_THROUGH, mask=m, other=0.0)
    opacity = 1.0 - through
    depth = tl.load(p_ray + AT_DEPTH, mask=m, other=0.0)
    tl.store(p_opacity + i_ray, opacity, mask=m)
    tl.store(p_depth + i_ray, depth / tl.maximum(opacity, 1e-6), mask=m)
    for channel in range(n_channels):
        value = tl.load(p_ray + AT_COLOR + channel, mask=m, other=0.0)
        if p_background is not None:
            p = p_background + i_ray.to(tl.int64) * stride_ray + channel * stride_channel
            value += through * tl.load(p, mask=m, other=0.0).to(tl.float32)
        value = tl.minimum(tl.maximum(value, 0.0), 1.0)
        tl.store(p_rgb + i_ray.to(tl.int64) * n_channels + channel, value, mask=m)


def summarize_grid(grid: OccupancyBits) -> Tensor | None:
    """A byte per block of 4^3 cells: so many blocks around it, 0 to FAR, are empty. None where words do not fit."""
    resolution, side = grid.resolution, grid.resolution // 4
    columns, n_blocks = grid.levels * side**2, grid.levels * side**3
    if resolution % 32:
        return None
    near, far = torch.empty(2, n_blocks, dtype=torch.int8, device=grid.bits.device)
    words = next_power_of_2(resolution // 32)
    _summary_kernel[(columns,)](grid.bits, near, LEVELS=grid.levels, RESOLUTION=resolution, WORDS=words, num_warps=1)
    for axis in range(3):
        _distance_kernel[(cdiv(n_blocks, DISTANCE_BLOCK),)](
            near, far, n_blocks, STRIDE=side**axis, SIDE=side, FAR=FAR, FIRST=axis == 0, BLOCK=DISTANCE_BLOCK
        )
        near, far = far, near
    return near


def _programs(live: LiveRays) -> int:
    return max(1, gpu.ray_programs(cdiv(live.state.shape[0], BLOCK), live.state.device))


@torch.no_grad()
def next_samples(live: LiveRays, *, rows: int, limits: RoundLimits, aabb: Aabb | None) -> NextSamples:
    device, n_rays, side, grid = live.state.device, live.state.shape[0], live.side, live.grid
    floats = torch.empty(5, rows, dtype=torch.float32, device=device)
    ray_indices = torch.empty(rows, dtype=torch.int32, device=device)
    spans = torch.empty(2, n_rays, dtype=torch.int32, device=device)
    counts = live.counts
    _next_kernel[(_programs(live),)](
        live.origins, live.directions, live.state, live.places[side], counts[side:], counts[1 - side :], counts[2:],
        grid.bits, live.summary, floats, floats[3], floats[4], ray_indices, spans, rows, n_rays,
        marching._rule_arguments(live.rule), marching._box_arguments(grid.aabb, grid.resolution, grid.levels),
        unit_box(aabb), (limits.least, limits.most, limits.growth),
        COLUMNS=live.state.shape[1], CONE=live.rule.cone_angle > 0.0, LEVELS=grid.levels, RESOLUTION=grid.resolution,
        SKIP=live.summary is not None, WINDOW=WINDOW, WALKED=float(WALKED), BLOCK=BLOCK,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return NextSamples(floats[:3].t(), floats[3], floats[4], ray_indices, spans, counts[2])


@torch.no_grad()
def absorb_samples(live, samples, density, rgb, *, early_stop_eps, alpha_thre, logits) -> None:
    side, n_rays, counts = live.side, live.state.shape[0], live.counts
    weights = torch.empty(density.shape[0], dtype=torch.float32, device=density.device)
    number, pointer = gpu.scalar_or_pointer(alpha_thre, density.device)
    _absorb_kernel[(_programs(live),)](
        live.state, live.places[side], live.places[1 - side], counts[side:], counts[1 - side :], counts[2:],
        samples.spans, samples.t_starts, samples.t_ends, density.detach(), rgb.detach(), weights, pointer, n_rays,
        live.channels, (density.stride(0), *rgb.stride()), float(early_stop_eps), number,
        COLUMNS=live.state.shape[1], LOGITS=logits, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


@torch.no_grad()
def finish_rays(live: LiveRays, background: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    n_rays, device = live.state.shape[0], live.state.device
    rgb = torch.empty(n_rays, live.channels, dtype=torch.float32, device=device)
    opacity, depth = torch.empty(2, n_rays, dtype=torch.float32, device=device)
    if n_rays:
        _finish_kernel[(cdiv(n_rays, FINISH_BLOCK),)](
            live.state, background, rgb, opacity, depth, n_rays, live.channels, *gpu.ray_strides(background),
            COLUMNS=live.state.shape[1], BLOCK=FINISH_BLOCK, num_warps=4,
        )  # fmt: skip
    return rgb, opacity, depth
