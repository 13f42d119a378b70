"""Instant-NGP from positions: the encoding and both networks, whose kernels keep their blocks in cache."""

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
    n = positions.shape[0]
    used = n if n_used is None else min(int(n_used), n)
    encoding = hash_encode(positions[:used], table.detach(), layout)
    logits = ngp_field(encoding, directions, ray_indices[:used], NgpWeights(*(w.detach() for w in weights)))
    return logits if used == n else torch.cat([logits, logits.new_empty(n - used, 4)])
