"""Pixel draws: numba's random bits and one pass over the rays. The same pixels as the reference, fp32 rays.

Decomposition: a task = a chunk of rays.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..draw_pixels import PixelPool
from ..random import Stream
from ..reference.draw_pixels import BITS
from ._launch import array, jit, launch
from .random import random_bits

CHUNK = 2048
_SHIFT = 32 - BITS
_UNIT = np.float32(1.0 / (1 << BITS))


@jit(exact=True)
def _look_up(
    first,
    last,
    words,
    indices,
    spread,
    strata,
    start,
    pixels,
    offsets,
    widths,
    poses,
    intrinsics,
    origins,
    directions,
    rgba,
    images,
):
    """words (n_rays, 2 or 4): the top BITS bits of the first two make the 48-bit draw, unless there are `indices`;
    those of the others say where in the pixel, where there is a `spread`."""
    n_pixels = np.int64(pixels.shape[0])
    for ray in range(first, last):
        if indices.shape[0]:
            pixel = indices[ray]
        else:
            high, low = np.int64(words[ray, 0] >> np.uint32(_SHIFT)), np.int64(words[ray, 1] >> np.uint32(_SHIFT))
            pixel = (high * n_pixels + ((low * n_pixels) >> BITS)) >> BITS
        below, above = 0, offsets.shape[0] - 1  # the picture with offsets[below] <= pixel < offsets[above]
        while above - below > 1:
            middle = (below + above) // 2
            if offsets[middle] <= pixel:
                below = middle
            else:
                above = middle
        row, column = divmod(pixel - offsets[below], widths[below])
        x, y = np.float32(column) + np.float32(0.5), np.float32(row) + np.float32(0.5)
        if spread > np.float32(0.0):
            cell, side = (start + ray) % (strata * strata), np.float32(strata)
            across = (np.float32(words[ray, 2] >> np.uint32(_SHIFT)) * _UNIT + np.float32(cell % strata)) / side
            down = (np.float32(words[ray, 3] >> np.uint32(_SHIFT)) * _UNIT + np.float32(cell // strata)) / side
            x += (across - np.float32(0.5)) * spread
            y += (down - np.float32(0.5)) * spread
        x = (x - intrinsics[below, 2]) / intrinsics[below, 0]
        y = (y - intrinsics[below, 3]) / intrinsics[below, 1]
        square = np.float32(0.0)
        for axis in range(3):
            d = poses[below, axis, 0] * x - poses[below, axis, 1] * y - poses[below, axis, 2]
            directions[ray, axis] = d
            origins[ray, axis] = poses[below, axis, 3]
            square += d * d
        length = np.float32(math.sqrt(square))
        for axis in range(3):
            directions[ray, axis] /= length
        for channel in range(pixels.shape[1]):
            rgba[ray, channel] = np.float32(pixels[pixel, channel]) / np.float32(255.0)
        images[ray] = below


@torch.no_grad()
def draw_pixels(
    pool: PixelPool,
    n_rays: int,
    *,
    seed: int,
    step: int | Tensor,
    first: int,
    indices: Tensor | None = None,
    spread: float = 0.0,
    strata: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = {"seed": seed, "stream": int(Stream.PIXELS), "step": step, "first": first, "device": pool.pixels.device}
    needed = n_rays if indices is None or spread else 0
    words = random_bits(needed, columns=4 if spread else 2, **options).numpy().view(np.uint32)
    chosen = np.empty(0, np.int64) if indices is None else array(indices)
    origins, directions = torch.empty(n_rays, 3), torch.empty(n_rays, 3)
    rgba, images = torch.empty(n_rays, pool.pixels.shape[1]), torch.empty(n_rays, dtype=torch.int64)
    cameras = (array(pool.offsets), array(pool.widths), array(pool.poses), array(pool.intrinsics))
    results = (origins.numpy(), directions.numpy(), rgba.numpy(), images.numpy())
    launch(
        _look_up,
        n_rays,
        CHUNK,
        words,
        chosen,
        np.float32(spread),
        strata,
        first,
        array(pool.pixels),
        *cameras,
        *results,
    )
    return origins, directions, rgba, images
