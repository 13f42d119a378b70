"""Pixels and their rays by gathers and integer arithmetic."""

import torch
from torch import Tensor

from ..random import Stream
from ..random.reference import draw
from . import WORD

BITS = 24  # of a float32 uniform


def choose_pixels(offsets, n_rays, *, mask, seed, step, first) -> Tensor:
    uniform = torch.empty(n_rays, 4, device=offsets.device)
    draw(uniform, seed=seed, stream=int(Stream.PIXELS), step=step, first=first)
    words = (uniform * float(1 << BITS)).long()  # (n_rays, 4)
    if mask is not None:
        rank = scale(words, mask.n_drawable)
        word = torch.searchsorted(mask.before, rank, right=True) - 1
        bits = (mask.words[word][:, None] >> torch.arange(WORD, device=rank.device)) & 1
        return word * WORD + (bits.cumsum(-1) <= (rank - mask.before[word])[:, None]).sum(-1)
    return scale(words, offsets[-1])  # a tensor: nothing waits for the device


def scale(words: Tensor, n: int | Tensor) -> Tensor:
    """(m,) int64 in [0, n): 48 bits of the draw, because a pool may have more pixels than a float32 has values; in
    integers, so that every device rounds the same way."""
    high, low = words[:, 0], words[:, 1]
    return (high * n + ((low * n) >> BITS)) >> BITS


def draw_pixels(pool, n_rays, *, seed, step, first, indices) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    uniform = torch.empty(n_rays, 4, device=pool.pixels.device)
    draw(uniform, seed=seed, stream=int(Stream.PIXELS), step=step, first=first)
    pixel = scale((uniform * float(1 << BITS)).long(), pool.pixels.shape[0]) if indices is None else indices
    image = torch.searchsorted(pool.offsets, pixel, right=True) - 1
    local, width = pixel - pool.offsets[image], pool.widths[image]
    fx, fy, cx, cy = pool.intrinsics[image].unbind(-1)
    x, y = (local % width).float() + 0.5, torch.div(local, width, rounding_mode="floor").float() + 0.5
    x, y = (x - cx) / fx, (y - cy) / fy
    pose = pool.poses[image]
    direction = pose[:, :, 0] * x[:, None] - pose[:, :, 1] * y[:, None] - pose[:, :, 2]
    direction = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return pose[:, :, 3], direction, pool.pixels[pixel].float() / 255.0, image


def read_pixels(pixels: Tensor, indices: Tensor) -> Tensor:
    return pixels[indices] / torch.full((), 255.0, device=indices.device)  # a GPU multiplies by 1 / a number


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    pose, (fx, fy, cx, cy) = camera[:12].view(3, 4), camera[12:]
    x = (torch.arange(width, device=camera.device) + 0.5 - cx) / fx
    y = (torch.arange(height, device=camera.device) + 0.5 - cy) / fy
    y, x = torch.meshgrid(y, x, indexing="ij")
    local = torch.stack([x, -y, -torch.ones_like(x)], dim=-1).view(-1, 3)
    directions = torch.nn.functional.normalize((pose[:, :3] * local[:, None, :]).sum(-1), dim=-1)
    return pose[:, 3].expand(directions.shape[0], 3).contiguous(), directions
