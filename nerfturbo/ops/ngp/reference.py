"""Instant-NGP as the ops it is made of, in fp32 (float64 for float64); gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._sink import redirect_all, zero_tail
from ..composite import visible_thickness
from ..composite.reference import merge_weak_samples, visibility
from ..hash_encode.reference import hash_encode
from ..mlp.reference import fused_mlp
from ..packed import take_rows
from ..positions.reference import sample_positions
from . import MAX_LOGIT, NgpWeights, activate


def ngp_field(encoding, directions, ray_indices, weights, *, sink=None, n_used=None) -> Tensor:
    encoding, weights = zero_tail(encoding, n_used), redirect_all(weights, sink)
    work = torch.promote_types(encoding.dtype, torch.float32)
    density_in, density_out, colour_in, colour_mid, colour_out = (w.to(work) for w in weights)
    features = fused_mlp(encoding.to(work), [density_in, density_out])
    directions = directions.to(work)
    own = directions if ray_indices is None else take_rows(directions, ray_indices.long())
    inputs = torch.cat([own, features], dim=-1)
    raw = torch.cat([fused_mlp(inputs, [colour_in, colour_mid, colour_out]), features[:, :1]], dim=-1)
    return zero_tail(raw, n_used)


def ngp_density_logits(positions, table, layout, weights, *, n_used=None, exponential=False):
    encoding = hash_encode(zero_tail(positions, n_used), table, layout)
    work = torch.promote_types(encoding.dtype, torch.float32)
    density_in, density_out = (w.to(work) for w in weights)
    logits = fused_mlp(encoding.to(work), [density_in, density_out[:1]])[:, 0]
    return logits.clamp(max=MAX_LOGIT).exp() if exponential else zero_tail(logits, n_used)


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    return True


def ngp_logits(positions, directions, ray_indices, *, table, layout, weights, n_used) -> Tensor:
    n = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    out = torch.empty(positions.shape[0], 4, device=positions.device)
    out[:n] = ngp_field(hash_encode(positions[:n], table, layout), directions, ray_indices[:n], weights).float()
    return out


def ngp_query(positions, directions, table, layout, weights, *, half) -> tuple[Tensor, Tensor]:
    from ..hash_encode import hash_encode
    from . import ngp_field

    return activate(ngp_field(hash_encode(positions, table, layout, half=half), directions, None, weights))


@torch.no_grad()
def ngp_visibility(origins, directions, samples, field, *, early_stop_eps, alpha_thre, thinning=None) -> Tensor:
    positions = sample_positions(origins, directions, samples, aabb=field.aabb)
    options = {"n_used": samples.n_samples, "exponential": True}
    density = ngp_density_logits(positions, field.table, field.layout, field.weights, **options)
    keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    if thinning is None:
        return keep
    return merge_weak_samples(visible_thickness(density, samples, keep), samples, thinning)
