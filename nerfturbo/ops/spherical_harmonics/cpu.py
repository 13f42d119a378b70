"""Spherical harmonics and their gradient, a chunk of directions per task. fp32; deterministic."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._cpu import as_float32, jit, launch
from .._sink import Node
from . import SLOPES

CHUNK = 8192
_C0, _C1 = np.float32(0.28209479177387814), np.float32(0.4886025119029199)
_C20, _C21, _C22 = (np.float32(c) for c in (1.0925484305920792, 0.31539156525252005, 0.5462742152960396))
_C30, _C31, _C32 = (np.float32(c) for c in (0.5900435899266435, 2.890611442640554, 0.4570457994644658))
_C33, _C34 = np.float32(0.3731763325901154), np.float32(1.445305721320277)
_X, _Y, _Z = (tuple(slope for slope in SLOPES if slope[0] == axis) for axis in range(3))
_1, _3, _5 = (np.float32(c) for c in (1, 3, 5))


@jit()
def _evaluate(first, last, directions, degree, out):
    for i in range(first, last):
        x, y, z = directions[i, 0], directions[i, 1], directions[i, 2]
        out[i, 0] = _C0
        if degree > 1:
            out[i, 1], out[i, 2], out[i, 3] = -_C1 * y, _C1 * z, -_C1 * x
        if degree > 2:
            out[i, 4], out[i, 5], out[i, 6] = _C20 * x * y, -_C20 * y * z, _C21 * (_3 * z * z - _1)
            out[i, 7], out[i, 8] = -_C20 * x * z, _C22 * (x * x - y * y)
        if degree > 3:
            out[i, 9], out[i, 10] = -_C30 * y * (_3 * x * x - y * y), _C31 * x * y * z
            out[i, 11], out[i, 12] = -_C32 * y * (_5 * z * z - _1), _C33 * z * (_5 * z * z - _3)
            out[i, 13], out[i, 14] = -_C32 * x * (_5 * z * z - _1), _C34 * z * (x * x - y * y)
            out[i, 15] = -_C30 * x * (x * x - _3 * y * y)


@jit(inline=True)
def _along(slopes, values, grad):
    total = np.float32(0.0)
    for _, k, other, factor in slopes:
        if k < len(values):
            total += np.float32(factor) * values[other] * grad[k]
    return total


@jit()
def _differentiate(first, last, values, grad, out):
    for i in range(first, last):
        out[i, 0] = _along(_X, values[i], grad[i])
        out[i, 1] = _along(_Y, values[i], grad[i])
        out[i, 2] = _along(_Z, values[i], grad[i])


class _SphericalHarmonics(Node):
    @staticmethod
    def forward(ctx: Any, directions: Tensor, degree: int) -> Tensor:
        out = torch.empty(directions.shape[0], degree * degree)
        launch(_evaluate, directions.shape[0], CHUNK, as_float32("directions", directions), degree, out)
        ctx.save_for_backward(out)
        ctx.dtype = directions.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        out = torch.empty(len(values), 3)
        launch(_differentiate, len(values), CHUNK, values, grad.float(), out)
        return (out.to(ctx.dtype),)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    return _SphericalHarmonics.apply(directions, degree)
