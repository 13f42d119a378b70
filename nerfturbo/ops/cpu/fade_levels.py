"""Level weights, sample by sample. fp32 inside; the result has the encoding's dtype and is stored row by row.

Decomposition: a task = a chunk of samples. The backward is the forward on the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hash_encode import HashLayout
from ._launch import array, as_float32, jit, launch

CHUNK = 1024


@jit()
def _fade(first, last, values, footprints, bounds, n_features, used, out):
    """bounds (n_levels,): 1 / (sqrt(8) s_l)."""
    for i in range(first, last):
        if i >= used:
            out[i, :] = np.float32(0.0)
            continue
        for level in range(bounds.shape[0]):
            weight = np.float32(math.erf(bounds[level] / footprints[i]))
            for f in range(level * n_features, (level + 1) * n_features):
                out[i, f] = values[i, f] * weight


def _run(values: Tensor, footprints: Tensor, layout: HashLayout, used: int) -> Tensor:
    out = torch.empty(values.shape)
    bounds = np.array([1.0 / (math.sqrt(8.0) * level.scale) for level in layout.levels], np.float32)
    rows = array(as_float32("encoding", values))
    widths = array(as_float32("footprints", footprints))
    launch(_fade, values.shape[0], CHUNK, rows, widths, bounds, layout.n_features, used, out.numpy())
    return out.to(values.dtype)


class _FadeLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, encoding: Tensor, footprints: Tensor, layout: HashLayout, used: int) -> Tensor:
        ctx.save_for_backward(footprints)
        ctx.rest = layout, used
        return _run(encoding, footprints, layout, used)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _run(grad, ctx.saved_tensors[0], *ctx.rest), None, None, None  # encoding, footprints, layout, used


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None) -> Tensor:
    used = encoding.shape[0] if n_used is None else int(n_used)
    return _FadeLevels.apply(encoding, footprints, layout, used)
