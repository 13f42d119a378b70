"""Density in one byte: its logarithm, so that filtered texels give sharp surfaces and all codes are equally exact.

    density * voxel = exp(LOW + code * (HIGH - LOW)) - exp(LOW),   code = byte / 255

Code 0 is exactly empty. One step of the byte is 4% of the density.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOW, HIGH = -6.0, 4.0
_NOTHING = math.exp(LOW)


def decode_density(code: Tensor, voxel: float | Tensor) -> Tensor:
    """Density per unit of length of codes in [0, 1], after filtering.

    >>> [round(value, 3) for value in decode_density(torch.tensor([0.0, 0.6]), 0.5).tolist()]
    [0.0, 1.995]
    """
    return (torch.exp(LOW + code * (HIGH - LOW)) - _NOTHING) / voxel


def encode_density(density: Tensor, voxel: float | Tensor) -> Tensor:
    """The inverse, clamped to [0, 1]."""
    return ((torch.log(density * voxel + _NOTHING) - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)
