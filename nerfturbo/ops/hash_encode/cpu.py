"""Hash encoding: eight look-ups per level and point, blended; and the scatter of their gradients.

Positions are clamped and stored (3, n) once; the encoding and its gradient are stored (levels * features, n) and handed
out transposed, so that a level's slice of the table stays in a core's cache while all points pass through it. A block
of points first gets its table rows and fractions, which compiles to vector instructions; then each point loads its
eight rows as vectors of n_features. Forward: a task = one level and a chunk of points. Backward to the table: a task =
one level, whose slice nobody else touches, the slowest first. Backward to positions: a task = a chunk of points. fp32
inside; half tables are widened once per call. Deterministic.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._cpu import as_float32, jit, launch
from .._cpu.vector import add_to, dot, lerp, load, load_column, multiply_add, scale, store_column, total, zeros
from .._sink import Node
from . import PRIMES, HashLayout

BLOCK = 128  # points whose rows and fractions are held at a time: they stay in the first-level cache
CHUNK = 16384  # points per task
PRIME_Y, PRIME_Z = np.uint32(PRIMES[1]), np.uint32(PRIMES[2])
ONE, HALF = np.uint32(1), np.float32(0.5)


class _Levels(NamedTuple):
    """The layout as arrays, one element per level."""

    scales: np.ndarray  # float32
    nodes: np.ndarray  # uint32
    offsets: np.ndarray  # int64
    sizes: np.ndarray  # int64
    hashed: np.ndarray  # bool


@functools.lru_cache(maxsize=64)
def _levels(layout: HashLayout) -> _Levels:
    columns = zip(*((lv.scale, lv.nodes, lv.offset, lv.size, lv.hashed) for lv in layout.levels), strict=True)
    types = (np.float32, np.uint32, np.int64, np.int64, np.bool_)
    return _Levels(*(np.array(column, kind) for column, kind in zip(columns, types, strict=True)))


@jit(exact=True)
def _prepare(first, last, positions, unit):
    """unit (3, n) = positions (n, 3) clamped; NaN becomes 0, so that no address below can leave the table."""
    for i in range(first, last):
        for axis in range(3):
            x = positions[i, axis]
            x = x if x > np.float32(0.0) else np.float32(0.0)
            unit[axis, i] = x if x < np.float32(1.0) else np.float32(1.0)


@jit(inline=True)
def _hash(x, yz, mask):
    return np.uint32(np.uint32(x ^ yz) & mask)


@jit(inner=True)
def _find_rows(unit, start, n, levels, level, rows, fractions):
    """Of points start ... start + n - 1: rows[c * BLOCK + k] in the level's slice, fractions[axis * BLOCK + k]. Scratch
    of a constant layout and a cast after every operation: only so does the compiler see vectors of 32 bits."""
    size, nodes, mask = levels.scales[level], levels.nodes[level], np.uint32(levels.sizes[level] - 1)
    xs, ys, zs = unit[0, start : start + n], unit[1, start : start + n], unit[2, start : start + n]
    hashed, plane = levels.hashed[level], np.uint32(nodes * nodes)
    for k in range(n):
        px, py, pz = xs[k] * size + HALF, ys[k] * size + HALF, zs[k] * size + HALF
        ix, iy, iz = np.int32(px), np.int32(py), np.int32(pz)
        fractions[k] = px - np.float32(ix)
        fractions[BLOCK + k] = py - np.float32(iy)
        fractions[2 * BLOCK + k] = pz - np.float32(iz)
        x0, y0, z0 = np.uint32(ix), np.uint32(iy), np.uint32(iz)
        x1 = np.uint32(x0 + ONE)
        if hashed:
            y0, z0 = np.uint32(y0 * PRIME_Y), np.uint32(z0 * PRIME_Z)
            y1, z1 = np.uint32(y0 + PRIME_Y), np.uint32(z0 + PRIME_Z)
            a, b, c, d = np.uint32(y0 ^ z0), np.uint32(y1 ^ z0), np.uint32(y0 ^ z1), np.uint32(y1 ^ z1)
            rows[k], rows[BLOCK + k] = _hash(x0, a, mask), _hash(x1, a, mask)
            rows[2 * BLOCK + k], rows[3 * BLOCK + k] = _hash(x0, b, mask), _hash(x1, b, mask)
            rows[4 * BLOCK + k], rows[5 * BLOCK + k] = _hash(x0, c, mask), _hash(x1, c, mask)
            rows[6 * BLOCK + k], rows[7 * BLOCK + k] = _hash(x0, d, mask), _hash(x1, d, mask)
        else:
            a = np.uint32(np.uint32(y0 * nodes) + np.uint32(z0 * plane))
            b, c = np.uint32(a + nodes), np.uint32(a + plane)
            d = np.uint32(b + plane)
            rows[k], rows[BLOCK + k] = np.uint32(x0 + a), np.uint32(x1 + a)
            rows[2 * BLOCK + k], rows[3 * BLOCK + k] = np.uint32(x0 + b), np.uint32(x1 + b)
            rows[4 * BLOCK + k], rows[5 * BLOCK + k] = np.uint32(x0 + c), np.uint32(x1 + c)
            rows[6 * BLOCK + k], rows[7 * BLOCK + k] = np.uint32(x0 + d), np.uint32(x1 + d)


@jit()
def _encode(first, last, n_chunks, unit, table, levels, lanes, out):
    """Tasks first ... last - 1, of which task level * n_chunks + chunk writes out[level's features, chunk's points]."""
    rows, fractions = np.empty(8 * BLOCK, np.uint32), np.empty(3 * BLOCK, np.float32)
    n_points, features = unit.shape[1], len(lanes)
    for task in range(first, last):
        level, chunk = task // n_chunks, task % n_chunks
        own = table[levels.offsets[level] :]
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, n_points), BLOCK):
            n = min(BLOCK, n_points - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            target = out[level * features : (level + 1) * features, start:]
            for k in range(n):
                fx, fy, fz = fractions[k], fractions[BLOCK + k], fractions[2 * BLOCK + k]
                a = lerp(load(own, rows[k], lanes), load(own, rows[BLOCK + k], lanes), fx)
                b = lerp(load(own, rows[2 * BLOCK + k], lanes), load(own, rows[3 * BLOCK + k], lanes), fx)
                c = lerp(load(own, rows[4 * BLOCK + k], lanes), load(own, rows[5 * BLOCK + k], lanes), fx)
                d = lerp(load(own, rows[6 * BLOCK + k], lanes), load(own, rows[7 * BLOCK + k], lanes), fx)
                store_column(target, k, lerp(lerp(a, b, fy), lerp(c, d, fy), fz))


@jit()
def _scatter(first, last, end, n_used, unit, grad, levels, lanes, clear, table_grad, checks):
    """Tasks first ... last - 1, of which task t adds the part of level end - 1 - t to the table's gradient.
    checks[level] becomes 0, or NaN where a gradient is not finite."""
    rows, fractions = np.empty(8 * BLOCK, np.uint32), np.empty(3 * BLOCK, np.float32)
    features, zero, one = len(lanes), np.float32(0.0), np.float32(1.0)
    for task in range(first, last):
        level = end - 1 - task
        own = table_grad[levels.offsets[level] : levels.offsets[level] + levels.sizes[level]]
        if clear:
            own[:] = zero
        check = zeros(lanes)
        for start in range(0, n_used, BLOCK):
            n = min(BLOCK, n_used - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            source = grad[level * features : (level + 1) * features, start:]
            for k in range(n):
                g = load_column(source, k, lanes)
                check = multiply_add(check, g, zero)
                fx, fy, fz = fractions[k], fractions[BLOCK + k], fractions[2 * BLOCK + k]
                g0, g1, ey, ez = scale(g, one - fx), scale(g, fx), one - fy, one - fz
                a, b, c, d = ey * ez, fy * ez, ey * fz, fy * fz
                add_to(own, rows[k], scale(g0, a))
                add_to(own, rows[BLOCK + k], scale(g1, a))
                add_to(own, rows[2 * BLOCK + k], scale(g0, b))
                add_to(own, rows[3 * BLOCK + k], scale(g1, b))
                add_to(own, rows[4 * BLOCK + k], scale(g0, c))
                add_to(own, rows[5 * BLOCK + k], scale(g1, c))
                add_to(own, rows[6 * BLOCK + k], scale(g0, d))
                add_to(own, rows[7 * BLOCK + k], scale(g1, d))
        checks[level] = total(check)


@jit()
def _slope(first, last, positions, unit, table, grad, levels, lanes, out):
    """out (n, 3), zeroed before, += the gradient to points first ... last - 1, from all levels."""
    rows, fractions = np.empty(8 * BLOCK, np.uint32), np.empty(3 * BLOCK, np.float32)
    features, zero, one = len(lanes), np.float32(0.0), np.float32(1.0)
    for level in range(levels.scales.shape[0]):
        own, size = table[levels.offsets[level] :], levels.scales[level]
        for start in range(first, last, BLOCK):
            n = min(BLOCK, last - start)
            _find_rows(unit, start, n, levels, level, rows, fractions)
            source = grad[level * features : (level + 1) * features, start:]
            for k in range(n):
                g = load_column(source, k, lanes)
                s0, s1 = dot(g, load(own, rows[k], lanes)), dot(g, load(own, rows[BLOCK + k], lanes))
                s2, s3 = dot(g, load(own, rows[2 * BLOCK + k], lanes)), dot(g, load(own, rows[3 * BLOCK + k], lanes))
                s4, s5 = dot(g, load(own, rows[4 * BLOCK + k], lanes)), dot(g, load(own, rows[5 * BLOCK + k], lanes))
                s6, s7 = dot(g, load(own, rows[6 * BLOCK + k], lanes)), dot(g, load(own, rows[7 * BLOCK + k], lanes))
                fx, fy, fz = fractions[k], fractions[BLOCK + k], fractions[2 * BLOCK + k]
                ex, ey, ez = one - fx, one - fy, one - fz
                i = start + k
                out[i, 0] += size * (ez * (ey * (s1 - s0) + fy * (s3 - s2)) + fz * (ey * (s5 - s4) + fy * (s7 - s6)))
                out[i, 1] += size * (ez * (ex * (s2 - s0) + fx * (s3 - s1)) + fz * (ex * (s6 - s4) + fx * (s7 - s5)))
                out[i, 2] += size * (ey * (ex * (s4 - s0) + fx * (s5 - s1)) + fy * (ex * (s6 - s2) + fx * (s7 - s3)))
    for i in range(first, last):
        for axis in range(3):
            if not (positions[i, axis] >= zero and positions[i, axis] <= one):
                out[i, axis] = zero


def encode(positions: Tensor, table: Tensor, layout: HashLayout, unit: Tensor, out: Tensor) -> None:
    """Write the clamped positions to unit (3, n) and their features to out (n_outputs, >= n). fp32, no gradient."""
    n = unit.shape[1]
    n_chunks, lanes = -(-n // CHUNK), (0,) * layout.n_features
    launch(_prepare, n, 4 * CHUNK, positions.detach().numpy(), unit)
    launch(_encode, layout.n_levels * n_chunks, 1, n_chunks, unit, table, _levels(layout), lanes, out)


class _HashEncode(Node):
    @staticmethod
    def forward(ctx, positions, table, values, layout, n_used, sink) -> Tensor:
        unit, out = torch.empty(3, n_used), torch.empty(layout.n_outputs, positions.shape[0])
        out[:, n_used:] = 0.0
        encode(as_float32("positions", positions), as_float32("table", values), layout, unit, out)
        ctx.save_for_backward(positions, values, unit)
        ctx.layout, ctx.n_used, ctx.sink, ctx.dtype = layout, n_used, sink, table.dtype
        return out.t().to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, values, unit = ctx.saved_tensors
        layout, n_used, sink = ctx.layout, ctx.n_used, ctx.sink
        levels, lanes = _levels(layout), (0,) * layout.n_features
        columns = grad.float().t().contiguous()
        to_positions = to_table = None
        if ctx.needs_input_grad[1]:
            buffer = None if sink is None or sink.buffers[0].dtype != torch.float32 else sink.buffers[0]
            target = torch.empty(layout.n_entries, layout.n_features) if buffer is None else buffer
            checks, clear = np.zeros(layout.n_levels, np.float32), buffer is None

            def add(first_row: int, last_row: int) -> None:
                first, last = layout.levels_of(first_row, last_row)
                launch(_scatter, last - first, 1, last, n_used, unit, columns, levels, lanes, clear, target, checks)
                if sink is not None:
                    sink.take((target,) if clear else (), finite=bool(np.isfinite(checks).all()))

            add(0, layout.n_entries) if sink is None or clear else sink.add(add)
            to_table = target.to(ctx.dtype) if sink is None else None
        if ctx.needs_input_grad[0]:
            wide = torch.zeros(positions.shape[0], 3)
            source, rows = positions.detach().float().numpy(), values.float()
            launch(_slope, n_used, CHUNK // 4, source, unit, rows, columns, levels, lanes, wide)
            to_positions = wide.to(positions.dtype)
        return to_positions, to_table


def hash_encode(positions, table, layout, *, half=None, sink=None, n_used=None) -> Tensor:
    used = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    return _HashEncode.apply(positions, table, table.detach() if half is None else half, layout, used, sink)
