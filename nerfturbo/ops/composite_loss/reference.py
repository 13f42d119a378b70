"""Losses of field logits by `composite`, packed sums and scans; gradients by autograd."""

import torch
from torch import Tensor

from ...types import PackedSamples
from ..composite.reference import _optical_depth, _transmittance, composite
from ..ngp import activate
from ..packed import mean_over_rays
from ..packed.reference import packed_cumsum, packed_sum, row_rays, widen
from . import SURE, LossRule, RayLossRule


def _mean_loss(error: Tensor, rule: LossRule, samples: PackedSamples) -> Tensor:
    """() mean over the trained rays and their channels of the error's value."""
    values = error.square()
    if rule.kind == "huber":
        size = error.abs()
        values = torch.where(size <= rule.delta, values / (2.0 * rule.delta), size - 0.5 * rule.delta)
    return mean_over_rays(values.mean(-1), samples)


def _activate(raw: Tensor, samples: PackedSamples) -> tuple[Tensor, Tensor]:
    """Colour (capacity, 3) and density (capacity,) of the logits; a tail may hold anything and gets no gradient."""
    wide = widen(raw)
    return activate(torch.where(samples.used[:, None], wide, torch.zeros_like(wide)))


def composite_loss(raw, samples, background, target, *, rule, gradient_scale) -> tuple[Tensor, Tensor, Tensor]:
    rgb, density = _activate(raw, samples)
    colour, opacity, *_ = composite(density, rgb, samples, early_stop_eps=0.0, alpha_thre=0.0)
    background, target = background.detach().to(colour.dtype), target.detach().to(colour.dtype)
    if target.shape[1] == 4:
        target = target[:, :3] * target[:, 3:] + background * (1.0 - target[:, 3:])
    colour = colour + background * (1.0 - opacity[:, None])
    error = colour - target
    return _mean_loss(error, rule, samples), _mean_loss(error.detach(), LossRule("mse"), samples), colour.detach()


def ray_losses(
    raw: Tensor, samples: PackedSamples, places: PackedSamples, *, rule: RayLossRule, gradient_scale: Tensor | None
) -> Tensor:
    offsets = samples.offsets
    _, density = _activate(raw, samples)
    optical, counted = _optical_depth(density, samples, 0.0)
    weights = torch.where(counted, _transmittance(optical, offsets) * -torch.expm1(-optical), torch.zeros_like(optical))
    ray, _ = row_rays(offsets, samples.capacity)
    middle = places.midpoints().detach().to(weights.dtype)
    if samples.capacity:
        middle = middle - middle[offsets[ray].long().clamp(max=samples.capacity - 1)]  # of the ray's first sample
    length = (places.t_ends - places.t_starts).detach().to(weights.dtype)
    before = packed_cumsum(weights, offsets, exclusive=True, reverse=False)
    moment = packed_cumsum(weights * middle, offsets, exclusive=True, reverse=False)
    spread = 2.0 * weights * (middle * before - moment) + weights.square() * length / 3.0
    opacity = packed_sum(weights, offsets).clamp(SURE, 1.0 - SURE)
    entropy = -opacity * opacity.log() - (1.0 - opacity) * torch.log1p(-opacity)
    values = (rule.distortion / rule.unit) * packed_sum(spread, offsets)
    if rule.opacity:
        values = values + rule.opacity * entropy
    return mean_over_rays(values, samples)
