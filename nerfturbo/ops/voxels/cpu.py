"""Sparse voxels on a CPU: find the eight rows of each position, blend them, scatter the gradients back. A position's
rows (n, 8) and fractions (n, 3) are found once and kept for the backward. Forward and the gradients to positions and
basis: a task = a chunk of positions. Backward to the tables: a task = the density, or one of the three colours, over
all positions: its part of every row is nobody else's. fp32 inside. Deterministic."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._cpu import as_float32, jit, launch
from .._sink import Node
from . import VoxelIndex

CHUNK = 2048
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@jit(inner=True)
def node_row(blocks, rows, x, y, z):
    """The row of a node, -1 where it is not stored."""
    block = blocks[x >> 3, y >> 3, z >> 3]
    if block < 0:
        return np.int32(-1)
    return rows[block, ((x & 7) << 6) | ((y & 7) << 3) | (z & 7)]


@jit(inner=True)
def _cell(x, resolution):
    """Voxel and fraction along an axis; NaN counts as 0, so that no address can leave the arrays."""
    x = x if x > ZERO else ZERO
    p = (x if x < ONE else ONE) * np.float32(resolution)
    cell = min(np.int64(p), resolution - 1)
    return cell, p - np.float32(cell)


@jit(exact=True)
def _locate(first, last, positions, blocks, rows, resolution, found, fractions):
    """found[i, c] = row of corner c (bit 0: x, bit 1: y, bit 2: z); fractions[i] = place in the voxel."""
    for i in range(first, last):
        x, fx = _cell(positions[i, 0], resolution)
        y, fy = _cell(positions[i, 1], resolution)
        z, fz = _cell(positions[i, 2], resolution)
        fractions[i, 0], fractions[i, 1], fractions[i, 2] = fx, fy, fz
        for c in range(8):
            found[i, c] = node_row(blocks, rows, x + (c & 1), y + ((c >> 1) & 1), z + (c >> 2))


@jit(inner=True)
def _weight(fx, fy, fz, c):
    wx = fx if c & 1 else ONE - fx
    wy = fy if c & 2 else ONE - fy
    return wx * wy * (fz if c & 4 else ONE - fz)


@jit()
def _blend(first, last, found, fractions, density, color, basis, rays, empty, out):
    n_basis = basis.shape[1]
    sums = np.empty(3 * n_basis, np.float32)
    for i in range(first, last):
        fx, fy, fz = fractions[i, 0], fractions[i, 1], fractions[i, 2]
        thick = ZERO
        sums[:] = ZERO
        for c in range(8):
            row, weight = found[i, c], _weight(fx, fy, fz, c)
            if row < 0:
                thick += weight * empty
                continue
            thick += weight * density[row]
            for j in range(3 * n_basis):
                sums[j] += weight * color[row, j]
        ray = rays[i]
        for channel in range(3):
            logit = ZERO
            for k in range(n_basis):
                logit += sums[channel * n_basis + k] * basis[ray, k]
            out[i, channel] = logit
        out[i, 3] = thick


@jit()
def _density(first, last, positions, blocks, rows, resolution, density, empty, out):
    for i in range(first, last):
        x, fx = _cell(positions[i, 0], resolution)
        y, fy = _cell(positions[i, 1], resolution)
        z, fz = _cell(positions[i, 2], resolution)
        total = ZERO
        for c in range(8):
            row = node_row(blocks, rows, x + (c & 1), y + ((c >> 1) & 1), z + (c >> 2))
            total += _weight(fx, fy, fz, c) * (empty if row < 0 else density[row])
        out[i] = total


@jit()
def _scatter(first, last, n_used, found, fractions, basis, rays, grad, density_grad, color_grad, checks):
    """Tasks first ... last - 1: the gradient of channel 0, 1, 2 (colours) or 3 (density), added to the tables'.
    checks[task] becomes 0, or NaN where a gradient is not finite."""
    n_basis = basis.shape[1]
    for task in range(first, last):
        check = ZERO
        for i in range(n_used):
            g = grad[i, task]
            check += g * ZERO
            if g == ZERO:
                continue
            fx, fy, fz, ray = fractions[i, 0], fractions[i, 1], fractions[i, 2], rays[i]
            for c in range(8):
                row = found[i, c]
                if row < 0:
                    continue
                weight = g * _weight(fx, fy, fz, c)
                if task == 3:
                    density_grad[row] += weight
                else:
                    for k in range(n_basis):
                        color_grad[row, task * n_basis + k] += weight * basis[ray, k]
        checks[task] = check


@jit()
def _slope(first, last, places, found, fractions, resolution, density, color, basis, rays, grad, empty, out, angular):
    """out (n, 3): gradient to the positions; angular (n, n_basis): to each position's row of the basis."""
    n_basis = basis.shape[1]
    for i in range(first, last):
        fx, fy, fz, ray = fractions[i, 0], fractions[i, 1], fractions[i, 2], rays[i]
        gx, gy, gz = ZERO, ZERO, ZERO
        angular[i] = ZERO
        for c in range(8):
            row = found[i, c]
            dot = grad[i, 3] * (empty if row < 0 else density[row])
            if row >= 0:
                weight = _weight(fx, fy, fz, c)
                for channel in range(3):
                    g = grad[i, channel]
                    for k in range(n_basis):
                        value = color[row, channel * n_basis + k]
                        dot += g * value * basis[ray, k]
                        angular[i, k] += g * value * weight
            wx = fx if c & 1 else ONE - fx
            wy = fy if c & 2 else ONE - fy
            wz = fz if c & 4 else ONE - fz
            gx += (dot if c & 1 else -dot) * wy * wz
            gy += (dot if c & 2 else -dot) * wx * wz
            gz += (dot if c & 4 else -dot) * wx * wy
        size = np.float32(resolution)
        out[i, 0] = gx * size if places[i, 0] >= ZERO and places[i, 0] <= ONE else ZERO
        out[i, 1] = gy * size if places[i, 1] >= ZERO and places[i, 1] <= ONE else ZERO
        out[i, 2] = gz * size if places[i, 2] >= ZERO and places[i, 2] <= ONE else ZERO


class _VoxelLookup(Node):
    @staticmethod
    def forward(ctx, positions, basis, density, color, rays, half, index, n_used, sink) -> Tensor:
        n = positions.shape[0]
        found, fractions = torch.empty(n, 8, dtype=torch.int32), torch.empty(n, 3)
        out = torch.zeros(n, 4)
        structure = (index.blocks, index.rows, index.resolution)
        launch(_locate, n_used, CHUNK, as_float32("positions", positions), *structure, found, fractions)
        values = as_float32("tables", color if half is None else half)
        tables, rows = (as_float32("tables", density), values), (as_float32("basis", basis), rays)
        launch(_blend, n_used, CHUNK, found, fractions, *tables, *rows, np.float32(index.empty), out)
        ctx.save_for_backward(positions, basis, density, color, values, rays, found, fractions)
        ctx.index, ctx.n_used, ctx.sink = index, n_used, sink
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, basis, density, color, values, rays, found, fractions = ctx.saved_tensors
        n_used, read = ctx.n_used, (basis.float(), rays, grad.float().contiguous())
        to_positions = to_basis = to_density = to_color = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            given = None if ctx.sink is None else ctx.sink.buffers
            own = given is None or any(buffer.dtype != torch.float32 for buffer in given)
            buffers = [torch.zeros(t.shape) for t in (density, color)] if given is None or own else list(given)
            checks = np.zeros(4, np.float32)
            launch(_scatter, 4, 1, n_used, found, fractions, *read, *buffers, checks)
            if ctx.sink is None:
                to_density, to_color = buffers[0].to(density.dtype), buffers[1].to(color.dtype)
            else:
                ctx.sink.take(buffers if own else (), finite=bool(np.isfinite(checks).all()))
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            wide, per_position = torch.zeros(positions.shape[0], 3), torch.zeros(positions.shape[0], basis.shape[1])
            places = (positions.float(), found, fractions, ctx.index.resolution)
            results = (np.float32(ctx.index.empty), wide, per_position)
            launch(_slope, n_used, CHUNK // 4, *places, density.float(), values, *read, *results)
            to_positions = wide.to(positions.dtype)
            to_basis = torch.zeros(basis.shape).index_add_(0, rays.long(), per_position).to(basis.dtype)
        return to_positions, to_basis, to_density, to_color


def voxel_lookup(positions, basis, ray_indices, tables, index, *, half=None, sink=None, n_used=None) -> Tensor:
    used = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    return _VoxelLookup.apply(positions, basis, *tables, ray_indices, half, index, used, sink)


def voxel_density(positions: Tensor, density: Tensor, index: VoxelIndex, *, n_used: Tensor | None = None) -> Tensor:
    used = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    out = torch.zeros(positions.shape[0])
    table = (as_float32("density", density), np.float32(index.empty))
    structure = (index.blocks, index.rows, index.resolution)
    launch(_density, used, CHUNK, as_float32("positions", positions), *structure, *table, out)
    return out
