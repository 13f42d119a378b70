"""Pixel draws by gathers and integer arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..draw_pixels import PixelPool
from ..random import Stream
from .random import random_uniform

BITS = 24  # of a float32 uniform


def drawn_indices(
    n_pixels: int, n_rays: int, *, seed: int, step: int | Tensor, first: int, device: torch.device
) -> Tensor:
    """(n_rays,) int64 in [0, n_pixels). One float32 has 2^24 values and a pool may have more pixels than that, so 48
    bits are used, in integers so that every device rounds the same way."""
    uniform = random_uniform(
        n_rays, columns=2, seed=seed, stream=int(Stream.PIXELS), step=step, first=first, device=device
    )
    high, low = (uniform * float(1 << BITS)).long().unbind(-1)
    return (high * n_pixels + ((low * n_pixels) >> BITS)) >> BITS


def offsets_of(uniform: Tensor, spread: float, strata: int, first: int) -> Tensor:
    """(n_rays, 2): offsets from the pixel's centre, of uniform numbers (n_rays, 2) for rays from `first` on."""
    if strata > 1:
        cell = (torch.arange(uniform.shape[0], device=uniform.device) + first) % strata**2
        row = torch.div(cell, strata, rounding_mode="floor")
        uniform = (uniform + torch.stack([cell - row * strata, row], -1)) / strata
    return (uniform - 0.5) * spread


def draw_pixels(
    pool: PixelPool,
    n_rays: int,
    *,
    seed: int,
    step: int | Tensor,
    first: int,
    indices: Tensor | None,
    spread: float,
    strata: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pixel = indices
    if pixel is None:
        n_pixels, device = pool.pixels.shape[0], pool.pixels.device
        pixel = drawn_indices(n_pixels, n_rays, seed=seed, step=step, first=first, device=device)
    image = torch.searchsorted(pool.offsets, pixel, right=True) - 1
    local, width = pixel - pool.offsets[image], pool.widths[image]
    fx, fy, cx, cy = pool.intrinsics[image].unbind(-1)
    x, y = (local % width).float() + 0.5, torch.div(local, width, rounding_mode="floor").float() + 0.5
    if spread:
        options = {"seed": seed, "stream": int(Stream.PIXELS), "step": step, "first": first, "device": pixel.device}
        offset = offsets_of(random_uniform(n_rays, columns=4, **options)[:, 2:], spread, strata, first)
        x, y = x + offset[:, 0], y + offset[:, 1]
    x, y = (x - cx) / fx, (y - cy) / fy
    pose = pool.poses[image]
    direction = pose[:, :, 0] * x[:, None] - pose[:, :, 1] * y[:, None] - pose[:, :, 2]
    direction = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return pose[:, :, 3], direction, pool.pixels[pixel].float() / 255.0, image
