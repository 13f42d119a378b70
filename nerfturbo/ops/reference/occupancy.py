"""Occupancy arithmetic in plain torch, without a read-back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..occupancy import pack_bits


@torch.no_grad()
def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    old = density[cells]
    fresh = torch.nan_to_num(fresh.to(density.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    seen = old >= 0.0
    # First the decayed value (repeats write the same number), then the maximum over repeats.
    density.index_put_((cells,), torch.where(seen, old * decay, old))
    density.scatter_reduce_(0, cells, torch.where(seen, fresh, old), reduce="amax")


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    seen = density >= 0.0
    mean = density.clamp(min=0.0).sum() / seen.sum().clamp(min=1)
    bits.copy_(pack_bits(density > mean.clamp(max=threshold)))
    return mean
