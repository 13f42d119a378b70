"""Hash encoding on a GPU: the eight corners of each sample's cell, blended; and the gradients back.

Forward: one program = BLOCK samples of one level, level fastest in the grid, so that neighbouring programs read the
same positions. The two corners along x are neighbours in the table wherever `row0 ^ row1 == 1` (the first hash prime
is 1), and one load of 2 F numbers fetches both; where they are not, a second load of F numbers is predicated on. The
result is stored feature-major: an (n_levels * F, n) buffer, transposed.

Backward to the table: `_hash_backward.py`. Backward to positions: one program = BLOCK samples, all levels in turn, so
no atomics.

dtypes: positions fp32; table fp16, bf16 or fp32; weights and sums fp32. Forward and position gradients are
deterministic. Derivation: docs/ops/hash_encode.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sink import GradientSink
from ..hash_encode import HashLayout
from ._common import CompileCase, check_kernel_float
from ._grid import cell_of, level_constants, load_level, load_point, row_of, used_rows
from ._hash_backward import add_table_gradient
from ._launch import cdiv, launchable
from ._mlp import feature_major

BLOCK = 128
WARPS = 4


@triton.jit
def _blend_x(p_level, row0, row1, fx, weight, m, F: tl.constexpr):
    """The two corners along x times `weight`: [BLOCK, 2 F] from the pair, [BLOCK, F] from a lone second corner."""
    i_pair = tl.arange(0, 2 * F)
    paired = (row0 ^ row1) == 1
    b_pair = tl.load(p_level + ((row0 >> 1) * (2 * F))[:, None] + i_pair[None, :], mask=m[:, None], other=0.0)
    m_lone = m & (paired == 0)
    b_lone = tl.load(p_level + (row1 * F)[:, None] + tl.arange(0, F)[None, :], mask=m_lone[:, None], other=0.0)
    near, far = weight * (1.0 - fx), weight * fx
    first = (i_pair // F)[None, :] == (row0 & 1)[:, None]  # which half of the pair is the near corner
    b_weight = tl.where(first, near[:, None], tl.where(paired, far, 0.0)[:, None])
    return b_weight * b_pair.to(tl.float32), far[:, None] * b_lone.to(tl.float32)


# One sample a thread: what a stride is divisible by helps no access, and would have these compiled per number of rows.
@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["stride_xc", "stride_of"])
def _forward_kernel(
    p_positions, p_table, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xc, stride_of,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_level = tl.program_id(0) % LEVELS
    i = (tl.program_id(0) // LEVELS) * BLOCK + tl.arange(0, BLOCK)
    n_used = used_rows(p_used, n)
    m = i < n_used
    b_pair = tl.zeros([BLOCK, 2 * F], tl.float32)
    b_lone = tl.zeros([BLOCK, F], tl.float32)
    if (tl.program_id(0) // LEVELS) * BLOCK < n_used:
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        x, y, z = load_point(p_positions, i, m, stride_xn, stride_xc)
        ix, fx = cell_of(x, scale)
        iy, fy = cell_of(y, scale)
        iz, fz = cell_of(z, scale)
        for c in tl.static_range(4):
            weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
            row0 = row_of(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
            row1 = row_of(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
            pair, lone = _blend_x(p_table + offset * F, row0, row1, fx, weight, m, F)
            b_pair += pair
            b_lone += lone
    m_row = i < n  # rows past the used ones become zero
    for f in tl.static_range(F):
        # The column index of a register is a constant, so these sums are register picks, not reductions.
        value = tl.sum(tl.where((tl.arange(0, 2 * F) % F == f)[None, :], b_pair, 0.0), 1)
        value += tl.sum(tl.where((tl.arange(0, F) == f)[None, :], b_lone, 0.0), 1)
        tl.store(p_out + (i_level * F + f).to(tl.int64) * stride_of + i, value.to(p_out.dtype.element_ty), mask=m_row)


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["stride_xc", "stride_gf"])
def _backward_positions_kernel(
    p_positions, p_table, p_grad, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xc, stride_gn, stride_gf,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < used_rows(p_used, n)
    i_feature = tl.arange(0, F)
    x, y, z = load_point(p_positions, i, m, stride_xn, stride_xc)
    gx = tl.zeros([BLOCK], tl.float32)
    gy = tl.zeros([BLOCK], tl.float32)
    gz = tl.zeros([BLOCK], tl.float32)
    for i_level in range(LEVELS):
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        ix, fx = cell_of(x, scale)
        iy, fy = cell_of(y, scale)
        iz, fz = cell_of(z, scale)
        columns = (i_level * F + i_feature).to(tl.int64) * stride_gf
        p = p_grad + i.to(tl.int64)[:, None] * stride_gn + columns[None, :]
        b_grad = tl.load(p, mask=m[:, None], other=0.0).to(tl.float32)  # [BLOCK, F]
        for c in tl.static_range(8):
            row = row_of(ix + (c & 1), iy + ((c >> 1) & 1), iz + (c >> 2), nodes, hash_mask)
            p = p_table + offset * F + (row * F)[:, None] + i_feature[None, :]
            b_entry = tl.load(p, mask=m[:, None], other=0.0).to(tl.float32)
            dot = tl.sum(b_grad * b_entry, 1) * scale
            wx = fx if c & 1 else 1.0 - fx
            wy = fy if c & 2 else 1.0 - fy
            wz = fz if c & 4 else 1.0 - fz
            gx += (dot if c & 1 else -dot) * wy * wz
            gy += (dot if c & 2 else -dot) * wx * wz
            gz += (dot if c & 4 else -dot) * wx * wy
    m_row = i < n
    p = p_out + i  # (3, n), transposed
    tl.store(p, tl.where((x >= 0.0) & (x <= 1.0), gx, 0.0), mask=m_row)
    tl.store(p + n, tl.where((y >= 0.0) & (y <= 1.0), gy, 0.0), mask=m_row)
    tl.store(p + 2 * n.to(tl.int64), tl.where((z >= 0.0) & (z <= 1.0), gz, 0.0), mask=m_row)


def encode_forward(positions: Tensor, table: Tensor, layout: HashLayout, n_used: Tensor | None) -> Tensor:
    n = positions.shape[0]
    out = feature_major(n, layout.n_outputs, table.dtype, table.device)
    if n:
        levels, scales = level_constants(layout, table.device)
        _forward_kernel[(cdiv(n, BLOCK) * layout.n_levels,)](
            p_positions=positions, p_table=table, p_out=out, p_levels=levels, p_scales=scales, p_used=n_used, n=n,
            stride_xn=positions.stride(0), stride_xc=positions.stride(1), stride_of=out.stride(1),
            LEVELS=layout.n_levels, F=layout.n_features, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def positions_gradient(
    positions: Tensor, table: Tensor, grad: Tensor, layout: HashLayout, n_used: Tensor | None
) -> Tensor:
    n = positions.shape[0]
    out = torch.empty(3, n, dtype=torch.float32, device=positions.device)
    if n:
        levels, scales = level_constants(layout, table.device)
        _backward_positions_kernel[(cdiv(n, BLOCK),)](
            p_positions=positions, p_table=table, p_grad=grad, p_out=out, p_levels=levels, p_scales=scales,
            p_used=n_used, n=n, stride_xn=positions.stride(0), stride_xc=positions.stride(1),
            stride_gn=grad.stride(0), stride_gf=grad.stride(1),
            LEVELS=layout.n_levels, F=layout.n_features, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out.t()


class _HashEncode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        positions: Tensor,
        table: Tensor,
        half: Tensor | None,
        layout: HashLayout,
        sink: GradientSink | None,
        n_used: Tensor | None,
    ) -> Tensor:
        source = table if half is None else half
        ctx.save_for_backward(positions, source if ctx.needs_input_grad[0] else None, n_used)
        ctx.layout, ctx.sink, ctx.like = layout, sink, (table.shape, table.dtype)
        return encode_forward(positions, source, layout, n_used)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, source, n_used = ctx.saved_tensors
        grad_positions = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_positions = positions_gradient(positions, source, grad, ctx.layout, n_used)
        if ctx.needs_input_grad[1]:
            found_inf = None if ctx.sink is None else ctx.sink.found_inf
            if ctx.sink is None:
                shape, dtype = ctx.like
                buffer = torch.zeros(shape, dtype=torch.float32, device=grad.device)
                add_table_gradient(buffer, positions, grad, ctx.layout, n_used, found_inf)
                grad_table = buffer.to(dtype)
            else:
                add_table_gradient(ctx.sink.buffers[0], positions, grad, ctx.layout, n_used, found_inf)
        # positions, table, half, layout, sink, n_used
        return grad_positions, grad_table, None, None, None, None


def hash_encode(
    positions: Tensor,
    table: Tensor,
    layout: HashLayout,
    *,
    half: Tensor | None = None,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    check_kernel_float(positions=positions, table=table, half=half)
    positions, table = positions.float(), table.contiguous()
    if half is not None:
        half = half.detach().contiguous()
    if not torch.is_grad_enabled():  # looking ahead, many times: without what autograd costs
        return encode_forward(positions, table if half is None else half, layout, n_used)
    return _HashEncode.apply(positions, table, half, layout, sink, n_used)


_POINTERS = {"p_positions": "*fp32", "p_levels": "*i32", "p_scales": "*fp32", "p_used": "*i32", "n": "i32"}


def _forward_case(dtype: str, features: int) -> CompileCase:
    signature = {**_POINTERS, "p_table": f"*{dtype}", "p_out": f"*{dtype}"}
    constexprs = {"LEVELS": 32 // features, "F": features, "BLOCK": BLOCK}
    constexprs |= {"stride_xn": 1, "stride_xc": 1 << 18, "stride_of": 1 << 18}
    return CompileCase(_forward_kernel, signature, constexprs, WARPS, name=f"forward-{dtype}-{features}")


def _positions_case(dtype: str) -> CompileCase:
    signature = {**_POINTERS, "p_table": f"*{dtype}", "p_grad": f"*{dtype}", "p_out": "*fp32"}
    signature |= dict.fromkeys(["stride_xn", "stride_xc", "stride_gn", "stride_gf"], "i32")
    constexprs = {"LEVELS": 16, "F": 2, "BLOCK": BLOCK}
    return CompileCase(_backward_positions_kernel, signature, constexprs, WARPS, name=f"positions-{dtype}")


COMPILE_CASES = [
    *(_forward_case(dtype, features) for dtype, features in (("fp16", 2), ("fp16", 4), ("bf16", 2), ("fp32", 2))),
    _positions_case("fp16"),
]
