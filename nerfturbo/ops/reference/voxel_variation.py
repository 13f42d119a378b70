"""Total variation of sparse voxels by fancy indexing; gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gather import take_rows
from ..voxel_lookup import VoxelIndex, VoxelTables
from ..voxel_variation import FLOOR
from .voxel_lookup import node_rows


def next_rows(index: VoxelIndex, nodes: Tensor) -> list[Tensor]:
    """The rows of the nodes one step along x, y and z; -1 where there is none."""
    r = index.resolution
    place = nodes.long()
    here = [place // (r + 1) ** 2, place // (r + 1) % (r + 1), place % (r + 1)]
    result = []
    for axis in range(3):
        there = list(here)
        there[axis] = (here[axis] + 1).clamp(max=r)
        result.append(torch.where(here[axis] < r, node_rows(index, *there), -1))
    return result


def voxel_variation(tables: VoxelTables, index: VoxelIndex, nodes: Tensor, chosen: Tensor, *, n_basis: int) -> Tensor:
    if chosen.shape[0] == 0:
        return (tables.density[:1] * 0.0).expand(2)
    rows = next_rows(index, nodes[chosen])
    values = []
    for table in (tables.density[:, None], tables.color[:, : 3 * n_basis]):
        own = take_rows(table, chosen)
        squares = torch.full_like(own, FLOOR**2)
        for row in rows:
            rise = take_rows(table, row.clamp(min=0)) - own
            squares = squares + torch.where((row >= 0)[:, None], rise, torch.zeros_like(rise)).square()
        values.append((squares.sqrt() - FLOOR).mean())
    return torch.stack(values)
