"""The arithmetic of marching that counting and writing share: where the lattice lies, which cells are occupied.

Both must decide alike about each lattice point, so both call these functions, with explicit `fma` where products and
sums may be joined and launched with `enable_fp_fusion=False`, so that nothing else is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .aabb import box_interval, load_xyz

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
def _inverse_lattice(t, rule, CONE: tl.constexpr):
    u = tl.div_rn(t - rule[0], rule[2])
    if CONE:
        u = tl.where(t < rule[3], u, rule[4] + tl.log(tl.maximum(t, rule[3]) / rule[3]) / rule[5])
    return u


@triton.jit
def prepare_rays(p_origins, p_directions, p_jitter, p_limits, p_rays, i_ray, m, strides, rule, box, CONE: tl.constexpr):
    """Write what a walk along a ray needs: origin and direction in cells of the finest level from the grid's centre,
    t_min, t_max, first lattice step, jitter, number of steps, and the largest component of the direction."""
    ox, oy, oz = load_xyz(p_origins, i_ray, strides[0], strides[1], m)
    dx, dy, dz = load_xyz(p_directions, i_ray, strides[2], strides[3], m)
    t_min, t_max = box_interval(
        ox, oy, oz, dx, dy, dz, box[0], box[1], box[2], box[3], box[4], box[5], rule[0], rule[1]
    )  # fmt: skip
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
    if CONE:
        middle = (lattice(u, rule, CONE) + lattice(u + 1.0, rule, CONE)) * 0.5
    else:
        middle = tl.fma(u + 0.5, rule[2], rule[0])
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
