"""Instant-NGP from positions, one op after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..hash_encode import HashLayout
from ..ngp_field import NgpWeights
from .hash_encode import hash_encode
from .ngp_field import ngp_field


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    return True


def ngp_logits(
    positions: Tensor,
    directions: Tensor,
    ray_indices: Tensor,
    *,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    n_used: Tensor | None,
) -> Tensor:
    n = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    out = torch.empty(positions.shape[0], 4, device=positions.device)
    out[:n] = ngp_field(hash_encode(positions[:n], table, layout), directions, ray_indices[:n], weights).float()
    return out
