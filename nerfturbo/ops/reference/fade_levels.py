"""Level weights by torch's error function; gradients by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._sink import zero_tail
from ..hash_encode import HashLayout


def level_weights(footprints: Tensor, layout: HashLayout) -> Tensor:
    """(n, n_levels): what each level counts; 1 at footprint 0, where the argument is infinite."""
    wide = footprints if footprints.dtype == torch.float64 else footprints.float()
    scales = torch.tensor([level.scale for level in layout.levels], dtype=wide.dtype, device=wide.device)
    return torch.erf(1.0 / (math.sqrt(8.0) * wide[:, None] * scales))


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None) -> Tensor:
    weights = level_weights(zero_tail(footprints[:, None], n_used)[:, 0], layout)
    weights = weights.repeat_interleave(layout.n_features, dim=1)
    return (zero_tail(encoding, n_used) * weights).to(encoding.dtype)
