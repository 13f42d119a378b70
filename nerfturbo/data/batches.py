"""Random pixels of a scene as rays and colours, drawn on the device of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.draw_pixels import PixelPool, draw_pixels, drawn_indices
from ..types import Rays
from .cameras import Cameras
from .conventions import PIXEL_CENTER
from .scene import Scene

_PART = 1 << 18  # pixels looked at at a time: bounds the memory of preparing


@dataclass(frozen=True)
class PixelBatch:
    """Rays and what the pictures show along them; four channels where the pictures have alpha (straight)."""

    rays: Rays
    rgba: Tensor  # (n_rays, 3 or 4) float32 in [0, 1]


class PixelSampler:
    """Draws pixels uniformly over all pictures of a scene, whatever their sizes.

    What is drawn depends on (seed, step, index of the ray) alone: ranks that draw rays `first`, `first + 1`, ... of one
    batch, resumed runs and other devices see the same pixels. The scene moves to the device once, here.

    Pinhole cameras draw by one fused op. Other lenses have no formula from pixel to ray: their pixels go through
    Newton's method, and those that no ray leads to are never drawn.
    """

    def __init__(self, scene: Scene, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.scene = scene.to(device)
        self.device = self.scene.images.device
        self.seed = seed
        images, cameras = self.scene.images, self.scene.cameras
        self._pool = PixelPool(
            images.pixels,
            images.offsets,
            images.sizes[:, 0].contiguous(),
            cameras.camera_to_world,
            torch.cat([cameras.focal, cameras.center], dim=-1),
        )
        self._drawable = None if cameras.model == "pinhole" else _valid_pixels(self.scene)

    def draw(self, step: int | Tensor, n_rays: int, *, first: int = 0) -> PixelBatch:
        """Pixels for rays `first` to `first + n_rays` of this step's batch; never waits for the device."""
        cameras = self.scene.cameras
        if cameras.model != "pinhole":
            return self._draw_distorted(step, n_rays, first)
        drawn = draw_pixels(self._pool, n_rays, seed=self.seed, step=step, first=first)
        times = None if cameras.times is None else cameras.times[drawn.image_indices]
        rays = Rays(drawn.origins, drawn.directions, times, drawn.image_indices)
        return PixelBatch(rays, drawn.rgba)

    def _draw_distorted(self, step: int | Tensor, n_rays: int, first: int) -> PixelBatch:
        pixels = self.scene.images.pixels
        n_pixels = pixels.shape[0] if self._drawable is None else self._drawable.shape[0]
        pixel = drawn_indices(n_pixels, n_rays, seed=self.seed, step=step, first=first, device=self.device)
        if self._drawable is not None:
            pixel = self._drawable[pixel]
        image, x, y = _pixel_centers(self.scene, pixel)
        rays = self.scene.cameras.rays(image, x, y)
        return PixelBatch(rays, pixels[pixel].float() / 255.0)


def _pixel_centers(scene: Scene, pixel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Picture, x and y of pixels (m,) of the pool."""
    images = scene.images
    image = torch.searchsorted(images.offsets, pixel, right=True) - 1
    local, width = pixel - images.offsets[image], images.sizes[image, 0]
    row = torch.div(local, width, rounding_mode="floor")
    return image, (local - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER


def _valid_pixels(scene: Scene) -> Tensor | None:
    """(n,) int64, the pixels that a ray leads to; None where that is all of them."""
    cameras, n_pixels = scene.cameras, scene.images.n_pixels
    if _corners_are_valid(cameras):
        return None
    parts = []
    for start in range(0, n_pixels, _PART):
        pixel = torch.arange(start, min(start + _PART, n_pixels), device=cameras.device)
        parts.append(pixel[cameras.is_valid(*_pixel_centers(scene, pixel))])
    valid = torch.cat(parts)
    if valid.shape[0] == 0:
        raise InputError("distortion", "coefficients that leave pixels to train on", "a lens that folds over at once")
    return valid


def _corners_are_valid(cameras: Cameras) -> bool:
    """Lenses are valid from their centre outwards, so the corners of the pictures decide for all of them."""
    index = torch.arange(len(cameras), device=cameras.device).repeat_interleave(4)
    sides = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], device=cameras.device)
    corners = sides.repeat(len(cameras), 1) * cameras.size[index]
    return bool(cameras.is_valid(index, corners[:, 0], corners[:, 1]).all())
