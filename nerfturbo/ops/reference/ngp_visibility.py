"""Density of every sample, then the visibility test: what the other backends must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from .._sink import zero_tail
from ..ngp_visibility import MAX_LOGIT, NgpDensity
from .composite import visibility
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
) -> Tensor:
    positions = sample_positions(origins, directions, samples, aabb=field.aabb)
    logits = ngp_density(zero_tail(positions, samples.n_samples), field.table, field.layout, field.weights)
    density = torch.exp(logits.clamp(max=MAX_LOGIT))
    return visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
