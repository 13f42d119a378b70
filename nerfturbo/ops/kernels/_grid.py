"""The arithmetic of the hash grid that its kernels share: cells, table rows, level constants on the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hash_encode import HashLayout


@functools.lru_cache(maxsize=64)
def level_constants(layout: HashLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """(n_levels, 4) int32: first row / 8, nodes, mask of a hashed level (-1: dense), unused; (n_levels,) fp32 scales.

    Rows start at multiples of 8, so the first row stays in 32 bits however large the table is.
    """
    rows = [(lv.offset // 8, lv.nodes, lv.size - 1 if lv.hashed else -1, 0) for lv in layout.levels]
    constants = torch.tensor(rows, dtype=torch.int32).to(device)
    return constants, torch.tensor([lv.scale for lv in layout.levels], dtype=torch.float32).to(device)


@triton.jit
def clamp_unit(x):
    """x in [0, 1]; NaN becomes 0, so that addresses stay inside the table."""
    return tl.where(x > 0.0, tl.where(x < 1.0, x, 1.0), 0.0)


@triton.jit
def cell_of(x, scale):
    """Cell and fraction of a coordinate along one axis."""
    p = clamp_unit(x) * scale + 0.5
    cell = p.to(tl.int32)  # p >= 0.5, so truncation is floor
    return cell, p - cell.to(tl.float32)


@triton.jit
def load_point(p_positions, i, m, stride_n, stride_c):
    """x, y, z of the rows `i`: fp32 blocks of i's shape."""
    p = p_positions + i.to(tl.int64) * stride_n
    x = tl.load(p, mask=m, other=0.0)
    y = tl.load(p + stride_c, mask=m, other=0.0)
    z = tl.load(p + 2 * stride_c, mask=m, other=0.0)
    return x, y, z


@triton.jit
def row_of(x, y, z, nodes, hash_mask):
    """Row of a node within its level; 32-bit products wrap, which the mask of a hashed level makes exact."""
    if hash_mask >= 0:
        row = (x ^ (y * -1640531535) ^ (z * 805459861)) & hash_mask
    else:
        row = x + nodes * (y + nodes * z)
    return row


@triton.jit
def load_level(p_levels, p_scales, i_level):
    """First row (int64), nodes, hash mask and scale of a level."""
    p = p_levels + i_level * 4
    return tl.load(p).to(tl.int64) * 8, tl.load(p + 1), tl.load(p + 2), tl.load(p_scales + i_level)


@triton.jit
def used_rows(p_used, n):
    """min(n, device count), or n where there is no count."""
    if p_used is not None:
        n = tl.minimum(tl.load(p_used), n)
    return n
