"""Input encodings other than the hash grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequency_encode(values: Tensor, n_frequencies: int, *, include_input: bool = True) -> Tensor:
    """(n, d * (2 * n_frequencies + include_input)): sin and cos of 2^k * pi * values, k = 0 ... n_frequencies - 1.

    Arguments stay in fp32: half precision loses the phase at high frequencies.

    >>> frequency_encode(torch.tensor([[0.5]]), 1).round(decimals=3).tolist()
    [[0.5, 1.0, -0.0]]
    """
    wide = values if values.dtype == torch.float64 else values.float()
    scales = torch.pow(2.0, torch.arange(n_frequencies, device=values.device, dtype=wide.dtype)) * math.pi
    angles = (wide[:, None, :] * scales[:, None]).flatten(1)
    parts = [angles.sin(), angles.cos()]
    return torch.cat([wide, *parts] if include_input else parts, dim=-1)
