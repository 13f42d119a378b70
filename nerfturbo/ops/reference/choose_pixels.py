"""Pixel choice by gathers and integer arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..choose_pixels import WORD, PixelGuide, PixelMask
from ..random import Stream
from .random import random_uniform

BITS = 24  # of a float32 uniform


def choose_pixels(
    offsets: Tensor,
    widths: Tensor,
    n_rays: int,
    *,
    mask: PixelMask | None,
    guide: PixelGuide | None,
    seed: int,
    step: int | Tensor,
    first: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    uniform = random_uniform(
        n_rays, columns=4, seed=seed, stream=int(Stream.PIXELS), step=step, first=first, device=offsets.device
    )
    words = (uniform * float(1 << BITS)).long()  # (n_rays, 4)
    if guide is not None:
        return _guided(offsets, widths, words, mask, guide)
    if mask is not None:
        return _nth_drawable(mask, scale(words, mask.n_drawable)), None, None
    # A tensor, so that nothing waits for the device.
    return scale(words, offsets[-1]), None, None


def scale(words: Tensor, n: int | Tensor) -> Tensor:
    """(m,) int64 in [0, n): 48 bits of the draw, because a pool may have more pixels than a float32 has values; in
    integers, so that every device rounds the same way."""
    high, low = words[:, 0], words[:, 1]
    return (high * n + ((low * n) >> BITS)) >> BITS


def _nth_drawable(mask: PixelMask, rank: Tensor) -> Tensor:
    word = torch.searchsorted(mask.before, rank, right=True) - 1
    rest = rank - mask.before[word]
    bits = (mask.words[word][:, None] >> torch.arange(WORD, device=rank.device)) & 1
    return word * WORD + (bits.cumsum(-1) <= rest[:, None]).sum(-1)


def _guided(
    offsets: Tensor, widths: Tensor, words: Tensor, mask: PixelMask | None, guide: PixelGuide
) -> tuple[Tensor, Tensor, Tensor]:
    total = guide.ends[-1]
    tile = torch.searchsorted(guide.ends, scale(words, total), right=True)
    share = guide.ends[tile] - torch.where(tile > 0, guide.ends[(tile - 1).clamp_min(0)], 0)
    image = torch.searchsorted(guide.first_tiles, tile, right=True) - 1
    width = widths[image]
    height = torch.div(offsets[image + 1] - offsets[image], width, rounding_mode="floor")
    across = torch.div(width + guide.tile - 1, guide.tile, rounding_mode="floor")
    local = tile - guide.first_tiles[image]
    tile_row = torch.div(local, across, rounding_mode="floor")
    top, left = tile_row * guide.tile, (local - tile_row * across) * guide.tile
    columns, rows = (width - left).clamp_max(guide.tile), (height - top).clamp_max(guide.tile)
    inside = (words[:, 2] * (columns * rows)) >> BITS
    row = torch.div(inside, columns, rounding_mode="floor")
    pixel = offsets[image] + (top + row) * width + left + (inside - row * columns)
    weights = (total.double() * (columns * rows).double() / (share.double() * guide.n_drawable)).float()
    if mask is not None:
        flag = (mask.words[torch.div(pixel, WORD, rounding_mode="floor")] >> (pixel % WORD)) & 1
        weights = weights * flag
    return pixel, weights, tile
