"""The slab test, a chunk of rays per task.

Compiled without fused multiply-add and in the reference's order of operations: the marching kernel builds on t_min and
t_max and promises the reference's samples to the bit. fp32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...types import Aabb
from ._launch import array, as_float32, jit, launch

CHUNK = 8192
_TINY = np.finfo(np.float32).tiny


@jit(exact=True)
def _intersect(first, last, origins, directions, box, near, far, t_min, t_max):
    for i in range(first, last):
        start, end, valid = near, far, True
        for axis in range(3):
            d = directions[i, axis]
            if abs(d) < _TINY:
                d = _TINY
            a, b = (box[0, axis] - origins[i, axis]) / d, (box[1, axis] - origins[i, axis]) / d
            valid = valid and a == a and b == b
            start, end = max(start, min(a, b)), min(end, max(a, b))
        hit = valid and end > start
        t_min[i] = start if hit else near
        t_max[i] = end if hit else near


@torch.no_grad()
def ray_aabb(origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float, far: float) -> tuple[Tensor, Tensor]:
    rays = (array(as_float32("origins", origins)), array(as_float32("directions", directions)))
    box = np.array([aabb.low, aabb.high], np.float32)
    t_min, t_max = torch.empty(origins.shape[0]), torch.empty(origins.shape[0])
    limits = (np.float32(near), np.float32(far))
    launch(_intersect, origins.shape[0], CHUNK, *rays, box, *limits, t_min.numpy(), t_max.numpy())
    return t_min, t_max
