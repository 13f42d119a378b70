"""Pixel draws in Triton: random bits, binary search for the picture, camera and colour in one launch.

One program = BLOCK rays. Integers decide the pixel, so the draws equal the reference bit for bit; directions agree to
rounding. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..draw_pixels import PixelPool
from ..random import Stream
from ._common import CompileCase, signed_word
from ._launch import cdiv, launchable
from .random import philox, unit_float

BLOCK = 128


@launchable(do_not_specialize=["n_rays", "n_pixels", "n_images", "step", "stream", "seed_low", "seed_high", "first"])
def _draw_kernel(
    p_pixels, p_offsets, p_widths, p_poses, p_intrinsics, p_step, p_indices, p_origins, p_directions, p_rgba,
    p_images, n_rays, n_pixels, n_images, step, stream, seed_low, seed_high, first, spread,
    DRAWN: tl.constexpr, SPREAD: tl.constexpr, STRATA: tl.constexpr, CHANNELS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_ray = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_ray = i_ray < n_rays
    if DRAWN:
        if p_step is not None:
            step = tl.load(p_step)
        b_word0, b_word1, b_word2, b_word3 = philox(i_ray.to(tl.int64) + first, step, stream, seed_low, seed_high)
    if p_indices is not None:
        i_pixel = tl.load(p_indices + i_ray, mask=m_ray, other=0)
    else:
        b_high = (b_word0 >> 8).to(tl.int64)
        b_low = (b_word1 >> 8).to(tl.int64)
        n_total = n_pixels.to(tl.int64)
        i_pixel = (b_high * n_total + ((b_low * n_total) >> 24)) >> 24  # (BLOCK,) int64

    i_image = tl.zeros([BLOCK], tl.int32)
    i_end = tl.zeros([BLOCK], tl.int32) + n_images
    for _ in tl.static_range(SEARCH_STEPS):
        i_middle = (i_image + i_end) // 2
        m_below = tl.load(p_offsets + i_middle, mask=m_ray, other=0) <= i_pixel
        i_image = tl.where(m_below, i_middle, i_image)
        i_end = tl.where(m_below, i_end, i_middle)
    b_local = i_pixel - tl.load(p_offsets + i_image, mask=m_ray, other=0)
    b_width = tl.load(p_widths + i_image, mask=m_ray, other=1)
    b_row = b_local // b_width
    b_column = b_local - b_row * b_width

    p_camera = p_intrinsics + i_image * 4
    b_x = b_column.to(tl.float32) + 0.5
    b_y = b_row.to(tl.float32) + 0.5
    if SPREAD:
        i_cell = ((i_ray.to(tl.int64) + first) % (STRATA * STRATA)).to(tl.int32)
        b_x += ((unit_float(b_word2) + (i_cell % STRATA).to(tl.float32)) / STRATA - 0.5) * spread
        b_y += ((unit_float(b_word3) + (i_cell // STRATA).to(tl.float32)) / STRATA - 0.5) * spread
    b_x -= tl.load(p_camera + 2, mask=m_ray, other=0.0)
    b_y -= tl.load(p_camera + 3, mask=m_ray, other=0.0)
    b_x = b_x / tl.load(p_camera, mask=m_ray, other=1.0)
    b_y = b_y / tl.load(p_camera + 1, mask=m_ray, other=1.0)
    _store_rays(p_poses + i_image * 12, b_x, b_y, p_origins + i_ray * 3, p_directions + i_ray * 3, m_ray)
    tl.store(p_images + i_ray, i_image.to(tl.int64), mask=m_ray)
    for channel in tl.static_range(CHANNELS):
        b_value = tl.load(p_pixels + i_pixel * CHANNELS + channel, mask=m_ray, other=0)
        tl.store(p_rgba + i_ray * CHANNELS + channel, tl.div_rn(b_value.to(tl.float32), 255.0), mask=m_ray)


@triton.jit
def _store_rays(p_pose, b_x, b_y, p_origin, p_direction, m_ray):
    """Rotate (x, -y, -1) into the world, normalise, store with the camera's position."""
    b_0 = _axis(p_pose, b_x, b_y, m_ray)
    b_1 = _axis(p_pose + 4, b_x, b_y, m_ray)
    b_2 = _axis(p_pose + 8, b_x, b_y, m_ray)
    b_norm = 1.0 / tl.sqrt(b_0 * b_0 + b_1 * b_1 + b_2 * b_2)
    tl.store(p_direction, b_0 * b_norm, mask=m_ray)
    tl.store(p_direction + 1, b_1 * b_norm, mask=m_ray)
    tl.store(p_direction + 2, b_2 * b_norm, mask=m_ray)
    for axis in tl.static_range(3):
        tl.store(p_origin + axis, tl.load(p_pose + axis * 4 + 3, mask=m_ray, other=0.0), mask=m_ray)


@triton.jit
def _axis(p_row, b_x, b_y, m_ray):
    b_first = tl.load(p_row, mask=m_ray, other=0.0) * b_x
    b_second = tl.load(p_row + 1, mask=m_ray, other=0.0) * b_y
    return b_first - b_second - tl.load(p_row + 2, mask=m_ray, other=1.0)


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
    device, channels = pool.pixels.device, pool.pixels.shape[1]
    origins = torch.empty((n_rays, 3), device=device)
    directions = torch.empty((n_rays, 3), device=device)
    rgba = torch.empty((n_rays, channels), device=device)
    images = torch.empty(n_rays, dtype=torch.int64, device=device)
    if n_rays:
        n_images = pool.widths.shape[0]
        on_device = isinstance(step, Tensor)
        _draw_kernel[(cdiv(n_rays, BLOCK),)](
            pool.pixels,
            pool.offsets,
            pool.widths,
            pool.poses.contiguous(),
            pool.intrinsics.contiguous(),
            step if on_device else None,
            indices,
            origins,
            directions,
            rgba,
            images,
            n_rays,
            pool.pixels.shape[0],
            n_images,
            0 if on_device else signed_word(int(step)),
            int(Stream.PIXELS),
            signed_word(seed),
            signed_word(seed >> 32),
            first,
            spread,
            DRAWN=indices is None or spread > 0.0,
            STRATA=strata,
            SPREAD=spread > 0.0,
            CHANNELS=channels,
            SEARCH_STEPS=max(1, (n_images - 1).bit_length() + 1),
            BLOCK=BLOCK,
        )
    return origins, directions, rgba, images


_WORDS = dict.fromkeys(("n_rays", "n_pixels", "n_images", "step", "stream", "seed_low", "seed_high", "first"), "i32")
_POINTERS = {"p_pixels": "*u8", "p_offsets": "*i64", "p_widths": "*i64", "p_poses": "*fp32", "p_intrinsics": "*fp32"}
_POINTERS |= {"p_step": "*i64", "p_origins": "*fp32", "p_directions": "*fp32", "p_rgba": "*fp32", "p_images": "*i64"}
_WORDS |= {"spread": "fp32"}
_SIZES = {"CHANNELS": 4, "SEARCH_STEPS": 8, "BLOCK": BLOCK, "DRAWN": True, "SPREAD": False, "STRATA": 1}
_CHOSEN = _POINTERS | {"p_indices": "*i64"} | _WORDS
COMPILE_CASES = [
    CompileCase(_draw_kernel, _POINTERS | _WORDS, {"p_indices": None, **_SIZES}, num_warps=4, name="drawn"),
    CompileCase(_draw_kernel, _CHOSEN, _SIZES | {"DRAWN": False}, num_warps=4, name="chosen"),
    CompileCase(_draw_kernel, _CHOSEN, _SIZES | {"SPREAD": True, "STRATA": 2}, num_warps=4, name="spread"),
]
