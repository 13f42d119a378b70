"""Sparse voxels on a GPU: the eight corners of each position, blended; density and colour in one pass.

Forward: one program = BLOCK positions. A corner's row comes from two dependent loads, the block's number and the node's
row in it; rows of the colour table are loaded as [BLOCK, PC] tiles. Backward to the tables: the same walk, each
corner's share added by atomics, nothing at all for positions without a gradient. Backward to positions and basis: a
third kernel, only where asked for.

dtypes: positions fp32; colour table fp16, bf16 or fp32; density table, weights and sums fp32. Table gradients are not
deterministic; under torch.use_deterministic_algorithms the reference computes them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _triton as gpu
from .._sink import Node
from .._triton import cdiv, check_kernel_float, launchable, next_power_of_2
from . import VoxelIndex, blocks_per_axis, reference

BLOCK, WARPS = 64, 4
DENSITY_BLOCK = 256


@triton.jit
def node_row(p_blocks, p_rows, x, y, z, side, m):
    """Rows of nodes, int32; -1 where one is not stored."""
    block = tl.load(p_blocks + ((x >> 3) * side + (y >> 3)) * side + (z >> 3), mask=m, other=-1)
    local = ((x & 7) << 6) | ((y & 7) << 3) | (z & 7)
    return tl.load(p_rows + block.to(tl.int64) * 512 + local, mask=m & (block >= 0), other=-1)


@triton.jit
def _cell(x, resolution):
    """Voxel and fraction along an axis."""
    p = gpu.clamp_unit(x) * resolution.to(tl.float32)
    cell = tl.minimum(p.to(tl.int32), resolution - 1)
    return cell, p - cell.to(tl.float32)


@triton.jit
def _locate(p_positions, i, m, stride_xn, stride_xc, resolution):
    x, y, z = gpu.load_point(p_positions, i, m, stride_xn, stride_xc)
    ix, fx = _cell(x, resolution)
    iy, fy = _cell(y, resolution)
    iz, fz = _cell(z, resolution)
    return ix, iy, iz, fx, fy, fz


@triton.jit
def _corner(p_blocks, p_rows, cell, side, m, C: tl.constexpr):
    """Row of corner C of a voxel, and its weight."""
    row = node_row(p_blocks, p_rows, cell[0] + (C & 1), cell[1] + ((C >> 1) & 1), cell[2] + (C >> 2), side, m)
    fx, fy, fz = cell[3], cell[4], cell[5]
    return row, (fx if C & 1 else 1.0 - fx) * (fy if C & 2 else 1.0 - fy) * (fz if C & 4 else 1.0 - fz)


@triton.jit
def _load_basis(p_basis, p_rays, i, m, K: tl.constexpr, PC: tl.constexpr):
    """[BLOCK, PC]: the basis function of each column of a colour row, zero for the padding; and the rays."""
    j = tl.arange(0, PC)
    ray = tl.load(p_rays + i, mask=m, other=0).to(tl.int64)
    p = p_basis + (ray * K)[:, None] + (j % K)[None, :]
    return tl.load(p, mask=m[:, None] & (j < 3 * K)[None, :], other=0.0).to(tl.float32), ray


@triton.jit
def _load_colors(p_color, row, here, C: tl.constexpr, PC: tl.constexpr):
    j = tl.arange(0, PC)
    p = p_color + (row.to(tl.int64) * C)[:, None] + j[None, :]
    return tl.load(p, mask=here[:, None] & (j < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_gradient(p_grad, i, m, stride_gn, stride_gc):
    p = p_grad + i.to(tl.int64) * stride_gn
    red = tl.load(p, mask=m, other=0.0).to(tl.float32)
    green = tl.load(p + stride_gc, mask=m, other=0.0).to(tl.float32)
    blue = tl.load(p + 2 * stride_gc, mask=m, other=0.0).to(tl.float32)
    density = tl.load(p + 3 * stride_gc, mask=m, other=0.0).to(tl.float32)
    return red, green, blue, density


@triton.jit
def _spread_colors(red, green, blue, K: tl.constexpr, PC: tl.constexpr):
    """[BLOCK, PC]: to each column the number of its colour, zero to the padding."""
    channel = (tl.arange(0, PC) // K)[None, :]
    value = tl.where(channel == 0, red[:, None], tl.where(channel == 1, green[:, None], blue[:, None]))
    return tl.where(channel < 3, value, 0.0)


@launchable(do_not_specialize=["n", "resolution", "side"])
def _forward_kernel(
    p_positions, p_basis, p_rays, p_density, p_color, p_blocks, p_rows, p_out, p_used, n, resolution, side, empty,
    stride_xn, stride_xc, K: tl.constexpr, C: tl.constexpr, PC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_used = gpu.used_rows(p_used, n)
    m = i < n_used
    density = tl.zeros([BLOCK], tl.float32)
    b_color = tl.zeros([BLOCK, PC], tl.float32)
    if tl.program_id(0) * BLOCK < n_used:
        cell = _locate(p_positions, i, m, stride_xn, stride_xc, resolution)
        for c in tl.static_range(8):
            row, w = _corner(p_blocks, p_rows, cell, side, m, c)
            here = row >= 0
            thick = tl.load(p_density + row, mask=here, other=0.0).to(tl.float32)
            density += w * tl.where(here, thick, empty)
            b_color += w[:, None] * _load_colors(p_color, row, here, C, PC)
        b_basis, _ray = _load_basis(p_basis, p_rays, i, m, K, PC)
        b_color *= b_basis
    m_row = i < n  # rows past the used ones become zero
    channel = (tl.arange(0, PC) // K)[None, :]
    for k in tl.static_range(3):
        tl.store(p_out + k * n.to(tl.int64) + i, tl.sum(tl.where(channel == k, b_color, 0.0), 1), mask=m_row)
    tl.store(p_out + 3 * n.to(tl.int64) + i, tl.where(m, density, 0.0), mask=m_row)


@launchable(do_not_specialize=["n", "resolution", "side", "stride_xn", "stride_xc"])  # one binary for all who ask
def _density_kernel(
    p_positions, p_density, p_blocks, p_rows, p_out, p_used, n, resolution, side, empty, stride_xn, stride_xc,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_used = gpu.used_rows(p_used, n)
    m = i < n_used
    density = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(0) * BLOCK < n_used:
        cell = _locate(p_positions, i, m, stride_xn, stride_xc, resolution)
        for c in tl.static_range(8):
            row, w = _corner(p_blocks, p_rows, cell, side, m, c)
            thick = tl.load(p_density + row, mask=row >= 0, other=0.0).to(tl.float32)
            density += w * tl.where(row >= 0, thick, empty)
    tl.store(p_out + i, tl.where(m, density, 0.0), mask=i < n)


@launchable(do_not_specialize=["n", "resolution", "side"])
def _backward_kernel(
    p_positions, p_basis, p_rays, p_grad, p_blocks, p_rows, p_ddensity, p_dcolor, p_found_inf, p_used,
    n, resolution, side, stride_xn, stride_xc, stride_gn, stride_gc,
    K: tl.constexpr, C: tl.constexpr, PC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_used = gpu.used_rows(p_used, n)
    if tl.program_id(0) * BLOCK >= n_used:
        return
    i, m = gpu.own_block(n_used, BLOCK)
    red, green, blue, thick = _load_gradient(p_grad, i, m, stride_gn, stride_gc)
    if p_found_inf is not None:
        total = tl.abs(red) + tl.abs(green) + tl.abs(blue) + tl.abs(thick)
        bad = (total != total) | (total == float("inf"))
        tl.store(p_found_inf + i * 0, tl.full([BLOCK], 1.0, tl.float32), mask=bad)
    m = m & ((red != 0.0) | (green != 0.0) | (blue != 0.0) | (thick != 0.0))
    cell = _locate(p_positions, i, m, stride_xn, stride_xc, resolution)
    b_basis, _ray = _load_basis(p_basis, p_rays, i, m, K, PC)
    b_grad = _spread_colors(red, green, blue, K, PC) * b_basis
    j = tl.arange(0, PC)
    for c in tl.static_range(8):
        row, w = _corner(p_blocks, p_rows, cell, side, m, c)
        here = row >= 0
        tl.atomic_add(p_ddensity + row, w * thick, mask=here, sem="relaxed")
        # The padding column takes part, with zero: leaving it out would break the vectors.
        p = p_dcolor + (row.to(tl.int64) * C)[:, None] + j[None, :]
        tl.atomic_add(p, w[:, None] * b_grad, mask=here[:, None] & (j < C)[None, :], sem="relaxed")


@launchable(do_not_specialize=["n", "resolution", "side"])
def _inputs_kernel(
    p_positions, p_basis, p_rays, p_grad, p_density, p_color, p_blocks, p_rows, p_out, p_dbasis, p_used,
    n, resolution, side, empty, stride_xn, stride_xc, stride_gn, stride_gc,
    K: tl.constexpr, C: tl.constexpr, PC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, m = gpu.own_block(gpu.used_rows(p_used, n), BLOCK)
    red, green, blue, thick = _load_gradient(p_grad, i, m, stride_gn, stride_gc)
    cell = _locate(p_positions, i, m, stride_xn, stride_xc, resolution)
    b_basis, ray = _load_basis(p_basis, p_rays, i, m, K, PC)
    b_spread = _spread_colors(red, green, blue, K, PC)
    b_grad = b_spread * b_basis
    b_color = tl.zeros([BLOCK, PC], tl.float32)
    gx = tl.zeros([BLOCK], tl.float32)
    gy, gz = gx, gx
    for c in tl.static_range(8):
        row, w = _corner(p_blocks, p_rows, cell, side, m, c)
        here = row >= 0
        b_row = _load_colors(p_color, row, here, C, PC)
        b_color += w[:, None] * b_row
        value = tl.where(here, tl.load(p_density + row, mask=here, other=0.0).to(tl.float32), empty)
        dot = tl.sum(b_grad * b_row, 1) + thick * value
        gx, gy, gz = gpu.add_slopes(gx, gy, gz, dot, cell[3], cell[4], cell[5], c)
    x, y, z = gpu.load_point(p_positions, i, m, stride_xn, stride_xc)
    size = resolution.to(tl.float32)
    gpu.store_slopes(p_out, i, n, m, x, y, z, gx * size, gy * size, gz * size)
    if p_dbasis is not None:
        j = tl.arange(0, PC)
        p = p_dbasis + (ray * K)[:, None] + (j % K)[None, :]
        tl.atomic_add(p, b_spread * b_color, mask=m[:, None] & (j < 3 * K)[None, :], sem="relaxed")


def _shape(n_basis: int, color: Tensor) -> dict[str, int]:
    return {"K": n_basis, "C": color.shape[1], "PC": next_power_of_2(color.shape[1]), "BLOCK": BLOCK}


def _structure(index: VoxelIndex) -> dict[str, Any]:
    side = blocks_per_axis(index.resolution)
    return {"p_blocks": index.blocks, "p_rows": index.rows, "resolution": index.resolution, "side": side}


class _VoxelLookup(Node):
    @staticmethod
    def forward(ctx, positions, basis, density, color, rays, half, index, n_used, sink) -> Tensor:
        n, source = positions.shape[0], color if half is None else half
        out = torch.empty(4, n, dtype=torch.float32, device=positions.device)
        if n:
            _forward_kernel[(cdiv(n, BLOCK),)](
                p_positions=positions, p_basis=basis, p_rays=rays, p_density=density, p_color=source, p_out=out,
                p_used=n_used, n=n, empty=index.empty, stride_xn=positions.stride(0), stride_xc=positions.stride(1),
                **_structure(index), **_shape(basis.shape[1], source), num_warps=WARPS,
            )  # fmt: skip
        ctx.save_for_backward(positions, basis, density, source, rays, n_used)
        ctx.index, ctx.sink, ctx.dtypes = index, sink, (density.dtype, color.dtype)
        return out.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, basis, density, source, rays, n_used = ctx.saved_tensors
        to_positions = to_basis = to_density = to_color = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            zeros = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (density, source))
            buffers, found_inf = (tuple(zeros), None) if ctx.sink is None else (ctx.sink.buffers, ctx.sink.found_inf)
            if grad.shape[0]:
                _backward_kernel[(cdiv(grad.shape[0], BLOCK),)](
                    p_ddensity=buffers[0], p_dcolor=buffers[1], p_found_inf=found_inf, **_shared(ctx, grad)
                )
            if ctx.sink is None:
                to_density, to_color = (b.to(dtype) for b, dtype in zip(buffers, ctx.dtypes, strict=True))
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            wide = torch.empty(3, grad.shape[0], dtype=torch.float32, device=grad.device)
            per_ray = torch.zeros_like(basis, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            if grad.shape[0]:
                _inputs_kernel[(cdiv(grad.shape[0], BLOCK),)](
                    p_density=density, p_color=source, p_out=wide, p_dbasis=per_ray, empty=ctx.index.empty,
                    **_shared(ctx, grad),
                )  # fmt: skip
            to_positions = wide.t().to(positions.dtype)
            to_basis = None if per_ray is None else per_ray.to(basis.dtype)
        return to_positions, to_basis, to_density, to_color


def _shared(ctx: Any, grad: Tensor) -> dict[str, Any]:
    """Arguments of both backward kernels."""
    positions, basis, _, source, rays, n_used = ctx.saved_tensors
    return {
        "p_positions": positions, "p_basis": basis, "p_rays": rays, "p_grad": grad, "p_used": n_used,
        "n": positions.shape[0], "stride_xn": positions.stride(0), "stride_xc": positions.stride(1),
        "stride_gn": grad.stride(0), "stride_gc": grad.stride(1), "num_warps": WARPS,
        **_structure(ctx.index), **_shape(basis.shape[1], source),
    }  # fmt: skip


def voxel_lookup(positions, basis, ray_indices, tables, index, *, half=None, sink=None, n_used=None) -> Tensor:
    check_kernel_float(positions=positions, basis=basis, half=half, **tables._asdict())
    if torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled():
        options = {"half": half, "sink": sink, "n_used": n_used}
        return reference.voxel_lookup(positions, basis, ray_indices, tables, index, **options)
    density, color = (table.contiguous() for table in tables)
    half = None if half is None else half.detach().contiguous()
    rays, wide = ray_indices.contiguous(), basis.contiguous()
    return _VoxelLookup.apply(positions.float(), wide, density, color, rays, half, index, n_used, sink)


def voxel_density(positions: Tensor, density: Tensor, index: VoxelIndex, *, n_used: Tensor | None = None) -> Tensor:
    check_kernel_float(positions=positions, density=density)
    positions, n = positions.float(), positions.shape[0]
    out = torch.empty(n, dtype=torch.float32, device=positions.device)
    if n:
        _density_kernel[(cdiv(n, DENSITY_BLOCK),)](
            p_positions=positions, p_density=density.contiguous(), p_out=out, p_used=n_used, n=n, empty=index.empty,
            stride_xn=positions.stride(0), stride_xc=positions.stride(1), **_structure(index),
            BLOCK=DENSITY_BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out
