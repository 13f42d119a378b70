"""Look-up in sparse voxels: trilinear in the eight corners of a voxel, density and spherical-harmonic colour.

The unit cube has `resolution` voxels a side, hence resolution + 1 nodes, to which data belongs. Only some nodes are
stored: `blocks` (g, g, g) holds the number of each block of 8^3 nodes, -1 for an empty one, and `rows` (n_blocks, 512)
the row of each node of a block, -1 for a missing one, with the block's z fastest. A missing node has the density
`empty` and zero coefficients, the same for every voxel around it, so that the field stays continuous there too.

    value = sum over corners c of w_c(x) * table[row_c]
    logits = (sum_k sh_k * value_red,k,  ... green,  ... blue,  value_density)

A row of the colour table holds the coefficients of red, then green, then blue, and zeros up to a multiple of 4.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .._checks import check_device, check_dtype, check_shape, check_tensor, refuse
from .._dispatch import implementation
from .._sink import GradientSink, check_count, check_sink

SIDE = 8  # nodes of a block along an axis
MAX_RESOLUTION = 1024  # so that the number of a node fits 32 bits


class VoxelTables(NamedTuple):
    """What the stored nodes hold, a row each."""

    density: Tensor  # (n_nodes,)
    color: Tensor  # (n_nodes, color_width(n_basis))


@dataclass(frozen=True)
class VoxelIndex:
    """Which nodes are stored, and in which row of the tables."""

    blocks: Tensor  # (g, g, g) int32, g = blocks_per_axis(resolution)
    rows: Tensor  # (n_blocks, 512) int32
    resolution: int
    empty: float = -9.0  # density of the nodes that are not stored

    def __post_init__(self) -> None:
        refuse(not 1 <= self.resolution <= MAX_RESOLUTION, "resolution", f"1 to {MAX_RESOLUTION}", self.resolution)
        side = blocks_per_axis(self.resolution)
        check_tensor("blocks", self.blocks, (side, side, side), torch.int32)
        check_tensor("rows", self.rows, ("n_blocks", SIDE**3), torch.int32)
        check_device(blocks=self.blocks, rows=self.rows)


def blocks_per_axis(resolution: int) -> int:
    """Blocks that hold resolution + 1 nodes.

    >>> blocks_per_axis(7), blocks_per_axis(8)
    (1, 2)
    """
    return resolution // SIDE + 1


def color_width(n_basis: int) -> int:
    """Numbers in a row of the colour table: three per basis function, up to a multiple of 4 for wide loads.

    >>> color_width(4), color_width(9)
    (12, 28)
    """
    return (3 * n_basis + 3) // 4 * 4


def voxel_lookup(
    positions: Tensor,
    basis: Tensor,
    ray_indices: Tensor,
    tables: VoxelTables,
    index: VoxelIndex,
    *,
    half: Tensor | None = None,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, 4) fp32: three colour logits and the density of `positions` (n, 3), which are clamped to [0, 1]. `basis`
    (n_rays, n_basis) holds the view direction's basis functions, `ray_indices` (n,) int32 which of its rows a position
    takes. Differentiable to both tables, to `positions` (no gradient past the border) and to `basis`. `half` is a half
    copy of the colour table, read in its place. A `sink` with two buffers takes the tables' gradients in place of
    autograd. Rows past the device count `n_used` come out as zero and receive no gradient.

    >>> index = VoxelIndex(torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 512, dtype=torch.int32), 1)
    >>> tables = VoxelTables(torch.tensor([2.0]), torch.tensor([[1.0, 3.0, 5.0, 0.0]]))  # all nodes share one row
    >>> ray = torch.zeros(1, dtype=torch.int32)
    >>> voxel_lookup(torch.full((1, 3), 0.5), torch.ones(1, 1), ray, tables, index).tolist()
    [[1.0, 3.0, 5.0, 2.0]]
    """
    _check(positions, tables, index, n_used)
    check_tensor("basis", basis, ("n_rays", "n_basis"))
    check_tensor("ray_indices", ray_indices, (positions.shape[0],), torch.int32)
    check_shape("tables.color", tables.color, (tables.density.shape[0], color_width(basis.shape[1])))
    check_device(positions=positions, basis=basis, ray_indices=ray_indices, half=half)
    if basis.shape[0] == 0 and positions.shape[0] > 0:
        raise InputError("basis", "at least one row for the positions to point at", "(0, ...)")
    if half is not None:
        check_tensor("half", half, tuple(tables.color.shape))
    check_sink(sink, VoxelTables._fields, tables)
    look_up = implementation("voxels", "voxel_lookup", positions)
    return look_up(positions, basis, ray_indices, tables, index, half=half, sink=sink, n_used=n_used)


def voxel_density(positions: Tensor, density: Tensor, index: VoxelIndex, *, n_used: Tensor | None = None) -> Tensor:
    """(n,) fp32: the last column of `voxel_lookup`, from the density table (n_nodes,) alone, without gradient. For
    looking ahead: which samples are visible, which cells of a grid are occupied.

    >>> index = VoxelIndex(torch.zeros(1, 1, 1, dtype=torch.int32), torch.full((1, 512), -1, dtype=torch.int32), 1)
    >>> voxel_density(torch.zeros(1, 3), torch.zeros(1), index).tolist()  # no node is stored
    [-9.0]
    """
    _check(positions, VoxelTables(density, density[:, None]), index, n_used)
    with torch.no_grad():
        return implementation("voxels", "voxel_density", positions)(positions, density, index, n_used=n_used)


def _check(positions: Tensor, tables: VoxelTables, index: VoxelIndex, n_used: Tensor | None) -> None:
    check_tensor("positions", positions, ("n", 3))
    check_tensor("tables.density", tables.density, ("n_nodes",))
    check_dtype("tables.color", tables.color)
    check_device(positions=positions, density=tables.density, color=tables.color, blocks=index.blocks)
    check_count(n_used, positions.device)
    refuse(tables.density.shape[0] == 0, "tables.density", "at least one row", "(0,)")
