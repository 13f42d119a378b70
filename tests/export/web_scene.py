"""A small baked scene without any training: a ball with colours, and on a second level a wall far behind it."""

from __future__ import annotations

import math

import torch

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.export.web.bake import BakeResult
from nerfturbo.export.web.baked import Baked, DeferredNetwork, encode_density, pack
from nerfturbo.export.web.lattice import Lattice, SparseBlocks
from nerfturbo.types import Aabb

RADIUS = 0.8


def density(positions: torch.Tensor) -> torch.Tensor:
    """A ball with a soft rim, and a wall from x = -1.8 on."""
    ball = 60.0 * torch.sigmoid((RADIUS - positions.norm(dim=-1)) * 40.0)
    return ball + 60.0 * torch.sigmoid((-1.8 - positions[:, 0]) * 20.0)


def make_baked(levels: int = 1, *, features: bool = True, voxel: float = 0.09) -> Baked:
    lattice = Lattice.around(Aabb.cube(1.2, (0.0, 0.1, 0.0)), voxel, levels)
    n = math.prod(lattice.cells)  # on each level
    keys = torch.arange(n * levels)
    centers = lattice.cell_centers(keys)
    kept = keys[(density(centers) > 0.3) & (lattice.level_of(centers) == keys // n)]
    blocks = SparseBlocks.of_cells(lattice, kept)
    positions = lattice.vertex_positions(blocks.vertices)
    size = lattice.voxel * torch.pow(2.0, lattice.level_of(positions).clamp(max=levels - 1).float())
    waves = torch.sin(positions[:, :, None] * torch.tensor([3.0, 7.0, 5.0])).flatten(1) * 0.5 + 0.5
    values = torch.zeros(blocks.n_vertices + 1, 8 if features else 4)
    values[:-1, :3] = waves[:, [0, 4, 8]]
    values[:-1, 3] = encode_density(density(positions), size)
    network = None
    if features:
        values[:-1, 4:] = waves[:, [1, 2, 3, 5]]
        network = DeferredNetwork(torch.Generator().manual_seed(1))
        with torch.no_grad():
            network.weights[-1].mul_(20.0)
    return Baked.of(blocks, values, network, 0.05)


def make_cameras(size: int = 48) -> Cameras:
    eyes = torch.tensor([[3.0, 1.0, 1.2], [-1.1, -0.2, 0.1], [-1.0, 2.5, -1.0]])
    targets = torch.tensor([[0.0, 0.0, 0.0], [-4.0, 0.0, 0.2], [0.0, 0.0, 0.0]])
    return Cameras.pinhole(look_at(eyes, targets), width=size, height=size - 8, field_of_view_x=0.9)


def make_result(baked: Baked) -> BakeResult:
    return BakeResult(baked, tuple(pack(baked)), {"look": 0.0}, 0)
