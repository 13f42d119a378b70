"""The same views with smaller pictures: what training may begin with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..ops.pixels import PixelMask
from .images import ImagePool
from .masks import pack_flags
from .scene import Scene


def shrunken(scene: Scene, divisor: int) -> Scene:
    """Width and height of every picture over `divisor`, each new pixel the mean of the old ones, of what is visible."""
    if divisor < 1:
        raise InputError("divisor", "an integer >= 1", str(divisor))
    if divisor == 1:
        return scene
    views = range(len(scene))
    images = ImagePool.from_images([_shrink(scene.images.image(index), divisor) for index in views])
    if scene.images.mask is not None:
        sizes = [(int(height), int(width)) for width, height in images.sizes]
        flags = (_shrink_mask(scene.images.image_mask(index), size) for index, size in zip(views, sizes, strict=True))
        images = replace(images, mask=PixelMask.of_words(pack_flags(flags)))
    return replace(scene, images=images.to(scene.images.device), cameras=scene.cameras.resized(images.sizes))


def _shrink_mask(mask: Tensor | None, size: tuple[int, int]) -> np.ndarray:
    """A small pixel counts where all of it counted."""
    if mask is None:
        return np.ones(size, bool)
    share = torch.nn.functional.adaptive_avg_pool2d(mask.float()[None], size)[0]
    return (share > 0.999).cpu().numpy()


def _shrink(image: Tensor, divisor: int) -> Tensor:
    """(height, width, channels) float -> uint8; colours are weighted by alpha, so that invisible ones never show."""
    height, width = (max(1, round(side / divisor)) for side in image.shape[:2])
    channels = image.permute(2, 0, 1)
    if channels.shape[0] == 4:
        channels = torch.cat([channels[:3] * channels[3:], channels[3:]])
    small = torch.nn.functional.adaptive_avg_pool2d(channels, (height, width))
    if small.shape[0] == 4:
        small = torch.cat([small[:3] / small[3:].clamp(min=1e-6), small[3:]])
    return (small.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).permute(1, 2, 0).contiguous()
