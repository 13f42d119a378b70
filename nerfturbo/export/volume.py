"""Density on a regular lattice: over the occupied box only, and evaluated only where the grid is occupied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..rendering.model import NerfModel
from ..sampling.crop import cropped_grid, describe_box, level_occupancy, occupied_box
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import Aabb

CHUNK = 1 << 20  # lattice points looked at in one go
MAX_POINTS = 1 << 31

Progress = Callable[[float], None]


@dataclass(frozen=True)
class DensityVolume:
    """`density[i, j, k]` at low + (i, j, k) * voxel; zero all around, so that every surface closes."""

    density: Tensor  # (nx, ny, nz) float32 on the CPU
    low: tuple[float, float, float]
    voxel: float
    n_evaluated: int  # how often the field was asked

    @property
    def high(self) -> tuple[float, float, float]:
        x, y, z = (a + self.voxel * (n - 1) for a, n in zip(self.low, self.density.shape, strict=True))
        return x, y, z


def export_box(model: NerfModel, box: Aabb | None, *, what: str = "--box") -> Aabb:
    """What there is to export: the occupied part of the scene, of `box` where one is given.

    Fails at once, before anything is evaluated, where that is empty, and names the occupied box.
    """
    occupied = occupied_box(model.grid)
    if occupied is None:
        hint = "train it longer"
        raise InputError("the run", "an occupied part of the scene", "an occupancy grid that is empty", hint)
    if box is None:
        return occupied
    inside = occupied_box(cropped_grid(model.grid, box, what=what))
    inside = None if inside is None else inside.intersection(box)
    if inside is None:
        hint = f"what is occupied lies in {describe_box(occupied)}"
        raise InputError(what, "a box that holds a part of the scene", describe_box(box), hint)
    return inside


def voxel_size(model: NerfModel, resolution: int) -> float:
    """The longest side of the scene's box over the resolution: a number of voxels means one size in every export."""
    if not 8 <= resolution <= 4096:
        raise InputError("--resolution", "8 to 4096 voxels along the scene's box", str(resolution))
    return max(model.bounds.aabb.size) / resolution


def occupied_at(grid: OccupancyGrid, positions: Tensor) -> Tensor:
    """(n,) bool for positions (n, 3): whether their cell, in the finest level that holds them, is occupied."""
    r, levels = grid.config.resolution, level_occupancy(grid)
    low, high = grid.aabb.tensor(positions.device)
    unit = (positions - (low + high) * 0.5) / ((high - low) * 0.5)
    largest = unit.abs().amax(-1)
    level = torch.log2(largest.clamp_min(1.0)).ceil().long()
    inside = level < grid.config.levels
    level = level.clamp(max=grid.config.levels - 1)
    cell = ((unit / torch.pow(2.0, level.float())[:, None] + 1.0) * (0.5 * r)).long().clamp(0, r - 1)
    return levels[level, cell[:, 0], cell[:, 1], cell[:, 2]] & inside


@torch.no_grad()
def density_volume(model: NerfModel, box: Aabb, voxel: float, *, progress: Progress | None = None) -> DensityVolume:
    """Ask the field at every lattice point of the box that lies in an occupied cell; all others are empty."""
    counts = [math.ceil(size / voxel - 1e-6) + 1 for size in box.size]
    if math.prod(counts) > MAX_POINTS:
        got = f"{counts[0]} x {counts[1]} x {counts[2]}"
        raise InputError("--resolution", f"at most {MAX_POINTS} points in the box", got, "use a smaller one, or --box")
    density = torch.zeros(*(n + 2 for n in counts))  # one empty layer all around
    low = torch.tensor(box.low, device=model.device)
    y, z = (torch.arange(n, device=model.device) * voxel + low[axis + 1] for axis, n in enumerate(counts[1:]))
    plane = torch.cartesian_prod(y, z)
    slabs, asked = max(1, CHUNK // plane.shape[0]), 0
    for first in range(0, counts[0], slabs):
        x = torch.arange(first, min(first + slabs, counts[0]), device=model.device) * voxel + low[0]
        points = torch.cat([x.repeat_interleave(plane.shape[0])[:, None], plane.repeat(x.shape[0], 1)], dim=1)
        chosen = occupied_at(model.grid, points).nonzero()[:, 0]
        values = torch.zeros(points.shape[0], device=model.device)
        if chosen.shape[0]:
            values[chosen] = model.field.density(points[chosen]).float()
        inner = density[first + 1 : first + 1 + x.shape[0], 1:-1, 1:-1]
        inner.copy_(values.view(x.shape[0], counts[1], counts[2]))
        asked += int(chosen.shape[0])
        if progress is not None:
            progress((first + x.shape[0]) / counts[0])
    start_x, start_y, start_z = (value - voxel for value in box.low)
    return DensityVolume(density, (start_x, start_y, start_z), voxel, asked)
