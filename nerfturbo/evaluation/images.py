"""Pictures for people: a render beside the truth and beside where it errs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..data.images import save_image, to_bytes
from ..fields.field import Field
from ..rendering.image import RenderedImage
from ..rendering.render import surface_normals
from ..sampling.grid import OccupancyGrid
from ..types import Rays

ERROR_AT_FULL = 0.25  # a mean absolute colour error of this much gets the ramp's last colour
# Dark to light, so that it reads in grey too: black, violet, red-orange, yellow, near white.
_RAMP = ((0.0, 0.0, 0.02), (0.32, 0.07, 0.48), (0.85, 0.28, 0.32), (0.99, 0.68, 0.25), (0.99, 0.99, 0.80))


def error_colors(render: Tensor, truth: Tensor) -> Tensor:
    """(height, width, 3): the mean absolute error over the channels as a colour."""
    return ramp_colors((render - truth).abs().mean(-1) / ERROR_AT_FULL)


def ramp_colors(values: Tensor) -> Tensor:
    """(..., 3): numbers from 0 (dark) to 1 (light) as colours."""
    places = values.clamp(0.0, 1.0) * (len(_RAMP) - 1)
    ramp = torch.tensor(_RAMP, device=values.device)
    low = places.floor().long().clamp(max=len(_RAMP) - 2)
    part = (places - low)[..., None]
    return ramp[low] * (1.0 - part) + ramp[low + 1] * part


def comparison(render: Tensor, truth: Tensor) -> Tensor:
    """(height, 3 width, 3) uint8 on the CPU: truth, render and error side by side, for `save_image`."""
    return to_bytes(torch.cat([truth, render, error_colors(render, truth)], dim=1)).cpu()


def save_comparison(path: Path, render: Tensor, truth: Tensor) -> None:
    """Write truth, render and error side by side, each a third of the width."""
    save_image(path, comparison(render, truth))


def load_comparison(path: Path) -> tuple[bytes, bytes, bytes]:
    """The three pictures of a comparison as small files for a page: WebP, at most 480 pixels wide."""
    import io

    from PIL import Image

    parts = []
    with Image.open(path) as image:
        width, height = image.width // 3, image.height
        for third in range(3):
            part = image.convert("RGB").crop((third * width, 0, (third + 1) * width, height))
            part.thumbnail((480, 480), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            part.save(buffer, "WEBP", quality=90, method=4)
            parts.append(buffer.getvalue())
    return parts[0], parts[1], parts[2]


Channel = Literal["color", "depth", "opacity", "normal"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)


def channel_image(
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
