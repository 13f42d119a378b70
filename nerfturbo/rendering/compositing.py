"""The formulas of volume rendering as small differentiable functions over packed samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.packed import packed_cumsum, packed_sum
from ..types import PackedSamples


def alpha_from_density(density: Tensor, samples: PackedSamples) -> Tensor:
    """(capacity,): 1 - exp(-density * length)."""
    return -torch.expm1(-density * (samples.t_ends - samples.t_starts))


def transmittance(density: Tensor, samples: PackedSamples) -> Tensor:
    """(capacity,): how much light reaches each sample, exp(-sum of density * length before it)."""
    optical = density * (samples.t_ends - samples.t_starts)
    return torch.exp(-packed_cumsum(optical, samples.offsets, exclusive=True))


def render_weights(density: Tensor, samples: PackedSamples) -> Tensor:
    """(capacity,): transmittance times alpha; zero in the tail."""
    weights = transmittance(density, samples) * alpha_from_density(density, samples)
    return torch.where(samples.used, weights, torch.zeros_like(weights))


def accumulate(weights: Tensor, values: Tensor, samples: PackedSamples) -> Tensor:
    """(n_rays, channels): sum over each ray of weights (capacity,) times values (capacity, channels)."""
    return packed_sum(weights[:, None] * values, samples.offsets)
