"""A scene as a drawing: its cameras, its points where they are known, and its bounds, from above, from the side and at
an angle. Drawn with Pillow, twice as large as shown, and then averaged down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.scene import Scene
from ..errors import InputError
from ..files import replacing
from ..types import Aabb

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH, HEIGHT = 1500, 1060
_OVER = 2  # drawn this many times as large
_MOST_POINTS = 60_000
_INK, _SOFT, _LINE, _PAPER, _PANEL = (31, 41, 55), (107, 114, 128), (229, 231, 235), (255, 255, 255), (249, 250, 251)
_SPLIT_COLORS = {"train": (37, 99, 235), "val": (22, 163, 74), "test": (234, 88, 12)}
_AXES = (("x", (220, 38, 38)), ("y", (22, 163, 74)), ("z", (37, 99, 235)))
_BOX = (124, 58, 237)
_EDGES = [(a, a | bit) for a in range(8) for bit in (1, 2, 4) if not a & bit]

Color = tuple[int, int, int]


@dataclass(frozen=True)
class PlotPoints:
    """Points on surfaces in the scene's coordinates, with their colours."""

    positions: np.ndarray  # (n, 3)
    colors: np.ndarray  # (n, 3) uint8


@dataclass(frozen=True)
class _Panel:
    """A rectangle of the drawing with a way to project into it; `eye` None is a view without perspective."""

    title: str
    rectangle: tuple[int, int, int, int]  # left, top, right, bottom
    axes: np.ndarray  # (3, 3): rows right, up, towards the viewer
    center: np.ndarray
    reach: float  # half of the smaller side shows this much
    distance: float | None = None

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n, 2) positions on the drawing and (n,) depths; what is behind the viewer gets NaN."""
        left, top, right, bottom = self.rectangle
        local = (points - self.center) @ self.axes.T
        scale = 0.5 * min(right - left, bottom - top) / self.reach
        depth = -local[:, 2]
        if self.distance is not None:
            depth = self.distance - local[:, 2]
            with np.errstate(divide="ignore", invalid="ignore"):
                local = local * np.where(depth > 0.05 * self.distance, self.distance / depth, np.nan)[:, None]
        middle = np.array([0.5 * (left + right), 0.5 * (top + bottom)])
        return middle + local[:, :2] * np.array([scale, -scale]), depth


def check_plot_path(path: Path) -> None:
    """Refuse a file that could not be written, before the scene is read."""
    if path.suffix.lower() != ".png":
        raise InputError("--plot", "a file ending in .png", str(path))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError("--plot", "a file in a folder that exists", str(path))


def plot_scene(path: Path, scenes: Sequence[Scene], points: PlotPoints | None, title: str) -> None:
    """Draw the splits of one scene into a PNG file, which appears when it is whole."""
    from PIL import Image, ImageDraw

    check_plot_path(path)
    image = Image.new("RGB", (WIDTH * _OVER, HEIGHT * _OVER), _PAPER)
    draw = ImageDraw.Draw(image, "RGBA")
    panels = _panels(scenes)
    for panel in panels:
        _draw_panel(image, panel, scenes, points)
    _draw_words(draw, scenes, points, title)
    small = image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    try:
        with replacing(path) as temporary:
            small.save(temporary, "PNG")
    except OSError as error:
        raise InputError("--plot", "a file that can be written", f"{path}: {error.strerror or error}") from None


def _panels(scenes: Sequence[Scene]) -> list[_Panel]:
    low, high = (np.array(side) for side in (scenes[0].aabb.low, scenes[0].aabb.high))
    center = 0.5 * (low + high)
    positions = np.concatenate([_positions(scene) for scene in scenes])
    reach = 1.2 * max(float(np.abs(positions - center).max()), 0.5 * float((high - low).max()))
    k, margin, head, foot = _OVER, 24, 84, 64
    top, bottom = head * k, (HEIGHT - foot) * k
    split, middle = 920 * k, (top + bottom) // 2
    azimuth, elevation = math.radians(-60.0), math.radians(24.0)
    towards = np.array(
        [math.cos(azimuth) * math.cos(elevation), math.sin(azimuth) * math.cos(elevation), math.sin(elevation)]
    )
    right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    angled = np.stack([right, np.cross(towards, right), towards])
    above, side = np.eye(3), np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    edge, gap = (WIDTH - margin) * k, margin * k
    return [
        _fitted(
            _Panel("at an angle", (gap, top, split, bottom), angled, center, reach, 4.5 * reach),
            np.concatenate([positions, _corners(scenes[0].aabb)]),
        ),
        _Panel("from above: x right, y up", (split + gap, top, edge, middle - gap // 2), above, center, reach),
        _Panel("from the side: x right, z up", (split + gap, middle + gap // 2, edge, bottom), side, center, reach),
    ]


def _fitted(panel: _Panel, points: np.ndarray) -> _Panel:
    """The same view, near enough or far enough to show all of these points."""
    left, top, right, bottom = panel.rectangle
    offsets = np.abs(panel.project(points)[0] - np.array([0.5 * (left + right), 0.5 * (top + bottom)]))
    needed = float((offsets / (0.45 * np.array([right - left, bottom - top]))).max())
    return replace(panel, reach=panel.reach * needed)


def _corners(aabb: Aabb) -> np.ndarray:
    return np.array(
        [[(aabb.high if corner >> axis & 1 else aabb.low)[axis] for axis in range(3)] for corner in range(8)]
    )


def _positions(scene: Scene) -> np.ndarray:
    return scene.cameras.positions.detach().cpu().double().numpy()


def _draw_panel(image: Image.Image, panel: _Panel, scenes: Sequence[Scene], points: PlotPoints | None) -> None:
    """On a picture of its own, so that nothing leaves the panel."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = panel.rectangle
    inner = Image.new("RGB", (right - left, bottom - top), _PANEL)
    local = replace(panel, rectangle=(0, 0, *inner.size))
    draw = ImageDraw.Draw(inner, "RGBA")
    _draw_grid(draw, local, scenes[0])
    if points is not None:
        inner = _draw_points(inner, local, points)
        draw = ImageDraw.Draw(inner, "RGBA")
    _draw_box(draw, local, scenes[0])
    for scene in scenes:
        _draw_cameras(draw, local, scene, sum(map(len, scenes)))
    _draw_axes(draw, local)
    draw.rectangle((0, 0, inner.width, 36 * _OVER), fill=_PANEL)
    draw.text((14 * _OVER, 18 * _OVER), panel.title, fill=_INK, font=_font(17), anchor="lm")
    draw.rectangle((0, 0, inner.width - 1, inner.height - 1), outline=_LINE, width=_OVER)
    image.paste(inner, (left, top))


def _draw_grid(draw: ImageDraw.ImageDraw, panel: _Panel, scene: Scene) -> None:
    """Lines at round numbers: over the panel, or on the floor of the box where there is perspective."""
    step = _round_step(panel.reach / 3.0)
    reach = 1.6 * panel.reach if panel.distance is None else panel.reach
    first = math.ceil((-reach) / step)
    values = [step * index for index in range(first, -first + 1)]
    across, along = (0, 1) if abs(panel.axes[1, 2]) < 0.9 else (0, 2)
    floor = panel.center.copy()
    if panel.distance is not None:
        across, along = 0, 1
        floor[2] = scene.aabb.low[2]
    for value in values:
        for fixed, running in ((across, along), (along, across)):
            ends = np.stack([floor, floor])
            ends[:, fixed] = step * round(panel.center[fixed] / step) + value
            ends[:, running] += np.array([-reach, reach])
            _line(draw, panel, ends, (*_LINE, 255), 1)
            if panel.distance is None:
                _draw_tick(draw, panel, ends[:1], fixed, fixed == across)


def _draw_tick(draw: ImageDraw.ImageDraw, panel: _Panel, at: np.ndarray, axis: int, below: bool) -> None:
    """The number of a grid line, along the lower and the left edge."""
    (x, y), value = panel.project(at)[0][0], float(at[0, axis])
    _, _, width, height = panel.rectangle
    text, font = f"{value:.4g}", _font(12)
    if below and 40 * _OVER < x < width - 30 * _OVER:
        draw.text((x, height - 8 * _OVER), text, fill=_SOFT, font=font, anchor="ms")
    elif not below and 50 * _OVER < y < height - 30 * _OVER:
        draw.text((8 * _OVER, y), text, fill=_SOFT, font=font, anchor="lm")


def _draw_points(image: Image.Image, panel: _Panel, points: PlotPoints) -> Image.Image:
    """The nearest last, so that they cover what is behind them."""
    from PIL import Image

    every = max(1, points.positions.shape[0] // _MOST_POINTS)
    pixels, depth = panel.project(points.positions[::every])
    order = np.argsort(-depth)
    at, colors = pixels[order], points.colors[::every][order]
    canvas = np.array(image)
    size = 3 if at.shape[0] < 20_000 else 2
    with np.errstate(invalid="ignore"):
        inside = ((at >= 0.0) & (at < np.array([image.width - size, image.height - size]))).all(-1)
    columns, rows = at[inside].astype(np.int64).T
    for dy in range(size):
        for dx in range(size):
            canvas[rows + dy, columns + dx] = colors[inside]
    return Image.fromarray(canvas)


def _draw_box(draw: ImageDraw.ImageDraw, panel: _Panel, scene: Scene) -> None:
    """The box, and of an unbounded scene the next larger one too, which leaves the panel for most."""
    for level in range(min(2, scene.grid_levels)):
        corners = _corners(scene.aabb.scaled(2.0**level))
        for a, b in _EDGES:
            _line(draw, panel, corners[[a, b]], (*_BOX, 220 if level == 0 else 90), 2 if level == 0 else 1)


def _draw_cameras(draw: ImageDraw.ImageDraw, panel: _Panel, scene: Scene, n_views: int) -> None:
    color = _SPLIT_COLORS.get(scene.split, _INK)
    size = panel.reach * max(0.035, min(0.11, 0.9 / math.sqrt(n_views)))
    corners = _frusta(scene, size)
    positions = _positions(scene)
    for apex, frame in zip(positions, corners, strict=True):
        pixels, _ = panel.project(np.concatenate([apex[None], frame]))
        if not np.isfinite(pixels).all() or np.abs(pixels).max() > 1e5:
            continue
        spots = [(float(x), float(y)) for x, y in pixels]
        draw.polygon(spots[1:], fill=(*color, 34))
        for spot in spots[1:]:
            draw.line([spots[0], spot], fill=(*color, 170), width=_OVER)
        draw.line([*spots[1:], spots[1]], fill=(*color, 230), width=_OVER)
        draw.line(spots[1:3], fill=(*color, 255), width=2 * _OVER)  # the upper edge


def _frusta(scene: Scene, size: float) -> np.ndarray:
    """(n, 4, 3): the corners of each picture, `size` in front of its camera or, for wide lenses, to its sides."""
    cameras = scene.cameras.to("cpu")
    focal, center, extent = cameras.focal.double(), cameras.center.double(), cameras.size.double()
    low, high = -center / focal, (extent - center) / focal
    spread = torch.maximum(low.abs(), high.abs()).amax(1, keepdim=True).clamp_min(1.0)
    low, high = low / spread, high / spread
    corners = torch.stack(
        [
            torch.stack([x[:, 0], -y[:, 1], -1.0 / spread[:, 0]], -1)
            for x, y in ((low, low), (high, low), (high, high), (low, high))
        ],
        1,
    )  # (n, 4, 3) in camera axes, the two upper corners first
    rotation, position = cameras.camera_to_world[:, :, :3].double(), cameras.positions.double()
    world: Tensor = torch.einsum("nij,nkj->nki", rotation, corners * size) + position[:, None]
    return world.numpy()


def _draw_axes(draw: ImageDraw.ImageDraw, panel: _Panel) -> None:
    length = 0.22 * panel.reach
    for axis, (name, color) in enumerate(_AXES):
        ends = np.stack([panel.center, panel.center])
        ends[1, axis] += length
        pixels, _ = panel.project(ends)
        if np.linalg.norm(pixels[1] - pixels[0]) < 4.0 * _OVER:
            continue  # it points at the viewer
        _line(draw, panel, ends, (*color, 255), 2)
        x, y = pixels[1] + 9.0 * _OVER * (pixels[1] - pixels[0]) / np.linalg.norm(pixels[1] - pixels[0])
        draw.text((x, y), name, fill=color, font=_font(14), anchor="mm")


def _line(draw: ImageDraw.ImageDraw, panel: _Panel, ends: np.ndarray, color: tuple[int, ...], width: int) -> None:
    pixels, _ = panel.project(ends)
    if np.isfinite(pixels).all() and np.abs(pixels).max() < 1e6:
        draw.line([(float(x), float(y)) for x, y in pixels], fill=color, width=width * _OVER)


def _draw_words(draw: ImageDraw.ImageDraw, scenes: Sequence[Scene], points: PlotPoints | None, title: str) -> None:
    k, first = _OVER, scenes[0]
    draw.text((24 * k, 18 * k), title, fill=_INK, font=_font(28))
    levels = first.grid_levels
    low, high = (", ".join(f"{value:.3g}" for value in side) for side in (first.aabb.low, first.aabb.high))
    kind = (
        "bounded"
        if levels == 1
        else f"unbounded: {levels} nested boxes, the outermost {2 ** (levels - 1)} times as large"
    )
    line = f"box ({low}) to ({high}), {kind}; near {first.near:.3g}, far {first.far:.3g}"
    if first.to_original is not None:
        scale = float(torch.linalg.det(first.to_original[:3, :3]).abs() ** (1.0 / 3.0))
        line += f"; 1 unit here is {scale:.4g} in the file"
    draw.text((24 * k, 54 * k), line, fill=_SOFT, font=_font(15))
    x, y = 24 * k, (HEIGHT - 34) * k
    entries: list[tuple[Color, str]] = [
        (_SPLIT_COLORS.get(scene.split, _INK), f"{len(scene)} {scene.split} cameras") for scene in scenes
    ]
    entries.append((_BOX, "box" if levels == 1 else "box, and the next larger one"))
    if points is not None:
        entries.append((_SOFT, f"{points.positions.shape[0]} points"))
    for color, text in entries:
        draw.rectangle((x, y - 7 * k, x + 14 * k, y + 7 * k), fill=color)
        draw.text((x + 22 * k, y), text, fill=_INK, font=_font(15), anchor="lm")
        x += 22 * k + int(draw.textlength(text, font=_font(15))) + 34 * k


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * _OVER)


def _round_step(value: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten from below.

    >>> [_round_step(value) for value in (0.3, 1.7, 60.0)]
    [0.2, 1.0, 50.0]
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(power * factor for factor in (5.0, 2.0, 1.0) if power * factor <= value * (1.0 + 1e-9))
