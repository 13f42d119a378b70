"""Directions of every pixel of every lens, computed once: a step then looks them up instead of inverting the lens.

A lens without a formula for its inverse costs twelve Newton steps a ray, some hundred small kernels in a step on a GPU.
Pictures by one camera share a table; where each has a lens of its own, and they are many or large, there is none and
the lens is inverted for the drawn pixels alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cameras import Cameras
from .conventions import PIXEL_CENTER

CPU_BYTES = 64 << 20  # of a table: small beside what a run takes anyway
CUDA_BYTES, CUDA_SHARE = 2 << 30, 0.125  # at most, and of the free memory
_PART = 1 << 18  # pixels at a time: bounds the memory of preparing
_BYTES_PER_PIXEL = 12


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
        for first in range(0, count, _PART):
            pixel = torch.arange(first, min(first + _PART, count), device=cameras.device)
            row = torch.div(pixel, width, rounding_mode="floor")
            x, y = (pixel - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER
            found = cameras.local_directions(torch.full_like(pixel, camera), x, y)
            directions[start + first : start + first + pixel.shape[0]] = found
    return LensTable(directions, (starts[lens_of] - offsets[:-1].cpu()).to(cameras.device))


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    return min(CUDA_BYTES, int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]))
