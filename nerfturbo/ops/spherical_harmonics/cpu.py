"""Spherical harmonics and their gradient, a chunk of directions per task. fp32; deterministic."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._cpu import as_float32, jit, launch
from .._sink import Node
from .reference import C0, C1, C2, C3

CHUNK = 8192
_C0, _C1 = np.float32(C0), np.float32(C1)
_C20, _C21, _C22 = (np.float32(c) for c in C2)
_C30, _C31, _C32, _C33, _C34 = (np.float32(c) for c in C3)
_1, _2, _3, _5, _6, _10, _15 = (np.float32(c) for c in (1, 2, 3, 5, 6, 10, 15))


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


@jit()
def _differentiate(first, last, directions, degree, grad, out):
    for i in range(first, last):
        x, y, z, g = directions[i, 0], directions[i, 1], directions[i, 2], grad[i]
        dx, dy, dz = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        if degree > 1:
            dx, dy, dz = -_C1 * g[3], -_C1 * g[1], _C1 * g[2]
        if degree > 2:
            dx += _C20 * (y * g[4] - z * g[7]) + _2 * _C22 * x * g[8]
            dy += _C20 * (x * g[4] - z * g[5]) - _2 * _C22 * y * g[8]
            dz += _6 * _C21 * z * g[6] - _C20 * (y * g[5] + x * g[7])
        if degree > 3:
            bow, lobe = _3 * (x * x - y * y), _5 * z * z - _1
            dx += -_6 * _C30 * x * y * g[9] + _C31 * y * z * g[10] - _C32 * lobe * g[13]
            dx += _2 * _C34 * x * z * g[14] - _C30 * bow * g[15]
            dy += -_C30 * bow * g[9] + _C31 * x * z * g[10] - _C32 * lobe * g[11]
            dy += -_2 * _C34 * y * z * g[14] + _6 * _C30 * x * y * g[15]
            dz += _C31 * x * y * g[10] - _10 * _C32 * z * (y * g[11] + x * g[13])
            dz += _C33 * (_15 * z * z - _3) * g[12] + _C34 * (x * x - y * y) * g[14]
        out[i, 0], out[i, 1], out[i, 2] = dx, dy, dz


class _SphericalHarmonics(Node):
    @staticmethod
    def forward(ctx: Any, directions: Tensor, degree: int) -> Tensor:
        ctx.save_for_backward(directions)
        ctx.degree = degree
        out = torch.empty(directions.shape[0], degree * degree)
        launch(_evaluate, directions.shape[0], CHUNK, as_float32("directions", directions), degree, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (directions,) = ctx.saved_tensors
        out = torch.empty(directions.shape[0], 3)
        launch(_differentiate, directions.shape[0], CHUNK, directions.float(), ctx.degree, grad.float(), out)
        return (out.to(directions.dtype),)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    return _SphericalHarmonics.apply(directions, degree)
