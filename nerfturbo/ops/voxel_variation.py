"""Total variation of sparse voxels: how much the nodes differ from their neighbours, over some of the nodes.

    variation = 1 / m * sum over chosen nodes of the mean over channels of sqrt(d_x^2 + d_y^2 + d_z^2 + 1e-8) - 1e-4

with d the difference to the next node along an axis, zero where that one is not stored: the border of what is stored
costs nothing. The square root is over all three axes, so that edges of every direction cost the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_device, check_int, check_shape
from ._dispatch import implementation, resolve
from ._sink import GradientSink, redirect
from .voxel_lookup import VoxelIndex, VoxelTables

FLOOR = 1e-4  # the root of the 1e-8: smooth where nothing differs


def voxel_variation(
    tables: VoxelTables,
    index: VoxelIndex,
    nodes: Tensor,
    chosen: Tensor,
    *,
    n_basis: int,
    sink: GradientSink | None = None,
) -> Tensor:
    """(2,) fp32: the variation of the density and of the colour's 3 * n_basis coefficients.

    `nodes` (n_nodes,) int32 says where each row lies: (x * (r + 1) + y) * (r + 1) + z with r the resolution. `chosen`
    (m,) int64 are the rows that count; one that is there twice counts twice. Differentiable to both tables, or into
    the two buffers of a `sink`.

    >>> index = VoxelIndex(torch.zeros(1, 1, 1, dtype=torch.int32), torch.full((1, 512), -1, dtype=torch.int32), 1)
    >>> index.rows[0, :2] = torch.tensor([0, 1])  # two nodes, neighbours along z
    >>> tables = VoxelTables(torch.tensor([1.0, 4.0]), torch.zeros(2, 4))
    >>> nodes, chosen = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])
    >>> voxel_variation(tables, index, nodes, chosen, n_basis=1).round(decimals=3).tolist()
    [3.0, 0.0]
    """
    n = tables.density.shape[0]
    check_shape("nodes", nodes, (n,))
    check_int("nodes", nodes, torch.int32)
    check_shape("chosen", chosen, ("m",))
    check_int("chosen", chosen, torch.int64)
    check_device(density=tables.density, color=tables.color, nodes=nodes, chosen=chosen, blocks=index.blocks)
    if sink is not None:
        sink.check(VoxelTables._fields, tables)
    variation = implementation("voxel_variation", "voxel_variation", tables.density)
    if resolve(tables.density) != "reference":
        return variation(tables, index, nodes, chosen, n_basis=n_basis, sink=sink)
    buffers = (None, None) if sink is None else sink.buffers
    own = VoxelTables(*(redirect(table, None, buffer) for table, buffer in zip(tables, buffers, strict=True)))
    return variation(own, index, nodes, chosen, n_basis=n_basis)
