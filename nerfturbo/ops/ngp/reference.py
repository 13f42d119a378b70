"""Instant-NGP's networks as matrix products in fp32 (float64 for float64); gradients by autograd.

Instant-NGP from positions, one op after the other.

Instant-NGP point by point as the ops it is made of, and the activations; gradients by autograd.

Density of every sample, then the visibility test: what the other backends must equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from .._sink import zero_tail
from ..composite import Thinning, visible_thickness
from ..composite.reference import thin_codes, visibility
from ..hash_encode import HashLayout
from ..hash_encode.reference import hash_encode
from ..mlp.reference import fused_mlp
from ..packed import take_rows
from ..positions.reference import sample_positions
from . import MAX_LOGIT, NgpDensity, NgpWeights, activate


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


def ngp_query(
    positions: Tensor,
    directions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    *,
    half: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from ..hash_encode import hash_encode
    from . import ngp_field

    return activate(ngp_field(hash_encode(positions, table, layout, half=half), directions, None, weights))


@torch.no_grad()
def ngp_visibility(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    field: NgpDensity,
    *,
    early_stop_eps: float,
    alpha_thre: float | Tensor,
    thinning: Thinning | None = None,
) -> Tensor:
    positions = sample_positions(origins, directions, samples, aabb=field.aabb)
    logits = ngp_density(zero_tail(positions, samples.n_samples), field.table, field.layout, field.weights)
    density = torch.exp(logits.clamp(max=MAX_LOGIT))
    keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    if thinning is None:
        return keep
    return thin_codes(visible_thickness(density, samples, keep), samples, thinning)
