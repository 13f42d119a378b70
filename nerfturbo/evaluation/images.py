"""Images for people: colour, depth, opacity or normals of a render, where it errs, and drawings."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import open_upright, to_bytes
from ..files import replacing
from ..rendering.image import RenderedImage
from ..rendering.model import NerfModel
from ..rendering.render import surface_normals
from ..types import Rays

Channel = Literal["color", "depth", "opacity", "normal"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)
Range = tuple[float, float]
Color = tuple[int, ...]  # red, green, blue and perhaps opacity, to 255

ERROR_AT_FULL = 0.25  # a mean absolute colour error of this much gets the ramp's last colour
SOLID = 0.5  # opacity from which a pixel has a depth worth showing
SMALL = 2400  # pixels of the longer side of an image to look at
# Dark to light, so that it reads in grey too: black, violet, red-orange, yellow, near white.
_RAMP = ((0.0, 0.0, 0.02), (0.32, 0.07, 0.48), (0.85, 0.28, 0.32), (0.99, 0.68, 0.25), (0.99, 0.99, 0.80))


def ramp_colors(values: Tensor) -> Tensor:
    """(..., 3): numbers from 0 (dark) to 1 (light) as colours."""
    places = values.clamp(0.0, 1.0) * (len(_RAMP) - 1)
    ramp = torch.tensor(_RAMP, device=values.device)
    low = places.floor().long().clamp(max=len(_RAMP) - 2)
    part = (places - low)[..., None]
    return ramp[low] * (1.0 - part) + ramp[low + 1] * part


def channel_image(
    channel: Channel, image: RenderedImage, model: NerfModel, *, camera: Cameras, background: Tensor, depths: Range
) -> Tensor:
    """(height, width, 3) floats of what one camera sees of a model; of `depths`, near is light and far is dark."""
    if channel == "color":
        return image.rgb
    solid = image.opacity[..., None]
    if channel == "opacity":
        return solid.expand(-1, -1, 3)
    if channel == "depth":
        low, high = depths
        shown = ramp_colors(1.0 - 0.9 * ((image.depth - low) / (high - low)).clamp(0.0, 1.0))
    else:
        shown = _normal_colors(image, camera.to(model.device).image_rays(0), model)
    return shown * solid + background * (1.0 - solid)


def _normal_colors(image: RenderedImage, rays: Rays, model: NerfModel) -> Tensor:
    """(height, width, 3): the world axes of the surface's normal as red, green and blue."""
    depth = image.depth.reshape(-1)
    visible = (image.opacity.reshape(-1) > 0.01).nonzero()[:, 0]
    points = rays.origins[visible] + rays.directions[visible] * depth[visible, None]
    times = None if rays.times is None else rays.times[visible]
    colors = torch.zeros(depth.shape[0], 3, device=depth.device)
    colors[visible] = surface_normals(model.field, model.grid, points, times) * 0.5 + 0.5
    return colors.view(*image.depth.shape, 3)


def depth_range(depths: Tensor) -> Range | None:
    """From near to far without the few at the ends; None where there are no depths."""
    if depths.numel() < 2:
        return None
    some = depths[:: 1 + depths.numel() // (1 << 20)].float()  # torch takes quantiles of 2^24 at most
    low, high = some.quantile(torch.tensor([0.01, 0.99], device=depths.device)).tolist()
    return low, max(high, low + 1e-3)


def pixels_of(camera: Cameras, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column (n,) of the pixels that show points (n, 3), and whether there are such pixels."""
    pixels, ahead = camera.project(torch.zeros(1, dtype=torch.int64, device=points.device), points)
    width, height = camera.size[0].tolist()
    x, y = pixels.nan_to_num(-1.0).clamp(-1.0, 1e6).floor().long().unbind(-1)
    inside = (ahead > 0.0) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return y.clamp(0, height - 1), x.clamp(0, width - 1), inside


def seen_in(image: RenderedImage, camera: Cameras, points: Tensor, margin: float | Tensor) -> Tensor:
    """(n,) bool: whether points (n, 3) lie before, or less than `margin` behind, what a camera sees: `image`."""
    row, column, inside = pixels_of(camera, points)
    surface = torch.where(image.opacity > SOLID, image.depth, torch.inf)
    return inside & ((points - camera.positions[0]).norm(dim=-1) < surface[row, column] + margin)


def error_colors(render: Tensor, truth: Tensor) -> Tensor:
    """(height, width, 3): the mean absolute error over the channels as a colour."""
    return ramp_colors((render - truth).abs().mean(-1) / ERROR_AT_FULL)


def comparison(render: Tensor, truth: Tensor) -> Tensor:
    """(height, 3 width, 3) uint8 on the CPU: truth, render and error side by side, for `save_image`."""
    return to_bytes(torch.cat([truth, render, error_colors(render, truth)], dim=1)).cpu()


def save_small(path: Path, image: Tensor) -> None:
    """The image (height, width, 3) uint8 as a JPEG file at a size that screens show: an exact PNG may take 20 MB."""
    small = Image.fromarray(image.numpy())
    small.thumbnail((SMALL, SMALL), Image.Resampling.LANCZOS)
    with replacing(path) as temporary:
        small.save(temporary, "JPEG", quality=90)


def load_comparison(path: Path) -> tuple[bytes, bytes, bytes]:
    """The three images of a comparison as small files for a page: WebP, at most 480 pixels wide."""
    parts, image = [], open_upright(path).convert("RGB")
    width, height = image.width // 3, image.height
    for third in range(3):
        part = image.crop((third * width, 0, (third + 1) * width, height))
        part.thumbnail((480, 480), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        part.save(buffer, "WEBP", quality=90, method=4)
        parts.append(buffer.getvalue())
    return parts[0], parts[1], parts[2]


class Canvas:
    """A drawing in pixels as they are shown; drawn twice as large and averaged down, so that edges are smooth."""

    def __init__(self, width: int, height: int, color: Color | str = "white") -> None:
        self._image = Image.new("RGB", (2 * width, 2 * height), color)
        self._draw = ImageDraw.Draw(self._image, "RGBA")

    def line(self, points: np.ndarray | Sequence[tuple[float, float]], color: Color, width: int = 1) -> None:
        """Along points (n, 2); none where they are not finite, or far outside."""
        scaled = 2.0 * np.asarray(points, dtype=float)
        if np.isfinite(scaled).all() and np.abs(scaled).max() < 1e6:
            self._draw.line([(x, y) for x, y in scaled.tolist()], fill=color, width=2 * width)

    def polygon(self, points: np.ndarray, color: Color) -> None:
        self._draw.polygon([(x, y) for x, y in (2.0 * points).tolist()], fill=color)

    def rectangle(self, sides: Sequence[float], color: Color, outline: Color | None = None) -> None:
        """`sides` are left, top, right, bottom."""
        self._draw.rectangle([2 * side for side in sides], fill=color, outline=outline)

    def frame(self, color: Color) -> None:
        """A line around all of it."""
        self._draw.rectangle((0, 0, self._image.width - 1, self._image.height - 1), outline=color, width=2)

    def text(self, at: Sequence[float] | np.ndarray, text: str, color: Color, size: int, anchor: str = "la") -> float:
        """Write, and return the width; Pillow's `anchor` says which point of the text lies there."""
        font = ImageFont.load_default(2 * size)
        self._draw.text((2 * at[0], 2 * at[1]), text, fill=color, font=font, anchor=anchor)
        return self._draw.textlength(text, font=font) / 2

    def dots(self, points: np.ndarray, colors: np.ndarray, size: float) -> None:
        """Squares at points (n, 2) with colours (n, 3) uint8, the last on top."""
        canvas, scaled, side = np.array(self._image), 2.0 * points, round(2 * size)
        with np.errstate(invalid="ignore"):
            inside = ((scaled >= 0.0) & (scaled < np.array(self._image.size) - side)).all(-1)
        columns, rows = scaled[inside].astype(np.int64).T
        for dy in range(side):
            for dx in range(side):
                canvas[rows + dy, columns + dx] = colors[inside]
        self._image = Image.fromarray(canvas)
        self._draw = ImageDraw.Draw(self._image, "RGBA")

    def paste(self, other: "Canvas", at: tuple[int, int]) -> None:
        self._image.paste(other._image, (2 * at[0], 2 * at[1]))

    def save(self, path: Path) -> None:
        size = self._image.width // 2, self._image.height // 2
        self._image.resize(size, Image.Resampling.LANCZOS).save(path, "PNG")
