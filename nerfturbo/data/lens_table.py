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
_PARTS = {"cpu": 1 << 18, "cuda": 1 << 21}  # pixels at a time: bounds memory, and on a GPU the number of launches
_BYTES_PER_PIXEL = 12
_EDGE_POINTS = 33  # on each side of a picture, corners among them
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
    pictures, lens_of = _lenses(cameras)
    sizes = cameras.size.cpu()[pictures].prod(-1)
    total = int(sizes.sum())
    if total * _BYTES_PER_PIXEL > (_room(cameras.device) if limit is None else limit):
        return None
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    directions = _directions_of(cameras[pictures.to(cameras.device)])
    return LensTable(directions, (starts[lens_of] - offsets[:-1].cpu()).to(cameras.device))


def _lenses(cameras: Cameras) -> tuple[Tensor, Tensor]:
    """One picture through each lens, (n_lenses,), and the lens of each picture, (n,); on the CPU."""
    parts = [cameras.focal, cameras.center, cameras.size.float()]
    parts += [] if cameras.distortion is None else [cameras.distortion]
    lenses, lens_of = torch.unique(torch.cat(parts, dim=-1).detach().cpu(), dim=0, return_inverse=True)
    pictures = torch.full((len(lenses),), len(cameras))
    return pictures.scatter_reduce(0, lens_of, torch.arange(len(cameras)), "amin"), lens_of


def _directions_of(cameras: Cameras) -> Tensor:
    """(n, 3) on the cameras' device: what every pixel of every picture looks along, picture after picture."""
    widths, sizes = cameras.size[:, 0].contiguous(), cameras.size.prod(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    total, part = int(offsets[-1]), pixels_at_once(cameras.device)
    directions = torch.empty((total, 3), dtype=torch.float32, device=cameras.device)
    for first in range(0, total, part):
        pixel = torch.arange(first, min(first + part, total), device=cameras.device)
        directions[first : first + pixel.shape[0]] = cameras.local_directions(*pixel_centers(offsets, widths, pixel))
    return directions


def pixels_at_once(device: torch.device) -> int:
    """Pixels whose lens is inverted together: whole words of a mask."""
    return _PARTS.get(device.type, _PARTS["cuda"])


def pixel_centers(offsets: Tensor, widths: Tensor, pixel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Picture, x and y of pixels (m,) of pictures stored one after the other, row by row."""
    image = torch.searchsorted(offsets, pixel, right=True) - 1
    local, width = pixel - offsets[image], widths[image]
    row = torch.div(local, width, rounding_mode="floor")
    return image, (local - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER


def all_valid(cameras: Cameras) -> bool:
    """Whether a ray leads to every pixel of every picture. A lens is valid from its centre outwards, so the edges of
    its pictures decide."""
    if cameras.model == "pinhole":
        return True
    cameras = cameras[_lenses(cameras)[0].to(cameras.device)]
    steps = torch.linspace(0.0, 1.0, _EDGE_POINTS, device=cameras.device)
    low, high = torch.zeros_like(steps), torch.ones_like(steps)
    edge = torch.stack([torch.cat([steps, steps, low, high]), torch.cat([low, high, steps, steps])], dim=-1)
    points = edge * cameras.size[:, None, :]  # (n, points, 2)
    index = torch.arange(len(cameras), device=cameras.device).repeat_interleave(edge.shape[0])
    x, y = points.reshape(-1, 2).unbind(-1)
    return bool(cameras.is_valid(index, x, y).all())


def valid_pixels(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height, width) bool on a device: to which pixels of picture `index` a ray leads; None where to all of them."""
    return None if cameras.model == "pinhole" else _valid(*_lens_of(cameras, index), device)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _valid(model: CameraModel, width: int, height: int, lens: tuple[float, ...], device: torch.device) -> Tensor | None:
    camera = _through(model, width, height, lens)
    if all_valid(camera):
        return None
    camera, offsets = camera.to(device), torch.tensor([0, width * height], device=device)
    widths, pixels = camera.size[:, 0].contiguous(), torch.arange(width * height, device=device)
    pixels = pixels.split(pixels_at_once(device))
    valid = torch.cat([camera.is_valid(*pixel_centers(offsets, widths, pixel)) for pixel in pixels])
    return None if bool(valid.all()) else valid.view(height, width)


def picture_directions(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height * width, 3) on a device: what the pixels of picture `index` look along in the camera's own axes.

    The lenses of the last few pictures are remembered, so that frame after frame through one lens inverts it once.
    None for pinholes, which need no table, and for pictures too large to keep one.
    """
    width, height = (int(side) for side in cameras.size[index])
    if cameras.model == "pinhole" or cameras.distortion is None or width * height > _REMEMBERED_PIXELS:
        return None
    return _directions(*_lens_of(cameras, index), device)


def _lens_of(cameras: Cameras, index: int) -> tuple[CameraModel, int, int, tuple[float, ...]]:
    """All that says which pixel looks where, as what can be remembered by."""
    assert cameras.distortion is not None  # of a pinhole nobody asks
    width, height = (int(side) for side in cameras.size[index])
    numbers = torch.cat([cameras.focal[index], cameras.center[index], cameras.distortion[index]])
    return cameras.model, width, height, tuple(numbers.tolist())


def _through(model: CameraModel, width: int, height: int, lens: tuple[float, ...]) -> Cameras:
    focal, center, distortion = torch.tensor([lens]).split([2, 2, len(lens) - 4], dim=1)
    size = torch.tensor([[width, height]])
    return Cameras(torch.eye(3, 4)[None], focal, center, size, model=model, distortion=distortion)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _directions(model: CameraModel, width: int, height: int, lens: tuple[float, ...], device: torch.device) -> Tensor:
    return _directions_of(_through(model, width, height, lens).to(device))


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    return min(CUDA_BYTES, int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]))
