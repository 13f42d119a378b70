"""What a rendered picture can show: colour, depth, opacity, normals."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..fields.field import Field
from ..rendering.image import RenderedImage
from ..rendering.normals import surface_normals
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import Rays
from .pictures import ramp_colors

Channel = Literal["color", "depth", "opacity", "normal"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)


def channel_picture(
    channel: Channel,
    image: RenderedImage,
    background: Tensor,
    *,
    depths: tuple[float, float],
    rays: Rays | None,
    field: Field,
    grid: OccupancyGrid,
) -> Tensor:
    """(height, width, 3) floats; `rays`, those of the picture, are needed for normals only."""
    if channel == "color":
        return image.rgb
    solid = image.opacity[..., None]
    if channel == "opacity":
        return solid.expand(-1, -1, 3)
    if channel == "depth":
        shown = depth_colors(image.depth, depths)
    else:
        assert rays is not None
        shown = normal_colors(image, rays, field, grid)
    return shown * solid + background * (1.0 - solid)


def depth_colors(depth: Tensor, depths: tuple[float, float]) -> Tensor:
    """(height, width, 3): near is light, far is dark."""
    low, high = depths
    return ramp_colors(1.0 - 0.9 * ((depth - low) / (high - low)).clamp(0.0, 1.0))


def normal_colors(image: RenderedImage, rays: Rays, field: Field, grid: OccupancyGrid) -> Tensor:
    """(height, width, 3): the world axes of the surface's normal as red, green and blue."""
    depth = image.depth.reshape(-1)
    seen = (image.opacity.reshape(-1) > 0.01).nonzero()[:, 0]
    points = rays.origins[seen] + rays.directions[seen] * depth[seen, None]
    times = None if rays.times is None else rays.times[seen]
    colors = torch.zeros(depth.shape[0], 3, device=depth.device)
    colors[seen] = surface_normals(field, grid, points, times) * 0.5 + 0.5
    return colors.view(*image.depth.shape, 3)


def to_bytes(picture: Tensor) -> Tensor:
    """Floats in [0, 1] to uint8 on the CPU."""
    return (picture.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).cpu()
