"""Total variation of sparse voxels in Triton.

One program = BLOCK chosen nodes with all their channels, [BLOCK, PC] tiles of a node and its three next ones. The value
is a sum per program, added up in order: deterministic. The gradient goes out by atomics into fp32 buffers; under
torch.use_deterministic_algorithms the reference computes it. Tables fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sink import GradientSink, redirect
from ..reference import voxel_variation as reference
from ..voxel_lookup import VoxelIndex, VoxelTables, blocks_per_axis
from ._common import CompileCase, check_kernel_float
from ._launch import cdiv, launchable, next_power_of_2
from .voxel_lookup import node_row

BLOCK, WARPS = 32, 4


@triton.jit
def _neighbours(p_chosen, p_nodes, p_blocks, p_rows, n, resolution, side, BLOCK: tl.constexpr):
    """Row of each node of the block, and those of its next nodes along x, y and z; -1 where there is none."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    row = tl.load(p_chosen + i, mask=m, other=0)  # int64
    node = tl.load(p_nodes + row, mask=m, other=0)
    along = resolution + 1
    x = node // (along * along)
    y = node // along % along
    z = node % along
    row_x = node_row(p_blocks, p_rows, x + 1, y, z, side, m & (x < resolution))
    row_y = node_row(p_blocks, p_rows, x, y + 1, z, side, m & (y < resolution))
    row_z = node_row(p_blocks, p_rows, x, y, z + 1, side, m & (z < resolution))
    return m, row, row_x, row_y, row_z


@triton.jit
def _rise(p_table, b_here, m, row, C: tl.constexpr, PC: tl.constexpr, CHANNELS: tl.constexpr):
    """[BLOCK, PC]: the next node's values minus these; zero where there is none."""
    j = tl.arange(0, PC)[None, :]
    m_there = (row >= 0)[:, None] & (j < CHANNELS) & m[:, None]
    b_there = tl.load(p_table + (row.to(tl.int64) * C)[:, None] + j, mask=m_there, other=0.0)
    return tl.where(m_there, b_there - b_here, 0.0)


@launchable(do_not_specialize=["n", "resolution", "side"])
def _measure_kernel(
    p_table, p_chosen, p_nodes, p_blocks, p_rows, p_out, n, resolution, side, floor,
    C: tl.constexpr, PC: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m, row, row_x, row_y, row_z = _neighbours(p_chosen, p_nodes, p_blocks, p_rows, n, resolution, side, BLOCK)
    j = tl.arange(0, PC)[None, :]
    m_here = m[:, None] & (j < CHANNELS)
    b_here = tl.load(p_table + (row * C)[:, None] + j, mask=m_here, other=0.0)
    b_x = _rise(p_table, b_here, m, row_x, C, PC, CHANNELS)
    b_y = _rise(p_table, b_here, m, row_y, C, PC, CHANNELS)
    b_z = _rise(p_table, b_here, m, row_z, C, PC, CHANNELS)
    b_root = tl.sqrt(b_x * b_x + b_y * b_y + b_z * b_z + floor * floor) - floor
    tl.store(p_out + tl.program_id(0), tl.sum(tl.sum(tl.where(m_here, b_root, 0.0), 1), 0))


@launchable(do_not_specialize=["n", "resolution", "side"])
def _spread_kernel(
    p_table, p_chosen, p_nodes, p_blocks, p_rows, p_factor, p_grad, n, resolution, side, floor,
    C: tl.constexpr, PC: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m, row, row_x, row_y, row_z = _neighbours(p_chosen, p_nodes, p_blocks, p_rows, n, resolution, side, BLOCK)
    j = tl.arange(0, PC)[None, :]
    m_here = m[:, None] & (j < CHANNELS)
    b_here = tl.load(p_table + (row * C)[:, None] + j, mask=m_here, other=0.0)
    b_x = _rise(p_table, b_here, m, row_x, C, PC, CHANNELS)
    b_y = _rise(p_table, b_here, m, row_y, C, PC, CHANNELS)
    b_z = _rise(p_table, b_here, m, row_z, C, PC, CHANNELS)
    b_scale = tl.load(p_factor) / tl.sqrt(b_x * b_x + b_y * b_y + b_z * b_z + floor * floor)
    m_row = m[:, None] & (j < C)  # with the padding, whose gradient is zero, for the vectors' sake
    p = p_grad + (row * C)[:, None] + j
    tl.atomic_add(p, -b_scale * (b_x + b_y + b_z), mask=m_row, sem="relaxed")
    m_x = m_row & (row_x >= 0)[:, None]
    tl.atomic_add(p_grad + (row_x.to(tl.int64) * C)[:, None] + j, b_scale * b_x, mask=m_x, sem="relaxed")
    m_y = m_row & (row_y >= 0)[:, None]
    tl.atomic_add(p_grad + (row_y.to(tl.int64) * C)[:, None] + j, b_scale * b_y, mask=m_y, sem="relaxed")
    m_z = m_row & (row_z >= 0)[:, None]
    tl.atomic_add(p_grad + (row_z.to(tl.int64) * C)[:, None] + j, b_scale * b_z, mask=m_z, sem="relaxed")


def _arguments(table: Tensor, channels: int, index: VoxelIndex, nodes: Tensor, chosen: Tensor) -> dict[str, Any]:
    width = 1 if table.dim() == 1 else table.shape[1]
    return {
        "p_table": table, "p_chosen": chosen, "p_nodes": nodes, "p_blocks": index.blocks, "p_rows": index.rows,
        "n": chosen.shape[0], "resolution": index.resolution, "side": blocks_per_axis(index.resolution),
        "floor": reference.FLOOR, "C": width, "PC": next_power_of_2(width), "CHANNELS": channels,
        "BLOCK": BLOCK, "num_warps": WARPS,
    }  # fmt: skip


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
        m = chosen.shape[0]
        programs = cdiv(m, BLOCK)
        values = []
        for table, channels in ((density, 1), (color, 3 * n_basis)):
            sums = torch.zeros(max(programs, 1), dtype=torch.float32, device=density.device)
            if m:
                _measure_kernel[(programs,)](p_out=sums, **_arguments(table, channels, index, nodes, chosen))
            values.append(sums.sum() / max(channels * m, 1))
        return torch.stack(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        density, color, nodes, chosen = ctx.saved_tensors
        m, results = chosen.shape[0], []
        for i, (table, channels) in enumerate(((density, 1), (color, 3 * ctx.n_basis))):
            buffer = None if ctx.sink is None else ctx.sink.buffers[i]
            target = torch.zeros_like(table, dtype=torch.float32) if buffer is None else buffer
            if m:
                factor = grad[i] / (m * channels)
                arguments = _arguments(table, channels, ctx.index, nodes, chosen)
                _spread_kernel[(cdiv(m, BLOCK),)](p_factor=factor, p_grad=target, **arguments)
            results.append(None if buffer is not None else target.to(table.dtype))
        return *results, None, None, None, None, None  # density, color, index, nodes, chosen, n_basis, sink


def voxel_variation(
    tables: VoxelTables,
    index: VoxelIndex,
    nodes: Tensor,
    chosen: Tensor,
    *,
    n_basis: int,
    sink: GradientSink | None = None,
) -> Tensor:
    check_kernel_float(**tables._asdict())
    if torch.are_deterministic_algorithms_enabled():
        buffers = (None, None) if sink is None else sink.buffers
        own = VoxelTables(*(redirect(table, None, buffer) for table, buffer in zip(tables, buffers, strict=True)))
        return reference.voxel_variation(own, index, nodes, chosen, n_basis=n_basis)
    density, color = (table.contiguous() for table in tables)
    return _Variation.apply(density, color, index, nodes, chosen.contiguous(), n_basis, sink)


def _case(kernel: Any, name: str, width: int, channels: int) -> CompileCase:
    pointers = dict.fromkeys(["p_table", "p_out", "p_factor", "p_grad"], "*fp32")
    pointers |= {"p_chosen": "*i64"} | dict.fromkeys(["p_nodes", "p_blocks", "p_rows"], "*i32")
    numbers = dict.fromkeys(["n", "resolution", "side"], "i32") | {"floor": "fp32"}
    signature = {key: kind for key, kind in (pointers | numbers).items() if key in kernel.arg_names}
    constexprs = {"C": width, "PC": next_power_of_2(width), "CHANNELS": channels, "BLOCK": BLOCK}
    return CompileCase(kernel, signature, constexprs, WARPS, name=f"{name}-{width}")


COMPILE_CASES = [
    _case(_measure_kernel, "measure", 28, 27),
    _case(_spread_kernel, "spread", 28, 27),
]
