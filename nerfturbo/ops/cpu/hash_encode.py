"""Hash encoding: eight look-ups per level and point, blended; and the scatter of their gradients.

Layout: positions are clamped and stored (3, n) once; the encoding and its gradient are stored (levels * features, n)
and handed out transposed, so that each level reads and writes streams. A level's slice of the table then stays in a
core's cache while all points pass through it.

Decomposition: a block of points first gets its table rows and fractions, which compiles to vector instructions; then
each point loads its eight rows as vectors of n_features. Forward: a task = one level and a chunk of points. Backward
to the table: a task = one level, whose slice nobody else touches: no atomics, and the finest, slowest levels go first
so that threads end together. Backward to positions: a task = a chunk of points.

Dtypes: fp32 inside; half tables are widened once per call. Deterministic.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hash_encode import PRIMES, HashLayout
from ._launch import array, as_float32, jit, launch
from ._vector import add_to, dot, lerp, load, load_column, scale, store_column

BLOCK = 128  # points whose rows and fractions are held at a time: they stay in the first-level cache
CHUNK = 16384  # points per task
PRIME_Y, PRIME_Z = np.uint32(PRIMES[1]), np.uint32(PRIMES[2])
ONE = np.uint32(1)


class _Levels(NamedTuple):
    """The layout as arrays, one element per level."""

    scales: np.ndarray  # float32
    nodes: np.ndarray  # uint32
    offsets: np.ndarray  # int64
    sizes: np.ndarray  # int64
    hashed: np.ndarray  # bool


@functools.lru_cache(maxsize=64)
def _levels(layout: HashLayout) -> _Levels:
    levels = layout.levels
    return _Levels(
        np.array([level.scale for level in levels], np.float32),
        np.array([level.nodes for level in levels], np.uint32),
        np.array([level.offset for level in levels], np.int64),
        np.array([level.size for level in levels], np.int64),
        np.array([level.hashed for level in levels], np.bool_),
    )


@jit(exact=True)
def _prepare(first, last, positions, unit):
    """unit (3, n) = positions (n, 3) clamped; NaN becomes 0, so that no address below can leave the table."""
    for i in range(first, last):
        for axis in range(3):
            x = positions[i, axis]
            x = x if x > np.float32(0.0) else np.float32(0.0)
            unit[axis, i] = x if x < np.float32(1.0) else np.float32(1.0)


@jit()
def _find_rows(unit, start, n, levels, level, rows, fractions):
    """rows (8, BLOCK) of the level's slice and fractions (3, BLOCK) of points start ... start + n - 1."""
    size = levels.scales[level]
    for axis in range(3):
        line = unit[axis, start : start + n]
        for k in range(n):
            p = line[k] * size + np.float32(0.5)
            cell = np.int32(p)
            fractions[axis, k] = p - np.float32(cell)
            rows[axis, k] = cell
    nodes = levels.nodes[level]
    if levels.hashed[level]:
        mask = np.uint32(levels.sizes[level] - 1)
        for k in range(n):
            x0, y0, z0 = rows[0, k], np.uint32(rows[1, k] * PRIME_Y), np.uint32(rows[2, k] * PRIME_Z)
            x1, y1, z1 = np.uint32(x0 + ONE), np.uint32(y0 + PRIME_Y), np.uint32(z0 + PRIME_Z)
            a, b, c, d = np.uint32(y0 ^ z0), np.uint32(y1 ^ z0), np.uint32(y0 ^ z1), np.uint32(y1 ^ z1)
            rows[0, k], rows[1, k] = (x0 ^ a) & mask, (x1 ^ a) & mask
            rows[2, k], rows[3, k] = (x0 ^ b) & mask, (x1 ^ b) & mask
            rows[4, k], rows[5, k] = (x0 ^ c) & mask, (x1 ^ c) & mask
            rows[6, k], rows[7, k] = (x0 ^ d) & mask, (x1 ^ d) & mask
    else:
        for k in range(n):
            a = np.uint32(rows[0, k] + np.uint32(nodes * np.uint32(rows[1, k] + np.uint32(nodes * rows[2, k]))))
            b = np.uint32(a + nodes)
            c = np.uint32(a + np.uint32(nodes * nodes))
            d = np.uint32(c + nodes)
            rows[0, k], rows[1, k] = a, a + ONE
            rows[2, k], rows[3, k] = b, b + ONE
            rows[4, k], rows[5, k] = c, c + ONE
            rows[6, k], rows[7, k] = d, d + ONE


@jit()
def _encode(first, last, n_chunks, unit, table, levels, lanes, out):
    """Tasks first ... last - 1, of which task level * n_chunks + chunk writes out[level's features, chunk's points]."""
    rows, fractions = np.empty((8, BLOCK), np.uint32), np.empty((3, BLOCK), np.float32)
    n_points, features = unit.shape[1], len(lanes)
    for task in range(first, last):
        level, chunk = task // n_chunks, task % n_chunks
        own = table[levels.offsets[level] :]
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n_points), BLOCK):
            n = min(BLOCK, n_points - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            target = out[level * features : (level + 1) * features, start:]
            for k in range(n):
                fx, fy, fz = fractions[0, k], fractions[1, k], fractions[2, k]
                a = lerp(load(own, rows[0, k], lanes), load(own, rows[1, k], lanes), fx)
                b = lerp(load(own, rows[2, k], lanes), load(own, rows[3, k], lanes), fx)
                c = lerp(load(own, rows[4, k], lanes), load(own, rows[5, k], lanes), fx)
                d = lerp(load(own, rows[6, k], lanes), load(own, rows[7, k], lanes), fx)
                store_column(target, k, lerp(lerp(a, b, fy), lerp(c, d, fy), fz))


@jit()
def _scatter(first, last, n_used, unit, grad, levels, lanes, clear, table_grad):
    """Tasks first ... last - 1, of which task t adds the part of level n_levels - 1 - t to the table's gradient."""
    rows, fractions = np.empty((8, BLOCK), np.uint32), np.empty((3, BLOCK), np.float32)
    features, one = len(lanes), np.float32(1.0)
    for task in range(first, last):
        level = levels.scales.shape[0] - 1 - task
        own = table_grad[levels.offsets[level] : levels.offsets[level] + levels.sizes[level]]
        if clear:
            own[:] = np.float32(0.0)
        for start in range(0, n_used, BLOCK):
            n = min(BLOCK, n_used - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            source = grad[level * features : (level + 1) * features, start:]
            for k in range(n):
                g = load_column(source, k, lanes)
                fx, fy, fz = fractions[0, k], fractions[1, k], fractions[2, k]
                g0, g1, ey, ez = scale(g, one - fx), scale(g, fx), one - fy, one - fz
                a, b, c, d = ey * ez, fy * ez, ey * fz, fy * fz
                add_to(own, rows[0, k], scale(g0, a))
                add_to(own, rows[1, k], scale(g1, a))
                add_to(own, rows[2, k], scale(g0, b))
                add_to(own, rows[3, k], scale(g1, b))
                add_to(own, rows[4, k], scale(g0, c))
                add_to(own, rows[5, k], scale(g1, c))
                add_to(own, rows[6, k], scale(g0, d))
                add_to(own, rows[7, k], scale(g1, d))


@jit()
def _slope(first, last, positions, unit, table, grad, levels, lanes, out):
    """out (n, 3), zeroed before, += the gradient to points first ... last - 1, from all levels."""
    rows, fractions = np.empty((8, BLOCK), np.uint32), np.empty((3, BLOCK), np.float32)
    features, zero, one = len(lanes), np.float32(0.0), np.float32(1.0)
    for level in range(levels.scales.shape[0]):
        own, size = table[levels.offsets[level] :], levels.scales[level]
        for start in range(first, last, BLOCK):
            n = min(BLOCK, last - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            source = grad[level * features : (level + 1) * features, start:]
            for k in range(n):
                g = load_column(source, k, lanes)
                s0, s1 = dot(g, load(own, rows[0, k], lanes)), dot(g, load(own, rows[1, k], lanes))
                s2, s3 = dot(g, load(own, rows[2, k], lanes)), dot(g, load(own, rows[3, k], lanes))
                s4, s5 = dot(g, load(own, rows[4, k], lanes)), dot(g, load(own, rows[5, k], lanes))
                s6, s7 = dot(g, load(own, rows[6, k], lanes)), dot(g, load(own, rows[7, k], lanes))
                fx, fy, fz = fractions[0, k], fractions[1, k], fractions[2, k]
                ex, ey, ez = one - fx, one - fy, one - fz
                i = start + k
                out[i, 0] += size * (ez * (ey * (s1 - s0) + fy * (s3 - s2)) + fz * (ey * (s5 - s4) + fy * (s7 - s6)))
                out[i, 1] += size * (ez * (ex * (s2 - s0) + fx * (s3 - s1)) + fz * (ex * (s6 - s4) + fx * (s7 - s5)))
                out[i, 2] += size * (ey * (ex * (s4 - s0) + fx * (s5 - s1)) + fy * (ex * (s6 - s2) + fx * (s7 - s3)))
    for i in range(first, last):
        for axis in range(3):
            if not (positions[i, axis] >= zero and positions[i, axis] <= one):
                out[i, axis] = zero


class _HashEncode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positions: Tensor, table: Tensor, layout: HashLayout) -> Tensor:
        n, lanes = positions.shape[0], (0,) * layout.n_features
        source = as_float32("positions", positions).detach().numpy()
        unit = torch.empty(3, n)
        launch(_prepare, n, 4 * CHUNK, source, unit.numpy())
        out = torch.empty(layout.n_outputs, n)
        n_chunks = -(-n // CHUNK)
        wide = array(as_float32("table", table))
        launch(
            _encode, layout.n_levels * n_chunks, 1, n_chunks, unit.numpy(), wide, _levels(layout), lanes, out.numpy()
        )
        ctx.save_for_backward(positions, table, unit)
        ctx.layout = layout
        return out.t().to(table.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        positions, table, unit = ctx.saved_tensors
        layout, n = ctx.layout, positions.shape[0]
        levels, lanes = _levels(layout), (0,) * layout.n_features
        columns = array(grad.float().t())
        grad_positions = grad_table = None
        if ctx.needs_input_grad[1]:
            wide = torch.empty(layout.n_entries, layout.n_features)
            launch(_scatter, layout.n_levels, 1, n, unit.numpy(), columns, levels, lanes, True, wide.numpy())
            grad_table = wide.to(table.dtype)
        if ctx.needs_input_grad[0]:
            wide = torch.zeros(n, 3)
            source = positions.detach().float().numpy()
            rows = array(table.float())
            launch(_slope, n, CHUNK // 4, source, unit.numpy(), rows, columns, levels, lanes, wide.numpy())
            grad_positions = wide.to(positions.dtype)
        return grad_positions, grad_table, None  # positions, table, layout


def hash_encode(positions: Tensor, table: Tensor, layout: HashLayout) -> Tensor:
    return _HashEncode.apply(positions, table, layout)
