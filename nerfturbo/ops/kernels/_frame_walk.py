"""The walk of a front-to-back round: each lane follows one ray through the grid to its next few samples.

Rays of an image that follow each other in the queue see the same cells, so lanes of a warp stay together. A lane
tests one lattice step at a time, with `march`'s own test, and leaps over what cannot hold a sample: to the last step
inside an empty cell, or as far as the blocks around are known to be empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._march import BLOCK_CELLS, _clamp, _inverse_lattice, _locate, lattice, test_segment
from .aabb import box_interval, load_xyz

SHORT = tl.constexpr(1e-3)  # cells by which a leap stops short of a face: more than rounding moves a point
ROOM = tl.constexpr(0.2)  # cells by which a leap over blocks stops short, as march's margin does
SAFE = tl.constexpr(0.05)  # lattice steps likewise; also what the middle of a growing step lies past its half


@triton.jit
def _middle(k, rule, CONE: tl.constexpr):
    """As `test_segment` computes it."""
    if CONE:
        return (lattice(k, rule, CONE) + lattice(k + 1.0, rule, CONE)) * 0.5
    else:
        return tl.fma(k + 0.5, rule[2], rule[0])


@triton.jit
def _left(x, cell, direction, inverse):
    """Time to a cell's face along one axis, in units of the finest level: `inverse` is 1 / |direction|."""
    return tl.where(direction > 0.0, cell.to(tl.float32) + 1.0 - x, x - cell.to(tl.float32)) * inverse


@triton.jit
def _free_time(
    p_distance, x, y, z, direction, inverse, m, LEVELS: tl.constexpr, RESOLUTION: tl.constexpr, SKIP: tl.constexpr
):
    """For points in empty cells: how long rays stay clear of other cells that may be occupied."""
    level, scale, x, y, z = _locate(x, y, z, LEVELS, RESOLUTION)
    cx, cy, cz = _clamp(x, RESOLUTION - 1), _clamp(y, RESOLUTION - 1), _clamp(z, RESOLUTION - 1)
    shortest = tl.minimum(tl.minimum(inverse[0], inverse[1]), inverse[2])  # the time of one cell
    time = tl.minimum(_left(x, cx, direction[0], inverse[0]), _left(y, cy, direction[1], inverse[1]))
    time = tl.minimum(time, _left(z, cz, direction[2], inverse[2])) - shortest * SHORT
    if SKIP:
        blocks: tl.constexpr = RESOLUTION // BLOCK_CELLS
        i_block = (level * blocks + cx // BLOCK_CELLS) * blocks + cy // BLOCK_CELLS
        free = tl.load(p_distance + i_block * blocks + cz // BLOCK_CELLS, mask=m, other=0).to(tl.float32)
        time = tl.where(free > 0.0, shortest * (free * BLOCK_CELLS - ROOM), time)
    return time / scale


@triton.jit
def _leap(k, middle, time, rule, CONE: tl.constexpr):
    """The first lattice step after k whose middle may lie past middle + time."""
    if CONE:
        after = tl.floor(_inverse_lattice(middle + time, rule, CONE) - (0.5 + SAFE)) + 1.0
    else:
        after = k + tl.floor(time / rule[2] - SAFE) + 1.0
    return tl.where(after > k + 1.0, after, k + 1.0)  # also where time is not a number


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
        middle = _middle(k, rule, CONE)
        beyond = ((middle < t_max) & (k < end)) == 0
        ended = ended | (walking & beyond)
        walking = walking & (beyond == 0)
        hit = test_segment(
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
        next_k = tl.where(empty, _leap(k, middle, time, rule, CONE), k + 1.0)
        k = tl.where(walking, next_k, k)
        walking = walking & (count < limit) & ((word == 0) | (k - first < WINDOW))
    return first, word, count, tl.where(ended, -1.0, k)


@triton.jit
def load_live_rays(p_origins, p_directions, ray, m, step, rule, box, walked, CONE: tl.constexpr):
    """Rays in cells of the finest level from the grid's centre, as `prepare_rays` leaves them, their part inside the
    box, and the lattice steps to begin and to end with."""
    ox, oy, oz = load_xyz(p_origins, ray, 3, 1, m)
    dx, dy, dz = load_xyz(p_directions, ray, 3, 1, m)
    t_min, t_max = box_interval(
        ox, oy, oz, dx, dy, dz, box[0], box[1], box[2], box[3], box[4], box[5], rule[0], rule[1]
    )  # fmt: skip
    first = tl.maximum(tl.floor(_inverse_lattice(t_min, rule, CONE)) - 1.0, 0.0)
    origin = ((ox - box[6]) * box[9], (oy - box[7]) * box[10], (oz - box[8]) * box[11])
    direction = (dx * box[9], dy * box[10], dz * box[11])
    t_max = tl.where(m, t_max, t_min)
    return (ox, oy, oz), (dx, dy, dz), origin, direction, t_min, t_max, tl.maximum(step, first), first + walked
