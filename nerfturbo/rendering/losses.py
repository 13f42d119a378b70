"""Losses, each a pure function."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

HUBER_DELTA = 0.1


def color_loss(
    rgb: Tensor, target: Tensor, *, kind: Literal["huber", "mse"] = "huber", n_rays_kept: Tensor | None = None
) -> Tensor:
    """() mean over rays and channels; rays from `n_rays_kept` on do not count, on either side of the fraction."""
    error = rgb.float() - target.float() if rgb.dtype != torch.float64 else rgb - target
    if kind == "mse":
        values = error.square()
    else:
        values = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=HUBER_DELTA)
        values = values / HUBER_DELTA
    if n_rays_kept is None:
        return values.mean() if values.numel() else values.sum()
    kept = torch.arange(rgb.shape[0], device=rgb.device) < n_rays_kept
    total = torch.where(kept[:, None], values, torch.zeros_like(values)).sum()
    return total / (n_rays_kept.clamp(min=1) * rgb.shape[1])
