"""Look-ups in sparse blocks on a CPU, as numba kernels: what `SparseBlocks.gather` and `tune.Trilinear` do in torch."""

import numpy as np
import torch
from torch import Tensor

from ...ops._cpu import array, jit, launch
from .lattice import BLOCK, CELLS, SparseBlocks

GRAIN = 4096
_CELLS, _BLOCK = CELLS, BLOCK


@jit(exact=True)
def _gather(first, last, positions, center, half, voxel, levels, counts, slots, texels, empty, ids, weights):
    """ids and weights (n, 8) of the vertices around each position; `counts` are blocks per axis, x first."""
    one, local = np.float32(1.0), np.empty(3, np.float32)
    cell, block = np.empty(3, np.int64), np.empty(3, np.int64)
    for i in range(first, last):
        largest = np.float32(0.0)
        for axis in range(3):
            largest = max(largest, abs((positions[i, axis] - center[axis]) / half[axis]))
        level = 0
        if largest > one:
            level = int(np.ceil(np.log2(largest)))
        inside = level < levels
        scale = np.float32(2.0 ** min(level, levels - 1))
        for axis in range(3):
            place = ((positions[i, axis] - center[axis]) / scale + half[axis]) / voxel
            block[axis] = min(max(int(place / np.float32(_CELLS)), 0), counts[axis] - 1)
            part = place - np.float32(block[axis] * _CELLS)
            part = min(max(part, np.float32(0.0)), np.float32(_CELLS))
            cell[axis] = min(int(part), _CELLS - 1)
            local[axis] = part - np.float32(cell[axis])
        slot = slots[min(level, levels - 1), block[2], block[1], block[0]]
        if not inside or slot < 0:
            for k in range(8):
                ids[i, k], weights[i, k] = empty, np.float32(0.0)
            continue
        start = (cell[2] * _BLOCK + cell[1]) * _BLOCK + cell[0]
        for k in range(8):
            dx, dy, dz = k & 1, (k >> 1) & 1, k >> 2
            ids[i, k] = texels[slot, start + (dz * _BLOCK + dy) * _BLOCK + dx]
            x = local[0] if dx else one - local[0]
            y = local[1] if dy else one - local[1]
            z = local[2] if dz else one - local[2]
            weights[i, k] = x * y * z


@jit()
def _forward(first, last, values, ids, weights, out):
    """out (n, channels) = sum over the eight of weight * value, rounded to a byte."""
    scale = np.float32(255.0)
    for i in range(first, last):
        for c in range(out.shape[1]):
            out[i, c] = 0.0
        for k in range(8):
            row, weight = ids[i, k], weights[i, k] / scale
            for c in range(out.shape[1]):
                value = min(max(values[row, c], np.float32(0.0)), np.float32(1.0))
                out[i, c] += weight * np.floor(value * scale + np.float32(0.5))


@jit()
def _backward(first, last, grad, ids, weights, sink):
    """The scatter; rows repeat, so one thread does all of it."""
    for i in range(first, last):
        for k in range(8):
            row, weight = ids[i, k], weights[i, k]
            for c in range(grad.shape[1]):
                sink[row, c] += weight * grad[i, c]


def gather(blocks: SparseBlocks, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As `SparseBlocks.gather`, with int32 ids."""
    lattice, n = blocks.lattice, positions.shape[0]
    ids, weights = torch.empty(n, 8, dtype=torch.int32), torch.empty(n, 8)
    center, half = (np.array(values, np.float32) for values in (lattice.center, lattice.half))
    space = (center, half, np.float32(lattice.voxel), lattice.levels, np.array(lattice.blocks, np.int64))
    held = (array(blocks.slots), array(blocks.texels), blocks.n_vertices)
    launch(_gather, n, GRAIN, array(positions.float()), *space, *held, array(ids), array(weights))
    return ids, weights


def forward(values: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.empty(ids.shape[0], values.shape[1])
    launch(_forward, ids.shape[0], GRAIN, array(values), array(ids), array(weights), array(out))
    return out


def backward(grad: Tensor, ids: Tensor, weights: Tensor, sink: Tensor) -> None:
    n = ids.shape[0]
    launch(_backward, n, max(n, 1), array(grad), array(ids), array(weights), array(sink))
