"""Random sparse voxels for the tests of the ops on them."""

from __future__ import annotations

import torch
from torch import Tensor

from nerfturbo.fields.voxels import build_structure, node_keys, split_nodes
from nerfturbo.ops.voxels import VoxelIndex, VoxelTables, color_width

from .cases import generator


def make_voxels(resolution: int = 11, share: float = 0.6, *, seed: int = 0) -> tuple[VoxelIndex, Tensor]:
    """About a share of all nodes, and where they lie; some blocks are empty, some nodes have no neighbours."""
    draw = generator(seed)
    places = torch.arange((resolution + 1) ** 3)
    x, y, z = split_nodes(places, resolution)
    stored = (torch.rand(places.shape[0], generator=draw) < share) & ~((x >= 8) & (y < 8))
    structure = build_structure(node_keys(x[stored], y[stored], z[stored], resolution), resolution)
    return structure.index(-3.0), structure.nodes


def make_tables(n: int, n_basis: int, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> VoxelTables:
    draw = generator(seed)
    color = torch.randn(n, color_width(n_basis), generator=draw).to(dtype)
    return VoxelTables(torch.randn(n, generator=draw).to(dtype), color)


def index_to(index: VoxelIndex, device: str) -> VoxelIndex:
    return VoxelIndex(index.blocks.to(device), index.rows.to(device), index.resolution, index.empty)
