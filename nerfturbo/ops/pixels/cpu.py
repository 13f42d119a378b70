"""Pixels and their rays, one ray at a time: the same integers as the reference, fp32 rays. A task = a chunk of rays."""

import math

import numpy as np
import torch
from torch import Tensor

from .._cpu import jit, launch
from ..random import Stream
from ..random.cpu import draw
from . import WORD
from .reference import BITS

CHUNK = 2048
_SHIFT = np.uint32(32 - BITS)


@jit(inner=True)
def _scaled(words, ray, n):
    high, low = np.int64(words[ray, 0] >> _SHIFT), np.int64(words[ray, 1] >> _SHIFT)
    return (high * n + ((low * n) >> BITS)) >> BITS


@jit(exact=True)
def _choose(first, last, words, masks, before, pixels):
    """`before` counts the pixels before each word of the masks; without these its last value alone counts."""
    n = before[before.shape[0] - 1]
    for ray in range(first, last):
        rank = _scaled(words, ray, n)
        if masks.shape[0] == 0:
            pixels[ray] = rank
            continue
        word = np.searchsorted(before, rank, side="right") - 1
        rest, flags, bit = rank - before[word], masks[word], 0
        while True:
            if (flags >> bit) & 1:
                if rest == 0:
                    break
                rest -= 1
            bit += 1
        pixels[ray] = word * WORD + bit


@torch.no_grad()
def choose_pixels(offsets, n_rays, *, mask, seed, step, first) -> Tensor:
    drawn = torch.empty(n_rays, 2, dtype=torch.int32)
    draw(drawn, seed=seed, stream=int(Stream.PIXELS), step=step, first=first)
    words, pixels = drawn.numpy().view(np.uint32), torch.empty(n_rays, dtype=torch.int64)
    masked = (offsets[:0], offsets) if mask is None else (mask.words, mask.before)
    launch(_choose, n_rays, CHUNK, words, *masked, pixels)
    return pixels


@jit(exact=True)
def _look_up(
    first, last, words, indices, pixels, offsets, widths, poses, intrinsics, origins, directions, rgba, images,
):  # fmt: skip
    """words (n_rays, 2): the top BITS bits of both make the 48-bit draw, unless there are `indices`."""
    n_pixels = np.int64(pixels.shape[0])
    for ray in range(first, last):
        if indices.shape[0]:
            pixel = indices[ray]
        else:
            pixel = _scaled(words, ray, n_pixels)
        below = np.searchsorted(offsets, pixel, side="right") - 1  # the picture
        row, column = divmod(pixel - offsets[below], widths[below])
        x, y = np.float32(column) + np.float32(0.5), np.float32(row) + np.float32(0.5)
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
def draw_pixels(pool, n_rays, *, seed, step, first, indices) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drawn = torch.empty(n_rays if indices is None else 0, 2, dtype=torch.int32)
    draw(drawn, seed=seed, stream=int(Stream.PIXELS), step=step, first=first)
    words = drawn.numpy().view(np.uint32)
    chosen = np.empty(0, np.int64) if indices is None else indices
    origins, directions = torch.empty(n_rays, 3), torch.empty(n_rays, 3)
    rgba, images = torch.empty(n_rays, pool.pixels.shape[1]), torch.empty(n_rays, dtype=torch.int64)
    results = (origins, directions, rgba, images)
    pictures = (pool.pixels, pool.offsets, pool.widths, pool.poses, pool.intrinsics)
    launch(_look_up, n_rays, CHUNK, words, chosen, *pictures, *results)
    return results
