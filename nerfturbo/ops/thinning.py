"""As many samples as a ray needs: those that add little are kept by chance, and stand for the ones left out.

    w_i     = T_i alpha_i                            weight of sample i, as in `composite`, before anything is left out
    s_i     = number of k in {1, 2, 3} with w_i < weight / 2^k
    keep i  with probability 2^-s_i, its interval then 2^s_i times as long about the same middle

The expected optical thickness of a ray stays what it was, and so, to first order in `weight`, do its colour and
every gradient; no kept sample's weight grows beyond `weight`. Chance is a low-discrepancy sequence along the ray,
begun at a random `phase`: of samples that are kept with 1/2 about every second one is, not now three and then none.

A decision is one byte per sample, the code 1 + s_i, or 0 for a sample that is left out; `compact` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import PackedSamples
from ._checks import check_int, check_positive, check_shape
from .composite import composite, visibility

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples fill the circle evenly
HALVINGS = 3


@dataclass(frozen=True)
class Thinning:
    """The weight above which a sample is always kept, and a random word per ray."""

    weight: float
    phases: Tensor  # (n_rays,) int32

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_shape("phases", self.phases, ("n_rays",))
        check_int("phases", self.phases, torch.int32)


def thin_codes(weights: Tensor, keep: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    """(capacity,) uint8 codes of samples with these weights (capacity,); 0 where `keep` (capacity,) is False.

    >>> samples = PackedSamples.from_counts(torch.tensor([4]), torch.zeros(4), torch.ones(4))
    >>> rare = Thinning(0.1, torch.tensor([0], dtype=torch.int32))
    >>> thin_codes(torch.tensor([0.5, 0.04, 0.03, 0.06]), torch.ones(4, dtype=torch.bool), samples, rare).tolist()
    [1, 0, 2, 1]
    """
    check_shape("thinning.phases", thinning.phases, (samples.n_rays,))
    if samples.n_rays == 0:
        return torch.zeros(samples.capacity, dtype=torch.uint8, device=weights.device)
    halvings = torch.zeros_like(weights, dtype=torch.int64)
    for k in range(1, HALVINGS + 1):
        halvings += (weights < thinning.weight * 0.5**k).long()
    ray = samples.ray_indices.long()
    place = torch.arange(samples.capacity, device=weights.device) - samples.offsets[ray]
    draw = (thinning.phases[ray].long() + place * GOLDEN) & 0xFFFFFFFF
    kept = keep & ((draw << halvings) >> 32 == 0)
    return torch.where(kept, halvings + 1, torch.zeros_like(halvings)).to(torch.uint8)


def visible_codes(
    density: Tensor,
    samples: PackedSamples,
    *,
    early_stop_eps: float,
    alpha_thre: float | Tensor,
    thinning: Thinning | None,
) -> Tensor:
    """What to keep of samples of known density (capacity,): `visibility`'s flags, or codes with `thinning`."""
    limits = {"early_stop_eps": early_stop_eps, "alpha_thre": alpha_thre}
    keep = visibility(density, samples, **limits)
    if thinning is None:
        return keep
    return thin_codes(composite(density, density[:, None], samples, **limits).weights, keep, samples, thinning)


def stretched(t_starts: Tensor, t_ends: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of kept samples (n,) with codes (n,), each about its own middle."""
    half = (t_ends - t_starts) * (torch.pow(2.0, codes.to(t_starts.dtype) - 1.0) * 0.5)
    middle = (t_starts + t_ends) * 0.5
    whole = codes == 1
    return torch.where(whole, t_starts, middle - half), torch.where(whole, t_ends, middle + half)
