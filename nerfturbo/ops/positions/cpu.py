"""Box intervals and sample positions: a task = a chunk of rays or samples. fp32. Intervals are compiled without fused
multiply-add and in the reference's order of operations: marching builds on them and promises the reference's samples to
the bit. Positions are stored (3, capacity); their backward is plain torch."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import Aabb
from .._cpu import as_float32, jit, launch
from .._sink import Node
from . import Contraction, reference, unit_box

FOLDS = ("none", "sphere", "cube")
QUARTER, HALF, ONE, TWO = np.float32(0.25), np.float32(0.5), np.float32(1.0), np.float32(2.0)


@jit(inner=True)
def fold_unit(x, y, z, fold):
    """Coordinates of the box [0, 1]^3 into [0, 1]^3, all of space: `fold`; `fold` counts in FOLDS."""
    if fold == 0:
        return x, y, z
    x, y, z = TWO * x - ONE, TWO * y - ONE, TWO * z - ONE
    size = max(abs(x), abs(y), abs(z)) if fold == 2 else np.float32(math.sqrt(x * x + y * y + z * z))
    factor = QUARTER * (TWO - ONE / size) / size if size > ONE else QUARTER
    return x * factor + HALF, y * factor + HALF, z * factor + HALF


BOX_CHUNK = 8192
_TINY = np.finfo(np.float32).tiny


@jit(exact=True, inline=True)
def box_interval(origins, directions, i, box, near, far):
    """t_min and t_max of ray i inside the box, both near for rays that miss."""
    start, end, valid = near, far, True
    for axis in range(3):
        d = directions[i, axis]
        if abs(d) < _TINY:
            d = _TINY
        a, b = (box[0, axis] - origins[i, axis]) / d, (box[1, axis] - origins[i, axis]) / d
        valid = valid and a == a and b == b
        start, end = max(start, min(a, b)), min(end, max(a, b))
    hit = valid and end > start
    return start if hit else near, end if hit else near


@jit(exact=True)
def _intersect(first, last, origins, directions, box, near, far, t_min, t_max):
    for i in range(first, last):
        t_min[i], t_max[i] = box_interval(origins, directions, i, box, near, far)


@torch.no_grad()
def ray_aabb(origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float, far: float) -> tuple[Tensor, Tensor]:
    rays = (as_float32("origins", origins), as_float32("directions", directions))
    limits = (np.array([aabb.low, aabb.high], np.float32), np.float32(near), np.float32(far))
    t_min, t_max = torch.empty(origins.shape[0]), torch.empty(origins.shape[0])
    launch(_intersect, origins.shape[0], BOX_CHUNK, *rays, *limits, t_min, t_max)
    return t_min, t_max


CHUNK = 16384


@jit()
def _place(first, last, origins, directions, rays, starts, ends, low, inverse, fold, out):
    for i in range(first, last):
        ray, middle = rays[i], (starts[i] + ends[i]) * np.float32(0.5)
        for axis in range(3):
            x = origins[ray, axis] + directions[ray, axis] * middle
            out[axis, i] = (x - low[axis]) * inverse[axis]
        if fold > 0:
            out[0, i], out[1, i], out[2, i] = fold_unit(out[0, i], out[1, i], out[2, i], fold)


class _SamplePositions(Node):
    @staticmethod
    def forward(ctx, origins, directions, samples, aabb, contraction) -> Tensor:
        low, inverse = np.array(unit_box(aabb), np.float32).reshape(2, 3)
        out = torch.empty(3, samples.capacity)
        rays = (origins, directions, samples.ray_indices, samples.t_starts, samples.t_ends)
        launch(_place, samples.capacity, CHUNK, *rays, low, inverse, FOLDS.index(contraction), out)
        ctx.samples, ctx.n_rays, ctx.inverse = samples, origins.shape[0], torch.from_numpy(inverse)
        return out.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        samples, index, empty = ctx.samples, ctx.samples.ray_indices.long(), torch.zeros(ctx.n_rays, 3)
        grad, to_origins, to_directions = grad * ctx.inverse, None, None
        if ctx.needs_input_grad[0]:
            to_origins = empty.index_add(0, index, grad)
        if ctx.needs_input_grad[1]:
            to_directions = empty.index_add(0, index, grad * samples.midpoints().detach()[:, None])
        return to_origins, to_directions


def sample_positions(origins, directions, samples, *, aabb, contraction: Contraction = "none") -> Tensor:
    types = {origins.dtype, directions.dtype, samples.t_starts.dtype}
    if types != {torch.float32} or samples.n_rays == 0:
        return reference.sample_positions(origins, directions, samples, aabb=aabb, contraction=contraction)
    return _SamplePositions.apply(origins, directions, samples, aabb, contraction)
