"""Total variation of sparse voxels on a CPU: one pass for the value, one for the gradient.

Neighbours of different nodes may be the same, so that the gradient is summed by one thread; the nodes are few (a share
of all of them a step). fp32 inside, sums in fp64. Deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sink import GradientSink
from ..voxel_lookup import VoxelIndex, VoxelTables
from ..voxel_variation import FLOOR
from ._launch import array, as_float32, jit, launch
from .voxel_lookup import node_row

_SMALL = np.float32(FLOOR)
ZERO = np.float32(0.0)


@jit(inner=True)
def _next(node, blocks, rows, resolution, out):
    """Rows of the nodes one step along x, y and z, -1 where there is none."""
    side = resolution + 1
    x, y, z = node // (side * side), node // side % side, node % side
    out[0] = node_row(blocks, rows, x + 1, y, z) if x < resolution else np.int32(-1)
    out[1] = node_row(blocks, rows, x, y + 1, z) if y < resolution else np.int32(-1)
    out[2] = node_row(blocks, rows, x, y, z + 1) if z < resolution else np.int32(-1)


@jit()
def _measure(first, last, chosen, nodes, blocks, rows, resolution, table, n_channels, sums):
    """sums[0] += the roots of all channels of nodes first ... last - 1; called for the whole range at once."""
    there, total = np.empty(3, np.int32), 0.0
    for i in range(first, last):
        row = chosen[i]
        _next(np.int64(nodes[row]), blocks, rows, resolution, there)
        for j in range(n_channels):
            squares = _SMALL * _SMALL
            for axis in range(3):
                if there[axis] >= 0:
                    rise = table[there[axis], j] - table[row, j]
                    squares += rise * rise
            total += np.sqrt(squares) - _SMALL
    sums[0] += total


@jit()
def _spread_back(first, last, chosen, nodes, blocks, rows, resolution, table, n_channels, factor, grad):
    """grad += factor times the derivative of `_measure`."""
    there, rises = np.empty(3, np.int32), np.empty(3, np.float32)
    for i in range(first, last):
        row = chosen[i]
        _next(np.int64(nodes[row]), blocks, rows, resolution, there)
        for j in range(n_channels):
            squares = _SMALL * _SMALL
            for axis in range(3):
                rises[axis] = table[there[axis], j] - table[row, j] if there[axis] >= 0 else ZERO
                squares += rises[axis] * rises[axis]
            scale = factor / np.sqrt(squares)
            for axis in range(3):
                if there[axis] >= 0:
                    grad[there[axis], j] += scale * rises[axis]
                    grad[row, j] -= scale * rises[axis]


class _Variation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        density: Tensor,
        color: Tensor,
        index: VoxelIndex,
        nodes: Tensor,
        chosen: Tensor,
        n_basis: int,
        sink: GradientSink | None,
    ) -> Tensor:
        ctx.save_for_backward(density, color, nodes, chosen)
        ctx.index, ctx.n_basis, ctx.sink = index, n_basis, sink
        structure, m = _structure(index, nodes, chosen), chosen.shape[0]
        values = []
        for table, channels in ((density[:, None], 1), (color, 3 * n_basis)):
            sums = np.zeros(1, np.float64)
            launch(_measure, m, max(m, 1), *structure, array(as_float32("tables", table)), channels, sums)
            values.append(sums[0] / max(m * channels, 1))
        return torch.tensor(values, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        density, color, nodes, chosen = ctx.saved_tensors
        structure, m = _structure(ctx.index, nodes, chosen), chosen.shape[0]
        results: list[Tensor | None] = []
        for i, (table, channels) in enumerate(((density, 1), (color, 3 * ctx.n_basis))):
            buffer = None if ctx.sink is None else ctx.sink.buffers[i]
            direct = buffer is not None and buffer.dtype == torch.float32
            target = buffer if direct and buffer is not None else torch.zeros(table.shape)
            source, sums = array(table.float()).reshape(table.shape[0], -1), target.numpy()
            factor = np.float32(float(grad[i]) / max(m * channels, 1))
            launch(_spread_back, m, max(m, 1), *structure, source, channels, factor, sums.reshape(table.shape[0], -1))
            if buffer is not None and not direct:
                buffer.add_(target)
            results.append(None if buffer is not None else target.to(table.dtype))
        return *results, None, None, None, None, None  # density, color, index, nodes, chosen, n_basis, sink


def _structure(index: VoxelIndex, nodes: Tensor, chosen: Tensor) -> tuple[Any, ...]:
    return array(chosen), array(nodes), array(index.blocks), array(index.rows), index.resolution


def voxel_variation(
    tables: VoxelTables,
    index: VoxelIndex,
    nodes: Tensor,
    chosen: Tensor,
    *,
    n_basis: int,
    sink: GradientSink | None = None,
) -> Tensor:
    return _Variation.apply(*tables, index, nodes, chosen, n_basis, sink)
