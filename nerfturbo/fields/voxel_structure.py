"""Which nodes of a voxel grid are stored: a dense start, and the finer structure over what was seen.

Nodes are numbered (x * (r + 1) + y) * (r + 1) + z. Rows follow the blocks of the index, so that what lies together in
space lies together in memory. Everything here works on lists of nodes; no array has the size of the box.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.voxels import SIDE, VoxelIndex, blocks_per_axis


@dataclass(frozen=True)
class VoxelStructure:
    """The stored nodes of one resolution."""

    resolution: int
    nodes: Tensor  # (n_nodes,) int32, in the order of the rows
    blocks: Tensor  # (g, g, g) int32
    rows: Tensor  # (n_blocks, 512) int32

    def index(self, empty: float) -> VoxelIndex:
        return VoxelIndex(self.blocks, self.rows, self.resolution, empty)


def split_nodes(nodes: Tensor, resolution: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and z (int64) of numbered nodes."""
    along, place = resolution + 1, nodes.long()
    return place // (along * along), place // along % along, place % along


def node_positions(nodes: Tensor, resolution: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(n, 3) in the unit cube."""
    return torch.stack(split_nodes(nodes, resolution), dim=-1).to(dtype) / resolution


def node_keys(x: Tensor, y: Tensor, z: Tensor, resolution: int) -> Tensor:
    """(n,) int64, growing with the block and then with the place in it: the order of the rows."""
    side = blocks_per_axis(resolution)
    block = ((x // SIDE) * side + y // SIDE) * side + z // SIDE
    return block * SIDE**3 + ((x % SIDE) * SIDE + y % SIDE) * SIDE + z % SIDE


def build_structure(keys: Tensor, resolution: int) -> VoxelStructure:
    """The structure of nodes given by their keys, in any order, with repeats."""
    side, along, device = blocks_per_axis(resolution), resolution + 1, keys.device
    keys = torch.unique(keys)
    block, local = keys // SIDE**3, keys % SIDE**3
    used, number = torch.unique_consecutive(block, return_inverse=True)
    blocks = torch.full((side**3,), -1, dtype=torch.int32, device=device)
    blocks[used] = torch.arange(used.shape[0], dtype=torch.int32, device=device)
    rows = torch.full((used.shape[0], SIDE**3), -1, dtype=torch.int32, device=device)
    rows[number, local] = torch.arange(keys.shape[0], dtype=torch.int32, device=device)
    x = block // (side * side) * SIDE + local // (SIDE * SIDE)
    y = block // side % side * SIDE + local // SIDE % SIDE
    z = block % side * SIDE + local % SIDE
    nodes = ((x * along + y) * along + z).to(torch.int32)
    return VoxelStructure(resolution, nodes, blocks.view(side, side, side), rows)


def dense_structure(resolution: int, device: torch.device | str = "cpu") -> VoxelStructure:
    """All nodes of the box."""
    places = torch.arange((resolution + 1) ** 3, device=device)
    return build_structure(node_keys(*split_nodes(places, resolution), resolution), resolution)


def kept_voxels(structure: VoxelStructure, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Low corners of the voxels that have at least one of the kept nodes (n_nodes,) bool among their corners.

    A sample marks all corners of its voxel, so that the voxel and its 26 neighbours stay.
    """
    x, y, z = split_nodes(structure.nodes[kept], structure.resolution)
    last, along, found = structure.resolution - 1, structure.resolution + 1, []
    for corner in range(8):
        i, j, k = x - (corner & 1), y - ((corner >> 1) & 1), z - (corner >> 2)
        inside = (i >= 0) & (j >= 0) & (k >= 0) & (i <= last) & (j <= last) & (k <= last)
        found.append(((i * along + j) * along + k)[inside])
    return split_nodes(torch.unique(torch.cat(found)), structure.resolution)


def subdivided(voxels: tuple[Tensor, Tensor, Tensor], old: int, new: int) -> VoxelStructure:
    """The nodes of resolution `new` that lie in the given voxels of resolution `old`, their faces included."""
    # Along each axis the nodes k with low / old <= k / new <= (low + 1) / old.
    firsts = [torch.div(low * new + old - 1, old, rounding_mode="floor") for low in voxels]
    lasts = [torch.div((low + 1) * new, old, rounding_mode="floor") for low in voxels]
    steps, keys = range(-(-new // old) + 1), []
    for offset in itertools.product(steps, steps, steps):
        place = [first + step for first, step in zip(firsts, offset, strict=True)]
        inside = (place[0] <= lasts[0]) & (place[1] <= lasts[1]) & (place[2] <= lasts[2])
        keys.append(node_keys(*(axis[inside] for axis in place), resolution=new))
    return build_structure(torch.cat(keys), new)


def corner_rows(structure: VoxelStructure, positions: Tensor, corner: int) -> Tensor:
    """(n,) int64: the row of one of the eight corners around unit positions (n, 3); -1 where it is not stored."""
    r = structure.resolution
    cell = (positions.clamp(0.0, 1.0) * r).nan_to_num().floor().clamp(max=r - 1).long()
    x, y, z = cell[:, 0] + (corner & 1), cell[:, 1] + ((corner >> 1) & 1), cell[:, 2] + (corner >> 2)
    block = structure.blocks[x // SIDE, y // SIDE, z // SIDE].long()
    row = structure.rows[block.clamp(min=0), ((x % SIDE) * SIDE + y % SIDE) * SIDE + z % SIDE].long()
    return torch.where(block >= 0, row, -1)
