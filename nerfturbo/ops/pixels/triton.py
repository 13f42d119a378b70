"""Pixels and their rays: random bits, binary searches, camera and colour in one launch; a program = BLOCK rays.
Integers decide the pixel, so that the draws equal the reference bit for bit; rays to rounding. No atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._triton import cdiv, launchable, own_block
from ..random import Stream
from ..random.triton import counter_words, philox

BLOCK = 128
_DRAW = ("n_rays", "step", "stream", "seed_low", "seed_high", "first")


@triton.jit
def _scaled(b_word0, b_word1, n):
    """The 48-bit draw times n."""
    return ((b_word0 >> 8).to(tl.int64) * n + (((b_word1 >> 8).to(tl.int64) * n) >> 24)) >> 24


@triton.jit
def _last_not_above(p_values, n_values, b_value, m_ray, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest i with values[i] <= value, in an ascending array that begins at or below it and ends above it."""
    i_below = tl.zeros([BLOCK], tl.int64)
    i_above = tl.zeros([BLOCK], tl.int64) + (n_values - 1)
    for _ in tl.static_range(STEPS):
        i_middle = (i_below + i_above) // 2
        m_below = tl.load(p_values + i_middle, mask=m_ray, other=0) <= b_value
        i_below = tl.where(m_below, i_middle, i_below)
        i_above = tl.where(m_below, i_above, i_middle)
    return i_below


@triton.jit
def _count_bits(b_bits):
    """Of values below 2^32."""
    b_bits = b_bits - ((b_bits >> 1) & 0x55555555)
    b_bits = (b_bits & 0x33333333) + ((b_bits >> 2) & 0x33333333)
    b_bits = (b_bits + (b_bits >> 4)) & 0x0F0F0F0F
    b_bits = b_bits + (b_bits >> 8)
    return (b_bits + (b_bits >> 16)) & 0x3F


@triton.jit
def _nth_bit(b_word, b_rest):
    """Where the bit of rank `rest` stands in a word: halves of it are skipped while they hold too few."""
    b_place = b_rest * 0
    for k in tl.static_range(6):  # no name for 32 >> k: a variable is an int32, in which 1 << 32 does not fit
        b_count = _count_bits((b_word >> b_place) & ((1 << (32 >> k)) - 1))
        m_skip = b_rest >= b_count
        b_rest = tl.where(m_skip, b_rest - b_count, b_rest)
        b_place = tl.where(m_skip, b_place + (32 >> k), b_place)
    return b_place


@triton.jit
def _draw(p_step, n_rays, step, stream, seed_low, seed_high, first, BLOCK: tl.constexpr):
    """The rays of this program, which of them there are, and two random words of each."""
    i_ray, m_ray = own_block(n_rays, BLOCK)
    if p_step is not None:
        step = tl.load(p_step)
    b_word0, b_word1, _2, _3 = philox(i_ray.to(tl.int64) + first, step, stream, seed_low, seed_high)
    return i_ray, m_ray, b_word0, b_word1


@launchable(do_not_specialize=[*_DRAW, "n_words"])
def _masked_kernel(
    p_words, p_before, p_step, p_pixels, n_rays, n_words, step, stream, seed_low, seed_high, first,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_ray, m_ray, b_word0, b_word1 = _draw(p_step, n_rays, step, stream, seed_low, seed_high, first, BLOCK)
    b_rank = _scaled(b_word0, b_word1, tl.load(p_before + n_words))
    i_word = _last_not_above(p_before, n_words + 1, b_rank, m_ray, STEPS, BLOCK)
    b_rest = b_rank - tl.load(p_before + i_word, mask=m_ray, other=0)
    b_flags = tl.load(p_words + i_word, mask=m_ray, other=-1)
    tl.store(p_pixels + i_ray, i_word * 64 + _nth_bit(b_flags, b_rest), mask=m_ray)


@launchable(do_not_specialize=[*_DRAW, "n_images"])
def _uniform_kernel(
    p_offsets, p_step, p_pixels, n_rays, n_images, step, stream, seed_low, seed_high, first, BLOCK: tl.constexpr
):
    i_ray, m_ray, b_word0, b_word1 = _draw(p_step, n_rays, step, stream, seed_low, seed_high, first, BLOCK)
    tl.store(p_pixels + i_ray, _scaled(b_word0, b_word1, tl.load(p_offsets + n_images)), mask=m_ray)


def _search_steps(n: int) -> int:
    return max(1, (n - 1).bit_length() + 1)


def choose_pixels(offsets, n_rays, *, mask, seed, step, first) -> Tensor:
    p_step, words = counter_words(seed, Stream.PIXELS, step)
    pixels, grid = torch.empty(n_rays, dtype=torch.int64, device=offsets.device), (cdiv(n_rays, BLOCK),)
    if n_rays == 0:
        return pixels
    if mask is not None:
        n_words = mask.words.shape[0]
        steps = _search_steps(n_words + 1)
        _masked_kernel[grid](
            mask.words, mask.before, p_step, pixels, n_rays, n_words, *words, first, STEPS=steps, BLOCK=BLOCK
        )
    else:
        _uniform_kernel[grid](offsets, p_step, pixels, n_rays, offsets.shape[0] - 1, *words, first, BLOCK=BLOCK)
    return pixels


@launchable(do_not_specialize=[*_DRAW, "n_pixels", "n_images"])
def _draw_kernel(
    p_pixels, p_offsets, p_widths, p_poses, p_intrinsics, p_step, p_indices, p_origins, p_directions, p_rgba,
    p_images, n_rays, n_pixels, n_images, step, stream, seed_low, seed_high, first,
    CHANNELS: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_ray, m_ray, b_word0, b_word1 = _draw(p_step, n_rays, step, stream, seed_low, seed_high, first, BLOCK)
    if p_indices is not None:
        i_pixel = tl.load(p_indices + i_ray, mask=m_ray, other=0)
    else:
        i_pixel = _scaled(b_word0, b_word1, n_pixels)  # (BLOCK,) int64
    i_image = _last_not_above(p_offsets, n_images + 1, i_pixel, m_ray, SEARCH_STEPS, BLOCK)
    b_local = i_pixel - tl.load(p_offsets + i_image, mask=m_ray, other=0)
    b_width = tl.load(p_widths + i_image, mask=m_ray, other=1)
    b_row = b_local // b_width
    b_column = b_local - b_row * b_width

    p_camera = p_intrinsics + i_image * 4
    b_x = b_column.to(tl.float32) + 0.5
    b_y = b_row.to(tl.float32) + 0.5
    b_x -= tl.load(p_camera + 2, mask=m_ray, other=0.0)
    b_y -= tl.load(p_camera + 3, mask=m_ray, other=0.0)
    b_x = b_x / tl.load(p_camera, mask=m_ray, other=1.0)
    b_y = b_y / tl.load(p_camera + 1, mask=m_ray, other=1.0)
    _store_rays(p_poses + i_image * 12, b_x, b_y, p_origins + i_ray * 3, p_directions + i_ray * 3, m_ray)
    tl.store(p_images + i_ray, i_image, mask=m_ray)
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


def draw_pixels(pool, n_rays, *, seed, step, first, indices) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, channels = pool.pixels.device, pool.pixels.shape[1]
    origins = torch.empty((n_rays, 3), device=device)
    directions = torch.empty((n_rays, 3), device=device)
    rgba = torch.empty((n_rays, channels), device=device)
    images = torch.empty(n_rays, dtype=torch.int64, device=device)
    if n_rays:
        n_images = pool.widths.shape[0]
        p_step, words = counter_words(seed, Stream.PIXELS, step)
        _draw_kernel[(cdiv(n_rays, BLOCK),)](
            pool.pixels, pool.offsets, pool.widths, pool.poses.contiguous(), pool.intrinsics.contiguous(), p_step,
            indices, origins, directions, rgba, images, n_rays, pool.pixels.shape[0], n_images, *words, first,
            CHANNELS=channels, SEARCH_STEPS=_search_steps(n_images), BLOCK=BLOCK,
        )  # fmt: skip
    return origins, directions, rgba, images


READERS = 16  # programs that read host memory: more only fill the queues in which other kernels' reads wait


@launchable(do_not_specialize=["n"])
def _read_kernel(p_pixels, p_indices, p_rgba, n, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        i_pixel = tl.load(p_indices + i, mask=i < n, other=0)
        if CHANNELS == 4:  # one read a pixel
            b_word = tl.load(p_pixels + i_pixel, mask=i < n, other=0)
        for channel in tl.static_range(CHANNELS):
            if CHANNELS == 4:
                b_value = (b_word >> (8 * channel)) & 255
            else:
                b_value = tl.load(p_pixels + i_pixel * CHANNELS + channel, mask=i < n, other=0)
            tl.store(p_rgba + i * CHANNELS + channel, tl.div_rn(b_value.to(tl.float32), 255.0), mask=i < n)


def read_pixels(pixels: Tensor, indices: Tensor) -> Tensor:
    n, channels = indices.shape[0], pixels.shape[1]
    rgba = torch.empty((n, channels), device=indices.device)
    words = pixels.view(torch.int32) if channels == 4 else pixels
    _read_kernel[(min(READERS, max(1, cdiv(n, BLOCK))),)](words, indices, rgba, n, CHANNELS=channels, BLOCK=BLOCK)
    return rgba


RAYS_BLOCK = 256


@launchable(do_not_specialize=["n_rays", "width"])
def _rays_kernel(p_camera, p_origins, p_directions, n_rays, width, BLOCK: tl.constexpr):
    i_ray, m_ray = own_block(n_rays, BLOCK)
    row = i_ray // width
    x = ((i_ray - row * width).to(tl.float32) + 0.5 - tl.load(p_camera + 14)) / tl.load(p_camera + 12)
    y = (row.to(tl.float32) + 0.5 - tl.load(p_camera + 15)) / tl.load(p_camera + 13)
    i_first = i_ray.to(tl.int64) * 3
    _store_rays(p_camera + i_ray * 0, x, y, p_origins + i_first, p_directions + i_first, m_ray)


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    n_rays = width * height
    origins, directions = torch.empty(2, n_rays, 3, dtype=torch.float32, device=camera.device)
    if n_rays:
        _rays_kernel[(cdiv(n_rays, RAYS_BLOCK),)](
            camera.contiguous(), origins, directions, n_rays, width, BLOCK=RAYS_BLOCK
        )
    return origins, directions
