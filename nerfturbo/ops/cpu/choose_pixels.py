"""Pixel choice, ray by ray: the same integers as the reference.

Decomposition: a task = a chunk of rays.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..choose_pixels import WORD, PixelGuide, PixelMask
from ..random import Stream
from ..reference.choose_pixels import BITS
from ._launch import array, jit, launch
from .random import random_bits

CHUNK = 2048
_SHIFT = np.uint32(32 - BITS)


@jit(inner=True)
def _scaled(words, ray, n):
    high, low = np.int64(words[ray, 0] >> _SHIFT), np.int64(words[ray, 1] >> _SHIFT)
    return (high * n + ((low * n) >> BITS)) >> BITS


@jit(inner=True)
def _last_not_above(values, value):
    """The greatest i with values[i] <= value, in an ascending array that begins at or below it and ends above it."""
    below, above = np.int64(0), np.int64(values.shape[0] - 1)
    while above - below > 1:
        middle = (below + above) // 2
        if values[middle] <= value:
            below = middle
        else:
            above = middle
    return below


@jit(exact=True)
def _masked(first, last, words, masks, before, pixels):
    n = before[before.shape[0] - 1]
    for ray in range(first, last):
        rank = _scaled(words, ray, n)
        word = _last_not_above(before, rank)
        rest, flags, bit = rank - before[word], masks[word], 0
        while True:
            if (flags >> bit) & 1:
                if rest == 0:
                    break
                rest -= 1
            bit += 1
        pixels[ray] = word * WORD + bit


@jit(exact=True)
def _guided(first, last, words, masks, n_drawable, ends, first_tiles, side, offsets, widths, pixels, weights, tiles):
    """An empty `masks` lets every pixel count."""
    total = ends[ends.shape[0] - 1]
    for ray in range(first, last):
        goal = _scaled(words, ray, total)
        tile = np.int64(0) if goal < ends[0] else _last_not_above(ends, goal) + 1
        share = ends[tile] if tile == 0 else ends[tile] - ends[tile - 1]
        image = _last_not_above(first_tiles, tile)
        width = widths[image]
        height = (offsets[image + 1] - offsets[image]) // width
        across = (width + side - 1) // side
        local = tile - first_tiles[image]
        top, left = (local // across) * side, (local % across) * side
        columns, rows = min(width - left, side), min(height - top, side)
        inside = (np.int64(words[ray, 2] >> _SHIFT) * (columns * rows)) >> BITS
        pixel = offsets[image] + (top + inside // columns) * width + left + inside % columns
        weight = np.float64(total) * np.float64(columns * rows) / (np.float64(share) * np.float64(n_drawable))
        if masks.shape[0] and not (masks[pixel // WORD] >> (pixel % WORD)) & 1:
            weight = 0.0
        pixels[ray], weights[ray], tiles[ray] = pixel, np.float32(weight), tile


@jit(exact=True)
def _uniform(first, last, words, n, pixels):
    for ray in range(first, last):
        pixels[ray] = _scaled(words, ray, n)


@torch.no_grad()
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
    columns = 2 if guide is None else 3
    drawn = random_bits(
        n_rays,
        columns=columns,
        seed=seed,
        stream=int(Stream.PIXELS),
        step=step,
        first=first,
        device=torch.device("cpu"),
    )
    words, pixels = drawn.numpy().view(np.uint32), torch.empty(n_rays, dtype=torch.int64)
    if guide is None and mask is None:
        launch(_uniform, n_rays, CHUNK, words, np.int64(offsets[-1]), pixels.numpy())
        return pixels, None, None
    if guide is None and mask is not None:
        launch(_masked, n_rays, CHUNK, words, array(mask.words), array(mask.before), pixels.numpy())
        return pixels, None, None
    assert guide is not None
    weights, tiles = torch.empty(n_rays), torch.empty(n_rays, dtype=torch.int64)
    masks = np.empty(0, np.int64) if mask is None else array(mask.words)
    arrays = (array(guide.ends), array(guide.first_tiles), np.int64(guide.tile), array(offsets), array(widths))
    results = (pixels.numpy(), weights.numpy(), tiles.numpy())
    launch(_guided, n_rays, CHUNK, words, masks, np.int64(guide.n_drawable), *arrays, *results)
    return pixels, weights, tiles
