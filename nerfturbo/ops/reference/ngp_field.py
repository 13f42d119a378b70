"""Instant-NGP's networks as matrix products in fp32 (float64 for float64); gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gather import take_rows
from ..hash_encode import HashLayout
from ..ngp_field import MAX_LOGIT, NgpWeights
from .fused_mlp import fused_mlp
from .hash_encode import hash_encode


def ngp_field(encoding: Tensor, directions: Tensor, ray_indices: Tensor | None, weights: NgpWeights) -> Tensor:
    work = torch.promote_types(encoding.dtype, torch.float32)
    density_in, density_out, colour_in, colour_mid, colour_out = (w.to(work) for w in weights)
    features = fused_mlp(encoding.to(work), [density_in, density_out])
    directions = directions.to(work)
    own = directions if ray_indices is None else take_rows(directions, ray_indices.long())
    inputs = torch.cat([own, features], dim=-1)
    return torch.cat([fused_mlp(inputs, [colour_in, colour_mid, colour_out]), features[:, :1]], dim=-1)


def ngp_density(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> Tensor:
    encoding = hash_encode(positions, table, layout)
    work = torch.promote_types(encoding.dtype, torch.float32)
    density_in, density_out = (w.to(work) for w in weights)
    return fused_mlp(encoding.to(work), [density_in, density_out[:1]])[:, 0]


def ngp_densities(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> Tensor:
    return ngp_density(positions, table, layout, weights).clamp(max=MAX_LOGIT).exp()
