"""One ray, sample by sample: density, transmittance, weights and cells, for debugging fields and thresholds."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..data.cameras import Cameras
from ..errors import InputError, refuse
from ..ops.march import StepRule, march
from ..ops.march.reference import is_occupied
from ..rendering.model import NerfModel
from .images import Canvas

MAX_STEPS = 20_000
USED, BEHIND = (214, 227, 250), (238, 238, 238)  # shades of occupied cells
INK, SOFT = (30, 30, 30), (90, 90, 90)
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


@torch.no_grad()
def inspect_ray(model: NerfModel, cameras: Cameras, index: int, column: int, row: int) -> RayReport:
    """Ask the field at every step of the renderer's exact lattice along one pixel's ray, or at every sample placed."""
    width, height = (int(side) for side in cameras.size[index])
    if not (0 <= column < width and 0 <= row < height):
        raise InputError("--pixel", f"0,0 to {width - 1},{height - 1}", f"{column},{row}")
    view, pixel = torch.tensor([[index], [row * width + column]], device=cameras.device)
    rays = cameras.pixel_rays(view, pixel).to(model.device)
    if model.marches:  # the lattice's steps whose middle lies in the box, marched as if every cell were occupied
        settings, full = model.settings, replace(model.grid.occupancy, bits=torch.full_like(model.grid.bits, -1))
        length = settings.render_step_size or model.grid.step_size
        rule = StepRule(length, settings.near_plane, settings.far_plane, settings.cone_angle)
        samples = march(rays.origins, rays.directions, full, rule)
    else:
        samples = model.sampler.sample(rays)
    t_starts, t_ends = samples.t_starts[:MAX_STEPS], samples.t_ends[:MAX_STEPS]
    middle, length = (t_starts + t_ends) * 0.5, t_ends - t_starts
    n = middle.shape[0]
    refuse(n == 0, "--pixel", "a ray that meets the scene's box", f"{column},{row} of view {index}")
    positions = rays.origins + rays.directions * middle[:, None]
    times = None if rays.times is None else rays.times.expand(n)
    rgb, density = model.field(positions, rays.directions.expand(n, 3), times)
    rgb, density = rgb.float(), density.float()
    occupied, least = is_occupied(model.grid.occupancy, positions), model.settings.early_stop_eps
    if not model.marches:
        occupied, least = torch.ones_like(occupied), 0.0  # all of them are rendered
    thickness = torch.where(occupied, density * length, torch.zeros_like(density)).double()
    before = torch.exp(-(thickness.cumsum(0) - thickness))
    used = occupied & (before >= least)
    weight = torch.where(used, before * -torch.expm1(-thickness), torch.zeros_like(before))
    opacity = float(weight.sum())
    missed = math.exp(-float(thickness.sum())) - math.exp(-float((density * length).double().sum()))
    steps = {"t": middle, "step": length, "density": density, "occupied": occupied, "used": used}
    steps |= {"transmittance": before, "weight": weight, "rgb": rgb}
    return RayReport(
        **{name: values.tolist() for name, values in steps.items()},
        origin=rays.origins[0].tolist(),
        direction=rays.directions[0].tolist(),
        color=(weight[:, None].float() * rgb).sum(0).tolist(),
        opacity=opacity,
        depth=float((weight * middle).sum()) / max(opacity, 1e-6),
        missed_opacity=max(0.0, missed),
    )


def draw_report(report: RayReport, path: Path, title: str) -> None:
    """The report as an image: density (by its logarithm: behind a surface it may be a hundred times that which stops
    the ray), transmittance and weights over distance; occupied cells as a band."""
    width, panel, left, top = 900, 150, 70, 46
    height, right = top + 3 * (panel + 34) + 30, width - 20
    canvas, low, high = Canvas(width, height), report.t[0], report.t[-1]

    def x_of(t: float) -> float:
        return left + (t - low) / max(high - low, 1e-9) * (right - left)

    canvas.text((left, 8), title, INK, 13)
    found = f"opacity {report.opacity:.4f}, depth {report.depth:.4f}, hidden by the grid {report.missed_opacity:.4f}"
    canvas.text((left, 25), found, SOFT, 13)
    x = float(width - 420)
    for shade, text in ((USED, "occupied, marched"), (BEHIND, "occupied, behind what is opaque")):
        canvas.rectangle((x, 27, x + 14, 39), shade, outline=(170, 170, 170))
        x += 20 + canvas.text((x + 20, 26), text, SOFT, 12) + 18
    peak = max(max(1e-12, value) for value in report.density)
    least = peak * 10.0**-DECADES
    shares = [math.log10(max(least, value) / least) / DECADES for value in report.density]
    rows = (
        ("density, logarithmic", shares, (least, peak), (50, 100, 200)),
        ("transmittance", report.transmittance, None, (30, 140, 90)),
        ("weight", report.weight, None, (200, 90, 40)),
    )
    for place, (name, values, ends, color) in enumerate(rows):
        y0 = top + place * (panel + 34) + 18
        y1 = y0 + panel
        for t, step, occupied, used in zip(report.t, report.step, report.occupied, report.used, strict=True):
            if occupied:
                canvas.rectangle((x_of(t - 0.5 * step), y0, x_of(t + 0.5 * step), y1), USED if used else BEHIND)
        most = max(*values, 1e-12)
        curve = [(x_of(t), y1 - panel * min(1.0, v / most)) for t, v in zip(report.t, values, strict=True)]
        if len(curve) > 1:
            canvas.line(curve, color, 2)
        canvas.line([(left, y1), (right, y1)], (150, 150, 150))
        canvas.text((left, y0 - 17), name, color, 13)
        lowest, highest = ends or (0.0, most)
        canvas.text((4, y0), f"{highest:.3g}", SOFT, 13)
        canvas.text((4, y1 - 14), f"{lowest:.3g}", SOFT, 13)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        t = low + share * (high - low)
        canvas.text((x_of(t) - 14, height - 24), f"{t:.3g}", SOFT, 13)
    canvas.text((4, height - 24), "distance", SOFT, 13)
    canvas.save(path)
