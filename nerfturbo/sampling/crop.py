"""Where a grid is occupied, and a grid over a part of its space: crops are exact, because rays are clipped to a grid's
box, and cost nothing, because everything that takes a grid takes a cropped one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.march import pack_bits, unpack_bits
from ..types import Aabb
from .occupancy_grid import OccupancyGrid
from .proposals import RayEstimator

SLACK = 1e-4  # of a cell: borders that coincide but for rounding do not touch the next cell


def describe_box(box: Aabb | None) -> str:
    """
    >>> describe_box(Aabb.cube(1.5))
    '(-1.5, -1.5, -1.5) to (1.5, 1.5, 1.5)'
    """
    if box is None:
        return "nothing"
    return " to ".join("(" + ", ".join(f"{value:.4g}" for value in corner) + ")" for corner in (box.low, box.high))


def level_occupancy(grid: OccupancyGrid) -> Tensor:
    """(levels, resolution, resolution, resolution) bool, x first."""
    r = grid.config.resolution
    return unpack_bits(grid.bits).view(grid.config.levels, r, r, r)


def level_box(grid: OccupancyGrid, level: int) -> Aabb:
    """The box of one level."""
    return grid.aabb.scaled(2.0**level)


def occupied_box(grid: OccupancyGrid) -> Aabb | None:
    """The smallest box of whole cells that holds all occupied ones; None for an empty grid."""
    lows, highs = [], []
    for level, occupied in enumerate(level_occupancy(grid)):
        cells = occupied.nonzero()
        if cells.shape[0] == 0:
            continue
        low, high = level_box(grid, level).tensor(cells.device, torch.float64)
        size = (high - low) / grid.config.resolution
        lows.append(low + cells.amin(0) * size)
        highs.append(low + (cells.amax(0) + 1) * size)
    if not lows:
        return None
    low, high = torch.stack(lows).amin(0).tolist(), torch.stack(highs).amax(0).tolist()
    return Aabb(tuple(low), tuple(high))


def cropped_grid(grid: OccupancyGrid, box: Aabb, *, what: str = "box") -> OccupancyGrid:
    """A grid of one level over `box` alone: a cell is occupied where it touches an occupied cell of `grid`.

    A box outside the scene, or without any occupied cell, is refused with the box that holds the occupied ones.
    """
    inside = box.intersection(grid.outer_aabb)
    occupied = None if inside is None else _touched(grid, inside)
    if inside is None or occupied is None or not bool(occupied.any()):
        hint = f"what is occupied lies in {describe_box(occupied_box(grid))}"
        raise InputError(what, "a box that holds a part of the scene", describe_box(box), hint)
    config = replace(grid.config, levels=1)
    result = OccupancyGrid(inside, config, step_size=grid.step_size, seed=grid.seed).to(grid.bits.device)
    result.bits.copy_(pack_bits(occupied.reshape(-1)))
    result.mean.copy_(grid.mean)
    return result


def cropped(
    estimator: OccupancyGrid | RayEstimator, box: Aabb | None, *, what: str = "box"
) -> OccupancyGrid | RayEstimator:
    """Whatever places samples, in the box alone (None: everywhere)."""
    if box is None:
        return estimator
    if isinstance(estimator, OccupancyGrid):
        return cropped_grid(estimator, box, what=what)
    return estimator.cropped(box)


def _touched(grid: OccupancyGrid, box: Aabb) -> Tensor:
    """(r, r, r) bool over the cells of `box`. Levels are united: a coarse cell knows what its fine ones hold."""
    r = grid.config.resolution
    low, high = box.tensor(grid.bits.device, torch.float64)
    edges = low + torch.arange(r + 1, device=low.device)[:, None] * (high - low) / r  # (r + 1, 3)
    touched = torch.zeros(r, r, r, dtype=torch.bool, device=low.device)
    for level, occupied in enumerate(level_occupancy(grid)):
        level_low, level_high = level_box(grid, level).tensor(low.device, torch.float64)
        places = (edges - level_low) / (level_high - level_low) * r
        first = (places[:-1] + SLACK).floor().long().clamp(0, r)
        last = (places[1:] - SLACK).ceil().long().clamp(0, r)
        sums = torch.zeros(r + 1, r + 1, r + 1, dtype=torch.int32, device=low.device)
        sums[1:, 1:, 1:] = occupied.int().cumsum(0).cumsum(1).cumsum(2)
        for axis in range(3):  # the count between two planes, axis after axis
            sums = sums.index_select(axis, last[:, axis]) - sums.index_select(axis, first[:, axis])
        touched |= sums > 0
    return touched
