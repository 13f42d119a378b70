"""Directions of every pixel of every lens, computed once: a step then looks them up instead of inverting the lens.

A lens without a formula for its inverse costs twelve Newton steps a ray, some hundred small kernels in a step on a GPU.
Pictures by one camera share a table; where each has a lens of its own, and they are many or large, there is none and
the lens is inverted for the drawn pixels alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .cameras import CameraModel, Cameras
from .conventions import PIXEL_CENTER

CPU_BYTES = 64 << 20  # of a table: small beside what a run takes anyway
CUDA_BYTES, CUDA_SHARE = 2 << 30, 0.125  # at most, and of the free memory
_PART = 1 << 18  # pixels at a time: bounds the memory of preparing
_BYTES_PER_PIXEL = 12
_REMEMBERED, _REMEMBERED_PIXELS = 4, 1 << 21  # lenses of pictures, for as many rays a pixel; and their size


@dataclass(frozen=True)
class LensTable:
    """What pixels look along in their camera's own axes, as `Cameras.local_directions` gives it."""

    directions: Tensor  # (n, 3) float32, one lens after the other, row by row
    shifts: Tensor  # (n_images,) int64: pixel p of the pool, in picture i, is entry p + shifts[i]

    def look_up(self, image: Tensor, pixel: Tensor) -> Tensor:
        """(m, 3): the directions of pixels (m,) of the pool, which lie in pictures (m,)."""
        return self.directions[pixel + self.shifts[image]]


def make_lens_table(cameras: Cameras, offsets: Tensor, *, limit: int | None = None) -> LensTable | None:
    """On the cameras' device; `offsets` (n + 1,) are those of their pictures. None for pinholes, which need none, and
    where it would take more than `limit` bytes."""
    if cameras.model == "pinhole" or cameras.distortion is None:
        return None
    values = torch.cat([cameras.focal, cameras.center, cameras.size.float(), cameras.distortion], dim=-1).cpu()
    lenses, lens_of = torch.unique(values, dim=0, return_inverse=True)
    sizes = lenses[:, 4:6].long().prod(-1)
    total = int(sizes.sum())
    if total * _BYTES_PER_PIXEL > (_room(cameras.device) if limit is None else limit):
        return None
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    directions = torch.empty((total, 3), dtype=torch.float32, device=cameras.device)
    for lens, start in enumerate(starts.tolist()):
        camera = int((lens_of == lens).nonzero()[0])
        width, count = int(cameras.size[camera, 0]), int(sizes[lens])
        _fill(directions[start : start + count], cameras, camera, width)
    return LensTable(directions, (starts[lens_of] - offsets[:-1].cpu()).to(cameras.device))


def _fill(directions: Tensor, cameras: Cameras, camera: int, width: int) -> None:
    """Write the directions (n, 3) of a camera's first n pixels, row after row."""
    count = directions.shape[0]
    for first in range(0, count, _PART):
        pixel = torch.arange(first, min(first + _PART, count), device=cameras.device)
        row = torch.div(pixel, width, rounding_mode="floor")
        x, y = (pixel - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER
        directions[first : first + pixel.shape[0]] = cameras.local_directions(torch.full_like(pixel, camera), x, y)


def picture_directions(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height * width, 3) on a device: what the pixels of picture `index` look along in the camera's own axes.

    The lenses of the last few pictures are remembered, so that frame after frame through one lens inverts it once.
    None for pinholes, which need no table, and for pictures too large to keep one.
    """
    width, height = (int(side) for side in cameras.size[index])
    if cameras.model == "pinhole" or cameras.distortion is None or width * height > _REMEMBERED_PIXELS:
        return None
    parts = (cameras.focal[index], cameras.center[index], cameras.distortion[index])
    return _directions(cameras.model, width, height, tuple(torch.cat(parts).tolist()), device)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _directions(model: CameraModel, width: int, height: int, lens: tuple[float, ...], device: torch.device) -> Tensor:
    focal, center, distortion = torch.tensor([lens]).split([2, 2, len(lens) - 4], dim=1)
    size = torch.tensor([[width, height]])
    camera = Cameras(torch.eye(3, 4)[None], focal, center, size, model=model, distortion=distortion)
    directions = torch.empty(width * height, 3, device=device)
    _fill(directions, camera.to(device), 0, width)
    return directions


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    return min(CUDA_BYTES, int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]))
