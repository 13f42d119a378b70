"""Sparse voxels by fancy indexing, corner by corner; gradients by autograd."""

import torch
from torch import Tensor

from .._sink import GradientSink, redirect, zero_tail
from ..packed import take_rows
from . import SIDE, VoxelIndex, VoxelTables


def node_rows(index: VoxelIndex, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """int64 rows of the nodes at integer coordinates within [0, resolution]; -1 for those that are not stored."""
    block = index.blocks[x // SIDE, y // SIDE, z // SIDE].long()
    local = ((x % SIDE) * SIDE + y % SIDE) * SIDE + z % SIDE
    if index.rows.shape[0] == 0:
        return torch.full_like(block, -1)
    return torch.where(block >= 0, index.rows[block.clamp(min=0), local].long(), -1)


def corners(positions: Tensor, index: VoxelIndex, work: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Weight (n,) and row (n,) of each of the eight corners."""
    p = positions.to(work).clamp(0.0, 1.0) * index.resolution
    cell = p.detach().nan_to_num().floor().clamp(max=index.resolution - 1)
    fraction, (x, y, z) = (p - cell).unbind(-1), cell.long().unbind(-1)
    result = []
    for corner in range(8):
        steps = [corner & 1, (corner >> 1) & 1, corner >> 2]
        parts = [f if step else 1.0 - f for f, step in zip(fraction, steps, strict=True)]
        result.append((parts[0] * parts[1] * parts[2], node_rows(index, x + steps[0], y + steps[1], z + steps[2])))
    return result


def _width(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _blended_density(found: list[tuple[Tensor, Tensor]], table: Tensor, empty: float, work: torch.dtype) -> Tensor:
    total = torch.zeros_like(found[0][0])
    for weight, row in found:
        value = take_rows(table, row.clamp(min=0)).to(work)
        total = total + weight * torch.where(row >= 0, value, torch.full_like(value, empty))
    return total


def voxel_lookup(positions, basis, ray_indices, tables, index, *, half=None, sink=None, n_used=None) -> Tensor:
    sinks = (None, None) if sink is None else (GradientSink((buffer,), sink.found_inf) for buffer in sink.buffers)
    tables = VoxelTables(*(redirect(t, h, s) for t, h, s in zip(tables, (None, half), sinks, strict=True)))
    positions = zero_tail(positions, n_used)
    work = _width(positions, basis, *tables)
    found = corners(positions, index, work)
    density = _blended_density(found, tables.density, index.empty, work)
    n, n_basis = positions.shape[0], basis.shape[1]
    color = torch.zeros(n, 3 * n_basis, dtype=work, device=positions.device)
    for weight, row in found:
        value = take_rows(tables.color, row.clamp(min=0))[:, : 3 * n_basis].to(work)
        color = color + weight[:, None] * torch.where((row >= 0)[:, None], value, torch.zeros_like(value))
    logits = (color.view(n, 3, n_basis) * take_rows(basis, ray_indices.long()).to(work)[:, None]).sum(-1)
    return zero_tail(torch.cat([logits, density[:, None]], dim=-1), n_used)


def voxel_density(positions, density, index, *, n_used=None) -> Tensor:
    work = _width(positions, density)
    found = corners(zero_tail(positions, n_used), index, work)
    return zero_tail(_blended_density(found, density, index.empty, work), n_used)
