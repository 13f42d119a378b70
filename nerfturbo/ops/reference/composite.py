"""Compositing by packed scans; gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PackedSamples
from ..composite import as_pixels
from .packed import packed_cumsum, packed_sum, row_rays, widen


def _optical_depth(density: Tensor, samples: PackedSamples, alpha_thre: float | Tensor) -> tuple[Tensor, Tensor]:
    """density * length of the samples that count, zero elsewhere, and the mask of those."""
    _, used = row_rays(samples.offsets, samples.capacity)
    dtype = widen(density).dtype
    length = (samples.t_ends - samples.t_starts).detach().to(dtype)
    optical = widen(density) * length
    counted = used & (-torch.expm1(-optical.detach()) >= alpha_thre)
    return torch.where(counted, optical, torch.zeros_like(optical)), counted


def _transmittance(optical: Tensor, offsets: Tensor) -> Tensor:
    return torch.exp(-packed_cumsum(optical, offsets, exclusive=True, reverse=False))


def composite(
    density: Tensor, rgb: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    optical, counted = _optical_depth(density, samples, alpha_thre)
    transmittance = _transmittance(optical, samples.offsets)
    lit = counted & (transmittance.detach() >= early_stop_eps)
    weights = torch.where(lit, transmittance * -torch.expm1(-optical), torch.zeros_like(optical))
    colour = torch.where(
        lit[:, None], widen(rgb).to(weights.dtype), torch.zeros((), dtype=weights.dtype, device=rgb.device)
    )
    middle = samples.midpoints().detach().to(weights.dtype)
    return (
        packed_sum(weights[:, None] * colour, samples.offsets),
        packed_sum(weights, samples.offsets),
        packed_sum(weights * middle, samples.offsets),
        weights,
    )


def composite_pixels(
    density: Tensor, rgb: Tensor, samples: PackedSamples, background: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return as_pixels(*composite(density, rgb, samples, early_stop_eps=0.0, alpha_thre=0.0), background)


@torch.no_grad()
def visibility(density: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor) -> Tensor:
    optical, counted = _optical_depth(density, samples, alpha_thre)
    return counted & (_transmittance(optical, samples.offsets) >= early_stop_eps)
