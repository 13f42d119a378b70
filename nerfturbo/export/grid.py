"""The occupancy grid as a NumPy archive, for other renderers and for looking at."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..files import replacing
from ..sampling.grid import OccupancyGrid, level_occupancy


def write_grid(path: Path, grid: OccupancyGrid, to_original: Tensor | None = None) -> None:
    """Write the levels, finest first; whole or not at all.

    occupied     (levels, r, r, r) bool, x first
    density      (levels, r, r, r) float32: the running maximum in each cell, -1 where no camera looks
    low, high    (levels, 3) float64: the box of each level, in the coordinates of training
    to_original  (4, 4) float64: original = to_original @ (x, y, z, 1)
    """
    r, levels = grid.config.resolution, grid.config.levels
    boxes = [grid.aabb.scaled(2.0**level) for level in range(levels)]
    thickness = grid.thickness.view(levels, r, r, r).float().cpu()
    density = torch.where(thickness < 0.0, torch.full_like(thickness, -1.0), thickness / grid.step_size)
    back = torch.eye(4, dtype=torch.float64) if to_original is None else to_original
    with replacing(path) as temporary:
        values = {"occupied": level_occupancy(grid), "density": density, "to_original": back}
        arrays = {name: value.cpu().numpy() for name, value in values.items()}
        arrays |= {name: np.array([getattr(box, name) for box in boxes]) for name in ("low", "high")}
        np.savez_compressed(temporary, allow_pickle=False, **arrays)
