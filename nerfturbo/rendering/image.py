"""Whole images, in chunks of rays so that memory does not grow with the image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..fields.field import Field
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import Rays
from .render import MarchSettings, render_rays


@dataclass(frozen=True)
class RenderedImage:
    """Pictures of one camera, row-major."""

    rgb: Tensor  # (height, width, channels)
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width)


@torch.no_grad()
def render_image(
    field: Field,
    grid: OccupancyGrid,
    rays: Rays,
    *,
    height: int,
    width: int,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    chunk: int = 8192,
) -> RenderedImage:
    """Render all rays of an image (height * width, row-major), `chunk` rays at a time."""
    parts = []
    for start in range(0, len(rays), chunk):
        out = render_rays(field, rays[slice(start, start + chunk)], grid, settings=settings, background=background)
        parts.append((out.rgb, out.opacity, out.depth))
    rgb, opacity, depth = (torch.cat(column) for column in zip(*parts, strict=True))
    return RenderedImage(
        rgb.reshape(height, width, -1).clamp(0.0, 1.0), opacity.reshape(height, width), depth.reshape(height, width)
    )
