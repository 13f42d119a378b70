"""Density of every sample, then the visibility test: what the other backends must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from .._sink import zero_tail
from ..ngp_field import MAX_LOGIT
from ..ngp_visibility import NgpDensity
from ..thinning import Thinning, thin_codes
from .composite import composite, visibility
from .ngp_field import ngp_density
from .sample_positions import sample_positions


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
    limits = {"early_stop_eps": early_stop_eps, "alpha_thre": alpha_thre}
    keep = visibility(density, samples, **limits)
    if thinning is None:
        return keep
    weights = composite(density, density[:, None], samples, **limits)[3]
    return thin_codes(weights, keep, samples, thinning)
