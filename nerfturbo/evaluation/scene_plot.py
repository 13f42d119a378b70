"""A scene as a drawing: its cameras, points and bounds, from above, from the side and at an angle."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..data.cameras import similarity_scale
from ..data.formats.colmap import ColmapPoints
from ..data.scene import Scene
from ..errors import InputError, refuse
from ..files import replacing
from ..types import Aabb
from .images import Canvas

WIDTH, HEIGHT = 1500, 1060
_MOST_POINTS = 60_000
_INK, _SOFT, _LINE, _PAPER, _PANEL = (31, 41, 55), (107, 114, 128), (229, 231, 235), (255, 255, 255), (249, 250, 251)
_SPLIT_COLORS = {"train": (37, 99, 235), "val": (22, 163, 74), "test": (234, 88, 12)}
_AXES = (("x", (220, 38, 38)), ("y", (22, 163, 74)), ("z", (37, 99, 235)))
_BOX = (124, 58, 237)
_EDGES = [(a, a | bit) for a in range(8) for bit in (1, 2, 4) if not a & bit]


@dataclass(frozen=True)
class _Panel:
    """A rectangle of the drawing with a way to project into it; `distance` None is a view without perspective."""

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
    refuse(path.suffix.lower() != ".png", "--plot", "a file ending in .png", path)
    refuse(path.is_dir() or not path.absolute().parent.is_dir(), "--plot", "a file in a folder that exists", path)


def plot_scene(path: Path, scenes: Sequence[Scene], points: ColmapPoints | None, title: str) -> None:
    """Draw the splits of one scene, and points in its coordinates, into a PNG file, which appears when it is whole."""
    check_plot_path(path)
    canvas = Canvas(WIDTH, HEIGHT, _PAPER)
    for panel in _panels(scenes):
        canvas.paste(_drawn(panel, scenes, points), panel.rectangle[:2])
    _draw_words(canvas, scenes, points, title)
    try:
        with replacing(path) as temporary:
            canvas.save(temporary)
    except OSError as error:
        raise InputError("--plot", "a file that can be written", f"{path}: {error.strerror or error}") from None


def _panels(scenes: Sequence[Scene]) -> list[_Panel]:
    corners = _corners(scenes[0].aabb)
    everything = np.concatenate([*(_positions(scene) for scene in scenes), corners])
    center = corners.mean(0)
    reach = 1.2 * float(np.abs(everything - center).max())
    gap, top, bottom, split, edge = 24, 84, HEIGHT - 64, 920, WIDTH - 24
    middle = (top + bottom) // 2
    azimuth, elevation = math.radians(-60.0), math.radians(24.0)
    right, flat = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0]), math.cos(elevation)
    towards = np.array([math.cos(azimuth) * flat, math.sin(azimuth) * flat, math.sin(elevation)])
    angled = np.stack([right, np.cross(towards, right), towards])
    side = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    panel = _Panel("at an angle", (gap, top, split, bottom), angled, center, reach, 4.5 * reach)
    size = np.array([split - gap, bottom - top])
    offsets = np.abs(panel.project(everything)[0] - (gap, top) - 0.5 * size)
    fitted = replace(panel, reach=reach * float((offsets / (0.45 * size)).max()))  # just so that it shows all of it
    upper, lower = (split + gap, top, edge, middle - gap // 2), (split + gap, middle + gap // 2, edge, bottom)
    return [
        fitted,
        _Panel("from above: x right, y up", upper, np.eye(3), center, reach),
        _Panel("from the side: x right, z up", lower, side, center, reach),
    ]


def _corners(aabb: Aabb) -> np.ndarray:
    """(8, 3), x fastest."""
    sides = np.array([aabb.low, aabb.high])
    return np.array([[sides[corner >> axis & 1, axis] for axis in range(3)] for corner in range(8)])


def _positions(scene: Scene) -> np.ndarray:
    return scene.cameras.positions.detach().cpu().double().numpy()


def _drawn(panel: _Panel, scenes: Sequence[Scene], points: ColmapPoints | None) -> Canvas:
    """On a canvas of its own, so that nothing leaves the panel."""
    left, top, right, bottom = panel.rectangle
    width, height = right - left, bottom - top
    canvas, panel = Canvas(width, height, _PANEL), replace(panel, rectangle=(0, 0, width, height))
    _draw_grid(canvas, panel, scenes[0])
    if points is not None:
        every = max(1, points.positions.shape[0] // _MOST_POINTS)
        pixels, depth = panel.project(points.positions[::every].numpy())
        order = np.argsort(-depth)  # the nearest last, so that they cover what is behind them
        canvas.dots(pixels[order], points.colors[::every].numpy()[order], 1.5 if len(order) < 20_000 else 1.0)
    for level in range(min(2, scenes[0].grid_levels)):  # of an unbounded scene the next larger box too
        corners, color = _corners(scenes[0].aabb.scaled(2.0**level)), (*_BOX, 90 if level else 220)
        for edge in _EDGES:
            canvas.line(panel.project(corners[list(edge)])[0], color, 1 if level else 2)
    for scene in scenes:
        _draw_cameras(canvas, panel, scene, sum(map(len, scenes)))
    _draw_axes(canvas, panel)
    canvas.rectangle((0, 0, width, 36), _PANEL)
    canvas.text((14, 18), panel.title, _INK, 17, "lm")
    canvas.frame(_LINE)
    return canvas


def _draw_grid(canvas: Canvas, panel: _Panel, scene: Scene) -> None:
    """Lines at round numbers: over the panel, or on the floor of the box where there is perspective."""
    step, flat = _round_step(panel.reach / 3.0), panel.distance is None
    reach = 1.6 * panel.reach if flat else panel.reach
    across, along = 0, 2 if flat and abs(panel.axes[1, 2]) > 0.9 else 1
    floor = panel.center.copy()
    if not flat:
        floor[2] = scene.aabb.low[2]
    n = math.floor(reach / step)
    for index in range(-n, n + 1):
        for fixed, running in ((across, along), (along, across)):
            ends = np.stack([floor, floor])
            value = ends[:, fixed] = step * (round(panel.center[fixed] / step) + index)
            ends[:, running] += np.array([-reach, reach])
            pixels = panel.project(ends)[0]
            canvas.line(pixels, _LINE)
            (x, y), (_, _, width, height) = pixels[0], panel.rectangle
            if flat and fixed == across and 40 < x < width - 30:  # numbers along the lower and the left edge
                canvas.text((x, height - 8), f"{value:.4g}", _SOFT, 12, "ms")
            elif flat and fixed == along and 50 < y < height - 30:
                canvas.text((8, y), f"{value:.4g}", _SOFT, 12, "lm")


def _draw_cameras(canvas: Canvas, panel: _Panel, scene: Scene, n_views: int) -> None:
    color = _SPLIT_COLORS.get(scene.split, _INK)
    size = panel.reach * max(0.035, min(0.11, 0.9 / math.sqrt(n_views)))
    for apex, frame in zip(_positions(scene), _frusta(scene, size), strict=True):
        pixels, _ = panel.project(np.concatenate([apex[None], frame]))
        if not np.isfinite(pixels).all() or np.abs(pixels).max() > 1e5:
            continue
        canvas.polygon(pixels[1:], (*color, 34))
        for corner in range(1, 5):
            canvas.line(pixels[[0, corner]], (*color, 170))
        canvas.line(pixels[[1, 2, 3, 4, 1]], (*color, 230))
        canvas.line(pixels[1:3], color, 2)  # the upper edge


def _frusta(scene: Scene, size: float) -> np.ndarray:
    """(n, 4, 3): the corners of each image, `size` in front of its camera or, for wide lenses, to its sides."""
    cameras = scene.cameras.to("cpu")
    focal, center, extent = cameras.focal.double(), cameras.center.double(), cameras.size.double()
    low, high = -center / focal, (extent - center) / focal
    spread = torch.maximum(low.abs(), high.abs()).amax(1, keepdim=True).clamp_min(1.0)
    low, high, depth = low / spread, high / spread, -1.0 / spread[:, 0]
    ends = ((low, low), (high, low), (high, high), (low, high))  # the two upper corners first
    corners = torch.stack([torch.stack([x[:, 0], -y[:, 1], depth], -1) for x, y in ends], 1)  # (n, 4, 3), camera axes
    rotation, position = cameras.camera_to_world[:, :, :3].double(), cameras.positions.double()
    return (torch.einsum("nij,nkj->nki", rotation, corners * size) + position[:, None]).numpy()


def _draw_axes(canvas: Canvas, panel: _Panel) -> None:
    for axis, (name, color) in enumerate(_AXES):
        start, end = panel.project(panel.center + 0.22 * panel.reach * np.outer([0.0, 1.0], np.eye(3)[axis]))[0]
        if (length := float(np.linalg.norm(end - start))) >= 4.0:  # else it points at the viewer
            canvas.line(np.stack([start, end]), color, 2)
            canvas.text(end + 9.0 * (end - start) / length, name, color, 14, "mm")


def _draw_words(canvas: Canvas, scenes: Sequence[Scene], points: ColmapPoints | None, title: str) -> None:
    first = scenes[0]
    levels = first.grid_levels
    low, high = (", ".join(f"{value:.3g}" for value in side) for side in (first.aabb.low, first.aabb.high))
    nested = f"unbounded: {levels} nested boxes, the outermost {2 ** (levels - 1)} times as large"
    reach = "bounded" if levels == 1 else nested
    line = f"box ({low}) to ({high}), {reach}; near {first.near:.3g}, far {first.far:.3g}"
    if first.to_original is not None:
        line += f"; 1 unit here is {similarity_scale(first.to_original):.4g} in the file"
    canvas.text((24, 18), title, _INK, 28)
    canvas.text((24, 54), line, _SOFT, 15)
    entries = [(_SPLIT_COLORS.get(scene.split, _INK), f"{len(scene)} {scene.split} cameras") for scene in scenes]
    entries.append((_BOX, "box" if levels == 1 else "box, and the next larger one"))
    if points is not None:
        entries.append((_SOFT, f"{points.positions.shape[0]} points"))
    x, y = 24.0, HEIGHT - 34
    for color, text in entries:
        canvas.rectangle((x, y - 7, x + 14, y + 7), color)
        x += 22 + canvas.text((x + 22, y), text, _INK, 15, "lm") + 34


def _round_step(value: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten from below.

    >>> [_round_step(value) for value in (0.3, 1.7, 60.0)]
    [0.2, 1.0, 50.0]
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(power * factor for factor in (5.0, 2.0, 1.0) if power * factor <= value * (1.0 + 1e-9))
