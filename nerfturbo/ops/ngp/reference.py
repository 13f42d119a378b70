"""Instant-NGP as the ops it is made of, in fp32 (float64 for float64); gradients by autograd."""

import torch
from torch import Tensor

from .. import hash_encode as any_hash_encode
from .._sink import redirect_all, zero_tail
from ..composite import visible_codes
from ..hash_encode.reference import hash_encode
from ..mlp.reference import fused_mlp
from ..packed import take_rows
from ..positions.reference import sample_positions
from . import MAX_LOGIT, NgpWeights, activate
from . import ngp_field as any_ngp_field


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


def density_at(field, positions, *, n_used, logits) -> Tensor:
    encoding = hash_encode(zero_tail(positions, n_used), field.table, field.layout)
    work = torch.promote_types(encoding.dtype, torch.float32)
    density_in, density_out = (w.to(work) for w in field.weights)
    values = zero_tail(fused_mlp(encoding.to(work), [density_in, density_out[:1]])[:, 0], n_used)
    return values if logits else values.clamp(max=MAX_LOGIT).exp()


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    return True


def ngp_query(positions, directions, ray_indices, grid, weights, *, n_used, logits) -> tuple[Tensor, Tensor]:
    """By the ops of whichever backend is chosen; rows past the used ones are left out."""
    n = positions.shape[0]
    used = n if n_used is None else min(int(n_used), n)
    encoding = any_hash_encode(positions[:used], grid.table, grid.layout, half=grid.half)
    rays = None if ray_indices is None else ray_indices[:used]
    raw = any_ngp_field(encoding, directions[:used] if rays is None else directions, rays, weights)
    raw = raw if used == n else torch.cat([raw, raw.new_empty(n - used, 4)])
    return (raw[:, :3], raw[:, 3]) if logits else activate(raw)


def visibility(field, origins, directions, samples, *, early_stop_eps, alpha_thre, thinning) -> Tensor:
    positions = sample_positions(origins, directions, samples, aabb=field.aabb)
    density = density_at(field, positions, n_used=samples.n_samples, logits=False)
    return visible_codes(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre, thinning=thinning)
