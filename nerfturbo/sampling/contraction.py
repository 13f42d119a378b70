"""Unbounded space into a ball of radius 2, so that a finite grid or encoding can cover all of it.

Inside the unit ball nothing moves; outside, x goes to (2 - 1 / |x|) x / |x|. Distances far away shrink as 1 / |x|^2, as
the pixels that see them do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError

Norm = Literal["euclidean", "max"]


def contract(positions: Tensor, *, norm: Norm = "euclidean") -> Tensor:
    """(..., 3) positions into the ball of radius 2, or, with the "max" norm, into the cube [-2, 2]^3.

    Differentiable and, across |x| = 1, continuous with its first derivative along x. Put the scene's centre of interest
    into the unit ball first; divide the result by 4 and add 0.5 for encodings of [0, 1]^3.

    >>> contract(torch.tensor([[0.5, 0.0, 0.0], [0.0, 4.0, 0.0]])).tolist()
    [[0.5, 0.0, 0.0], [0.0, 1.75, 0.0]]
    """
    size = _size(positions, norm)
    outside = size > 1.0
    safe = torch.where(outside, size, torch.ones_like(size))  # no gradient comes through a division by zero
    return torch.where(outside, (2.0 - 1.0 / safe) / safe * positions, positions)


def uncontract(contracted: Tensor, *, norm: Norm = "euclidean") -> Tensor:
    """The inverse of `contract`, for |x| < 2. Differentiable.

    >>> uncontract(torch.tensor([[0.5, 0.0, 0.0], [0.0, 1.75, 0.0]])).tolist()
    [[0.5, 0.0, 0.0], [0.0, 4.0, 0.0]]
    """
    size = _size(contracted, norm)
    outside = size > 1.0
    safe = torch.where(outside, size, torch.ones_like(size))
    return torch.where(outside, contracted / (safe * (2.0 - safe)), contracted)


def _size(positions: Tensor, norm: str) -> Tensor:
    if positions.shape[-1:] != (3,):
        raise InputError("positions", "shape (..., 3)", str(tuple(positions.shape)))
    if norm == "euclidean":
        square = positions.square().sum(-1, keepdim=True)
        return torch.where(square > 1.0, square, torch.ones_like(square)).sqrt()
    if norm == "max":
        return positions.abs().amax(-1, keepdim=True)
    raise InputError("norm", '"euclidean" or "max"', repr(norm))
