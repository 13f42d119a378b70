"""One ray, sample by sample: density, transmittance, weights and cells, for debugging fields and thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.cameras import PIXEL_CENTER, Cameras
from ..errors import InputError
from ..ops.march import StepRule
from ..ops.march.reference import inverse_lattice, is_occupied, lattice
from ..ops.positions import ray_aabb
from ..rendering.model import NerfModel
from ..sampling.sampler import Sampler
from ..types import Rays

if TYPE_CHECKING:
    from PIL import ImageDraw

MAX_STEPS = 20_000
USED, BEHIND = (214, 227, 250), (238, 238, 238)  # shades of occupied cells
DECADES = 6  # of density that its logarithmic axis shows


@dataclass(frozen=True)
class RayReport:
    """Every step of the lattice along one ray; lists are per step, in order."""

    origin: list[float]
    direction: list[float]
    t: list[float]  # middle of each step
    step: list[float]  # its length
    density: list[float]  # of the field, in empty cells too
    occupied: list[bool]  # whether marching looks at the step
    used: list[bool]  # whether it does so before the ray counts as opaque
    transmittance: list[float]  # light that reaches the step, over occupied steps
    weight: list[float]
    rgb: list[list[float]]
    color: list[float]  # of the pixel, without background
    opacity: float
    depth: float
    missed_opacity: float  # what the density in empty cells would add: light the grid hides

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@torch.no_grad()
def inspect_ray(model: NerfModel, cameras: Cameras, index: int, column: int, row: int) -> RayReport:
    """March one pixel's ray on the exact lattice of the renderer and ask the field at every step; where an estimator
    places the samples, at every one of them."""
    width, height = (int(side) for side in cameras.size[index])
    if not (0 <= column < width and 0 <= row < height):
        raise InputError("--pixel", f"0,0 to {width - 1},{height - 1}", f"{column},{row}")
    x, y = (torch.tensor([value + PIXEL_CENTER], device=cameras.device) for value in (column, row))
    rays = cameras.rays(torch.tensor([index], device=cameras.device), x, y).to(model.device)
    settings, grid = model.settings, model.grid
    rule = StepRule(
        settings.render_step_size or grid.step_size, settings.near_plane, settings.far_plane, settings.cone_angle
    )
    t_starts, t_ends = _steps(rays, model, rule) if model.marches else _placed(rays, model.sampler)
    middle, length = (t_starts + t_ends) * 0.5, t_ends - t_starts
    n = middle.shape[0]
    if n == 0:
        raise InputError("--pixel", "a ray that meets the scene's box", f"{column},{row} of view {index}")
    positions = rays.origins + rays.directions * middle[:, None]
    times = None if rays.times is None else rays.times.expand(n)
    rgb, density = model.field(positions, rays.directions.expand(n, 3), times)
    rgb, density = rgb.float(), density.float()
    occupied, least = is_occupied(grid.occupancy, positions), settings.early_stop_eps
    if not model.marches:
        occupied, least = torch.ones_like(occupied), 0.0  # all of them are rendered
    thickness = torch.where(occupied, density * length, torch.zeros_like(density)).double()
    before = torch.exp(-(thickness.cumsum(0) - thickness))
    used = occupied & (before >= least)
    weight = torch.where(used, before * -torch.expm1(-thickness), torch.zeros_like(before))
    opacity = float(weight.sum())
    everything = 1.0 - float(torch.exp(-(density * length).double().sum()))
    whole = 1.0 - float(torch.exp(-thickness.sum()))
    return RayReport(
        origin=rays.origins[0].tolist(),
        direction=rays.directions[0].tolist(),
        t=middle.tolist(),
        step=length.tolist(),
        density=density.tolist(),
        occupied=occupied.tolist(),
        used=used.tolist(),
        transmittance=before.tolist(),
        weight=weight.tolist(),
        rgb=rgb.tolist(),
        color=(weight[:, None].float() * rgb).sum(0).tolist(),
        opacity=opacity,
        depth=float((weight * middle).sum()) / max(opacity, 1e-6),
        missed_opacity=max(0.0, everything - whole),
    )


def _placed(rays: Rays, estimator: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    samples = estimator.sample(rays)
    return samples.t_starts, samples.t_ends


def _steps(rays: Rays, model: NerfModel, rule: StepRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends of the lattice's steps whose middle lies in the box."""
    outer = model.grid.outer_aabb
    t_min, t_max = ray_aabb(rays.origins, rays.directions, outer, near=rule.near, far=rule.far)
    if not bool(t_max > t_min):
        return t_min[:0], t_min[:0]
    first = inverse_lattice(rule, t_min).floor().clamp(min=0.0)
    last = inverse_lattice(rule, t_max).ceil()
    count = min(MAX_STEPS, int(last - first) + 1)
    u = first + torch.arange(count, device=t_min.device)
    starts, ends = lattice(rule, u), lattice(rule, u + 1.0)
    middle = (starts + ends) * 0.5
    inside = (middle >= t_min) & (middle < t_max)
    return starts[inside], ends[inside]


def draw_report(report: RayReport, path: Path, title: str) -> None:
    """The report as a picture: density, transmittance and weights over distance; occupied cells as a band.

    Density is drawn by its logarithm: what is inside and behind a surface is often a hundred times as dense as the part
    of it that stops the ray.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale, width, panel, left, top = 2, 900, 150, 70, 46
    image = Image.new("RGB", (width * scale, (top + 3 * (panel + 34) + 30) * scale), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=13 * scale)
    low, high = report.t[0], report.t[-1]

    def x_of(t: float) -> float:
        return (left + (t - low) / max(high - low, 1e-9) * (width - left - 20)) * scale

    draw.text((left * scale, 8 * scale), title, fill=(30, 30, 30), font=font)
    found = f"opacity {report.opacity:.4f}, depth {report.depth:.4f}, hidden by the grid {report.missed_opacity:.4f}"
    draw.text((left * scale, 25 * scale), found, fill=(90, 90, 90), font=font)
    _legend(draw, (width - 420) * scale, 27 * scale, scale)
    peak = max(max(1e-12, value) for value in report.density)
    least = peak * 10.0**-DECADES
    shares = [math.log10(max(least, value) / least) / DECADES for value in report.density]
    rows = (
        ("density, logarithmic", shares, (50, 100, 200)),
        ("transmittance", report.transmittance, (30, 140, 90)),
        ("weight", report.weight, (200, 90, 40)),
    )
    for place, (name, values, color) in enumerate(rows):
        y0 = (top + place * (panel + 34) + 18) * scale
        y1 = y0 + panel * scale
        for t, step, occupied, used in zip(report.t, report.step, report.occupied, report.used, strict=True):
            if occupied:
                ends = [x_of(t - 0.5 * step), y0, x_of(t + 0.5 * step), y1]
                draw.rectangle(ends, fill=USED if used else BEHIND)
        _curve(draw, [x_of(t) for t in report.t], values, (y0, y1), color, scale)
        bottom_value, top_value = (least, peak) if values is shares else (0.0, max(max(values), 1e-12))
        draw.line([left * scale, y1, (width - 20) * scale, y1], fill=(150, 150, 150), width=scale)
        draw.text((left * scale, y0 - 17 * scale), name, fill=color, font=font)
        draw.text((4 * scale, y0), f"{top_value:.3g}", fill=(90, 90, 90), font=font)
        draw.text((4 * scale, y1 - 14 * scale), f"{bottom_value:.3g}", fill=(90, 90, 90), font=font)
    y = image.height - 24 * scale
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        t = low + share * (high - low)
        draw.text((x_of(t) - 14 * scale, y), f"{t:.3g}", fill=(90, 90, 90), font=font)
    draw.text((4 * scale, y), "distance", fill=(90, 90, 90), font=font)
    image.resize((image.width // scale, image.height // scale), Image.Resampling.LANCZOS).save(path)


def _legend(draw: ImageDraw.ImageDraw, x: float, y: float, scale: int) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(size=12 * scale)
    for shade, text in ((USED, "occupied, marched"), (BEHIND, "occupied, behind what is opaque")):
        draw.rectangle([x, y, x + 14 * scale, y + 12 * scale], fill=shade, outline=(170, 170, 170))
        draw.text((x + 20 * scale, y - scale), text, fill=(90, 90, 90), font=font)
        x += 20 * scale + draw.textlength(text, font=font) + 18 * scale


def _curve(
    draw: ImageDraw.ImageDraw,
    xs: list[float],
    values: list[float],
    rows: tuple[float, float],
    color: tuple[int, int, int],
    scale: int,
) -> None:
    y0, y1 = rows
    peak = max(max(values), 1e-12)
    points = [(x, y1 - (y1 - y0) * min(1.0, value / peak)) for x, value in zip(xs, values, strict=True)]
    if len(points) > 1:
        draw.line(points, fill=color, width=2 * scale)
