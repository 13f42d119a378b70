"""Density of every sample, then the visibility test: what the other backends must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from .._sink import zero_tail
from ..ngp_field import MAX_LOGIT
from ..ngp_visibility import NgpDensity
from ..thinning import Thinning, visible_thickness
from .composite import visibility
from .ngp_field import ngp_density
from .sample_positions import sample_positions
from .thinning import thin_codes


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
