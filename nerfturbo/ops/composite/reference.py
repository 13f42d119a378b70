"""Compositing by packed scans, gradients by autograd; runs of weak samples, one place along all rays at a time."""

import torch
from torch import Tensor

from ...types import PackedSamples
from ..packed.reference import packed_cumsum, packed_sum, row_rays, widen
from . import GOLDEN, LAST_CODE, LONGEST, MIX, OPAQUE, PER_OCTAVE, Thinning
from . import composite as any_composite


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


def composite(density, rgb, samples, *, early_stop_eps, alpha_thre) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    optical, counted = _optical_depth(density, samples, alpha_thre)
    transmittance = _transmittance(optical, samples.offsets)
    lit = counted & (transmittance.detach() >= early_stop_eps)
    weights = torch.where(lit, transmittance * -torch.expm1(-optical), torch.zeros_like(optical))
    colour = torch.where(lit[:, None], widen(rgb).to(weights.dtype), weights.new_zeros(()))
    middle = samples.midpoints().detach().to(weights.dtype)
    parts = (weights[:, None] * colour, weights, weights * middle)
    rgb, opacity, depth = (packed_sum(part, samples.offsets) for part in parts)
    return rgb, opacity, depth, weights


def composite_pixels(density, rgb, samples, background) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From `composite` of whichever backend is chosen."""
    rgb, opacity, depth, weights = any_composite(density, rgb, samples)
    if background is not None:
        rgb = rgb + background * (1.0 - opacity[:, None])
    return rgb, opacity, depth / opacity.clamp_min(torch.finfo(torch.float32).eps), weights


@torch.no_grad()
def visibility(density: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor) -> Tensor:
    optical, counted = _optical_depth(density, samples, alpha_thre)
    return counted & (_transmittance(optical, samples.offsets) >= early_stop_eps)


WORD = 0xFFFFFFFF


def _chance(phases: Tensor, place: int) -> Tensor:
    """(n_rays,) in [0, 1): a random number for this place along each ray."""
    word = (phases.long() + place * GOLDEN) & WORD
    for shift, factor in zip((16, 15), MIX, strict=True):
        word = ((word ^ (word >> shift)) * factor) & WORD
    return ((word ^ (word >> 16)) >> 8).to(torch.float32) * 2.0**-24


def merge_weak_samples(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    codes = torch.zeros(samples.capacity + 1, dtype=torch.uint8, device=optical.device)  # the last: nobody's
    starts, ends = samples.offsets[:-1].long(), samples.offsets[1:].long()
    nothing = torch.full_like(starts, samples.capacity)
    seen = torch.cat([widen(optical), optical.new_zeros(1)])
    depth = seen.new_zeros(samples.n_rays)  # optical thickness so far
    # Of the run that is under way: how many, their weight and thickness; the row drawn from it and its own thickness.
    members, weight, thickness, chosen, own = torch.zeros_like(starts), depth, depth, nothing, torch.ones_like(depth)

    def close(done: Tensor) -> None:
        code = torch.round(PER_OCTAVE * torch.log2((thickness / own).clamp_min(1.0))) + 1.0
        rows = torch.where(done & (chosen < samples.capacity), chosen, nothing)
        codes[rows] = code.clamp(max=LAST_CODE).to(torch.uint8)

    for place in range(int((ends - starts).max()) if samples.n_rays else 0):
        row = torch.where(starts + place < ends, starts + place, nothing)
        tau = seen[row]
        counts = tau > 0.0
        tau = torch.where(counts, tau.clamp(max=OPAQUE), torch.zeros_like(tau))
        added = torch.exp(-depth) * -torch.expm1(-tau)
        fresh = counts & ((weight + added > thinning.weight) | (members == LONGEST))
        close(fresh)
        weight = torch.where(fresh, added, weight + added)
        thickness = torch.where(fresh, tau, thickness + tau)
        members = torch.where(fresh, 0, members) + counts.long()
        chosen = torch.where(fresh, nothing, chosen)
        taken = counts & ((chosen == samples.capacity) | (_chance(thinning.phases, place) * weight < added))
        chosen, own = torch.where(taken, row, chosen), torch.where(taken, tau, own)
        depth = depth + tau
    close(torch.ones_like(nothing, dtype=torch.bool))
    return codes[:-1]
