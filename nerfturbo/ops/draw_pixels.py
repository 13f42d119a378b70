"""Random pixels of a pool of pictures as rays and colours.

Ray i of a step looks through the centre of pixel floor(n_pixels * u_i) of the pool; u_i is a 48-bit draw of (seed,
step, i): ranks, devices and resumed runs see the same pixels. With a `spread` it looks through a random point of a
square that many pixels wide around the centre, the third and fourth word of the same draw; with `strata` n, ray i takes
its point from cell i modulo n^2 of n x n equal ones. Poses look along -z with y up; directions have unit length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_int, check_positive, check_shape
from ._dispatch import implementation
from .random import Stream, random_uniform


@dataclass(frozen=True)
class PixelPool:
    """Pictures of any sizes, one after the other and row-major, with the pinhole camera of each."""

    pixels: Tensor  # (n_pixels, 3 or 4) uint8
    offsets: Tensor  # (n_images + 1,) int64, first pixel of each picture
    widths: Tensor  # (n_images,) int64
    poses: Tensor  # (n_images, 3, 4) fp32, camera to world
    intrinsics: Tensor  # (n_images, 4) fp32: fx, fy, cx, cy

    def __post_init__(self) -> None:
        n_images = self.widths.shape[0]
        if self.pixels.dim() != 2 or self.pixels.shape[1] not in (3, 4):
            raise InputError("pixels", "shape (n_pixels, 3) or (n_pixels, 4)", str(tuple(self.pixels.shape)))
        check_int("pixels", self.pixels, torch.uint8)
        check_shape("offsets", self.offsets, (n_images + 1,))
        check_shape("poses", self.poses, (n_images, 3, 4))
        check_shape("intrinsics", self.intrinsics, (n_images, 4))
        check_device(pixels=self.pixels, offsets=self.offsets, widths=self.widths, poses=self.poses)


class DrawnPixels(NamedTuple):
    """Result of `draw_pixels`."""

    origins: Tensor  # (n_rays, 3) fp32
    directions: Tensor  # (n_rays, 3) fp32, unit length
    rgba: Tensor  # (n_rays, 3 or 4) fp32 in [0, 1]
    image_indices: Tensor  # (n_rays,) int64


def drawn_indices(
    n_pixels: int, n_rays: int, *, seed: int, step: int | Tensor, first: int, device: torch.device
) -> Tensor:
    """(n_rays,) int64 in [0, n_pixels): the pixels that `draw_pixels` draws, for cameras that are not pinholes."""
    from .reference import draw_pixels as reference  # imports this file

    return reference.drawn_indices(n_pixels, n_rays, seed=seed, step=step, first=first, device=device)


def drawn_offsets(
    n_rays: int, spread: float, *, strata: int = 1, seed: int, step: int | Tensor, first: int, device: torch.device
) -> Tensor:
    """(n_rays, 2): how far from the pixel's centre the rays of `draw_pixels` pass, in pixels, to the right and down."""
    from .reference import draw_pixels as reference  # imports this file

    words = random_uniform(n_rays, columns=4, seed=seed, stream=Stream.PIXELS, step=step, first=first, device=device)
    return reference.offsets_of(words[:, 2:], spread, strata, first)


def draw_pixels(
    pool: PixelPool,
    n_rays: int,
    *,
    seed: int,
    step: int | Tensor,
    first: int = 0,
    indices: Tensor | None = None,
    spread: float = 0.0,
    strata: int = 1,
) -> DrawnPixels:
    """Pixels for rays first ... first + n_rays - 1 of this step's batch; never waits for the device.

    `indices` (n_rays,) int64, from `choose_pixels` say, are looked up instead of drawing any.
    """
    if n_rays < 0:
        raise InputError("n_rays", "a count >= 0", str(n_rays))
    check_positive("spread", spread, zero=True)
    if strata < 1:
        raise InputError("strata", "at least 1", str(strata))
    if indices is not None:
        check_shape("indices", indices, (n_rays,))
        check_int("indices", indices, torch.int64)
        check_device(pixels=pool.pixels, indices=indices)
    return DrawnPixels(
        *implementation("draw_pixels", "draw_pixels", pool.poses)(
            pool, n_rays, seed=seed, step=step, first=first, indices=indices, spread=float(spread), strata=strata
        )
    )
