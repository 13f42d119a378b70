"""Where samples lie, stored (3, capacity) and handed out transposed, as the encoder reads it.

Decomposition: a task = a chunk of samples. fp32; the backward to rays, which only camera refinement asks for, is plain
torch, and comes without a contraction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...types import Aabb, PackedSamples
from ..contraction import Contraction
from ..reference import sample_positions as reference
from ._contraction import FOLDS, fold_unit
from ._launch import array, jit, launch

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


class _SamplePositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, origins: Tensor, directions: Tensor, samples: PackedSamples, aabb: Aabb | None, contraction: str
    ) -> Tensor:
        low, inverse = np.zeros(3, np.float32), np.ones(3, np.float32)
        if aabb is not None:
            low, inverse = np.array(aabb.low, np.float32), (1.0 / np.array(aabb.size)).astype(np.float32)
        out = torch.empty(3, samples.capacity)
        rays = (array(origins), array(directions), array(samples.ray_indices))
        times = (array(samples.t_starts), array(samples.t_ends))
        launch(_place, samples.capacity, CHUNK, *rays, *times, low, inverse, FOLDS.index(contraction), out.numpy())
        ctx.samples, ctx.n_rays, ctx.inverse = samples, origins.shape[0], torch.from_numpy(inverse)
        return out.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        samples, index, empty = ctx.samples, ctx.samples.ray_indices.long(), torch.zeros(ctx.n_rays, 3)
        grad, to_origins, to_directions = grad * ctx.inverse, None, None
        if ctx.needs_input_grad[0]:
            to_origins = empty.index_add(0, index, grad)
        if ctx.needs_input_grad[1]:
            to_directions = empty.index_add(0, index, grad * samples.midpoints().detach()[:, None])
        return to_origins, to_directions, None, None, None  # origins, directions, samples, aabb, contraction


def sample_positions(
    origins: Tensor, directions: Tensor, samples: PackedSamples, *, aabb: Aabb | None, contraction: Contraction = "none"
) -> Tensor:
    types = {origins.dtype, directions.dtype, samples.t_starts.dtype}
    if types != {torch.float32} or samples.n_rays == 0:
        return reference.sample_positions(origins, directions, samples, aabb=aabb, contraction=contraction)
    return _SamplePositions.apply(origins, directions, samples, aabb, contraction)
