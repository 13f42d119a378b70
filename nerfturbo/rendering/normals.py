"""Surface normals of a density field: which way is less of it."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..fields.field import Field
from ..sampling.occupancy_grid import OccupancyGrid

CHUNK = 1 << 15  # points at a time
TAPS = 32  # places about each point
# In steps of marching. Nearer places see the noise of the finest hash levels; farther ones round corners off.
REACH = 4.0


@functools.lru_cache(maxsize=8)
def _sphere(device: torch.device) -> Tensor:
    """(TAPS, 3) directions spread evenly over the sphere, on a spiral of golden turns."""
    index = torch.arange(TAPS, dtype=torch.float64) + 0.5
    z = 1.0 - 2.0 * index / TAPS
    angle = index * math.pi * (3.0 - math.sqrt(5.0))
    flat = (1.0 - z * z).sqrt()
    return torch.stack([flat * angle.cos(), flat * angle.sin(), z], dim=-1).float().to(device)


@torch.no_grad()
def surface_normals(field: Field, grid: OccupancyGrid, positions: Tensor, times: Tensor | None = None) -> Tensor:
    """(n, 3) unit vectors out of the surface at positions (n, 3); zero where nothing is around.

    Minus the mean direction of what lies on a small sphere about the point, weighed by opacity rather than density: it
    is bounded, so that a few very dense places do not drown the rest. At a sharp border, half of the sphere is opaque
    and its mean direction is the normal; differences along three axes would know only their signs.
    """
    reach = REACH * grid.step_size
    directions = _sphere(positions.device)
    parts = []
    for start in range(0, positions.shape[0], CHUNK):
        part = positions[start : start + CHUNK]
        around = (part[:, None, :] + directions * reach).reshape(-1, 3)
        when = None if times is None else times[start : start + CHUNK].repeat_interleave(TAPS)
        alpha = -torch.expm1(-field.density(around, when).float() * reach).view(-1, TAPS)
        alpha = alpha - alpha.mean(1, keepdim=True)  # the directions' own mean is not exactly zero
        parts.append(torch.nn.functional.normalize(-alpha @ directions, dim=-1, eps=1e-6))
    return torch.cat(parts) if parts else positions.new_zeros(0, 3)
