"""Random pixels of a scene as rays and colours, drawn on the device of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.random import Stream, random_uniform
from ..types import Rays
from .conventions import PIXEL_CENTER
from .scene import Scene

_BITS = 24  # of a float32 uniform


@dataclass(frozen=True)
class PixelBatch:
    """Rays and what the pictures show along them; four channels where the pictures have alpha (straight)."""

    rays: Rays
    rgba: Tensor  # (n_rays, 3 or 4) float32 in [0, 1]


class PixelSampler:
    """Draws pixels uniformly over all pictures of a scene, whatever their sizes.

    What is drawn depends on (seed, step, index of the ray) alone: ranks that draw rays `first`, `first + 1`, ... of one
    batch, resumed runs and other devices see the same pixels. The scene moves to the device once, here.
    """

    def __init__(self, scene: Scene, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.scene = scene.to(device)
        self.device = self.scene.images.device
        self.seed = seed
        self._n_pixels = scene.images.n_pixels  # a number, so that drawing reads nothing back

    def draw(self, step: int | Tensor, n_rays: int, *, first: int = 0) -> PixelBatch:
        """Pixels for rays `first` to `first + n_rays` of this step's batch; never waits for the device."""
        images, cameras = self.scene.images, self.scene.cameras
        pixels = self._draw_pixels(step, n_rays, first)
        image = torch.searchsorted(images.offsets, pixels, right=True) - 1
        local = pixels - images.offsets[image]
        width = images.sizes[image, 0]
        x = (local % width).float() + PIXEL_CENTER
        y = torch.div(local, width, rounding_mode="floor").float() + PIXEL_CENTER
        rgba = images.pixels[pixels].float() / 255.0
        return PixelBatch(cameras.rays(image, x, y), rgba)

    def _draw_pixels(self, step: int | Tensor, n_rays: int, first: int) -> Tensor:
        uniform = random_uniform(
            n_rays, columns=2, seed=self.seed, stream=Stream.PIXELS, step=step, first=first, device=self.device
        )
        # One float32 has 2^24 values and a pool has more pixels than that: floor(n_pixels * 48 random bits / 2^48),
        # in integers so that every device rounds the same way.
        high, low = (uniform * float(1 << _BITS)).long().unbind(-1)
        return (high * self._n_pixels + ((low * self._n_pixels) >> _BITS)) >> _BITS
