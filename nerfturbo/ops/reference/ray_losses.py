"""The regularisers of rays by packed sums and scans; gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from ..ray_losses import SURE, RayLossRule
from .composite import _optical_depth, _transmittance
from .composite_loss import activate
from .packed import packed_cumsum, packed_sum, row_rays


def ray_losses(
    raw: Tensor,
    samples: PackedSamples,
    *,
    rule: RayLossRule,
    density_bias: float,
    gradient_scale: Tensor | None,
) -> Tensor:
    offsets = samples.offsets
    density, _ = activate(raw, samples, density_bias)
    optical, counted = _optical_depth(density, samples, 0.0)
    weights = torch.where(counted, _transmittance(optical, offsets) * -torch.expm1(-optical), torch.zeros_like(optical))
    ray, _ = row_rays(offsets, samples.capacity)
    middle = samples.midpoints().detach().to(weights.dtype)
    if samples.capacity:
        middle = middle - middle[offsets[ray].long().clamp(max=samples.capacity - 1)]  # of the ray's first sample
    length = (samples.t_ends - samples.t_starts).detach().to(weights.dtype)
    before = packed_cumsum(weights, offsets, exclusive=True, reverse=False)
    moment = packed_cumsum(weights * middle, offsets, exclusive=True, reverse=False)
    spread = 2.0 * weights * (middle * before - moment) + weights.square() * length / 3.0
    opacity = packed_sum(weights, offsets).clamp(SURE, 1.0 - SURE)
    entropy = -opacity * opacity.log() - (1.0 - opacity) * torch.log1p(-opacity)
    values = (rule.distortion / rule.unit) * packed_sum(spread, offsets) + rule.sparsity * packed_sum(
        torch.log1p(2.0 * optical.square()), offsets
    )
    if rule.opacity:
        values = values + rule.opacity * entropy
    if samples.n_rays_kept is None:
        return values.sum() / max(samples.n_rays, 1)
    kept = torch.arange(samples.n_rays, device=raw.device) < samples.n_rays_kept
    total = torch.where(kept, values, torch.zeros_like(values)).sum()
    return total / samples.n_rays_kept.clamp(min=1).to(total.dtype)
