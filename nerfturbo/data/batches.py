"""Random pixels of a scene as rays and colours, drawn on the device of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.draw_pixels import PixelPool, draw_pixels
from ..types import Rays
from .scene import Scene


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
        images, cameras = self.scene.images, self.scene.cameras
        self._pool = PixelPool(
            images.pixels,
            images.offsets,
            images.sizes[:, 0].contiguous(),
            cameras.camera_to_world,
            torch.cat([cameras.focal, cameras.center], dim=-1),
        )

    def draw(self, step: int | Tensor, n_rays: int, *, first: int = 0) -> PixelBatch:
        """Pixels for rays `first` to `first + n_rays` of this step's batch; never waits for the device."""
        cameras = self.scene.cameras
        drawn = draw_pixels(self._pool, n_rays, seed=self.seed, step=step, first=first)
        times = None if cameras.times is None else cameras.times[drawn.image_indices]
        rays = Rays(drawn.origins, drawn.directions, times, drawn.image_indices)
        return PixelBatch(rays, drawn.rgba)
