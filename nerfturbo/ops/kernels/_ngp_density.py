"""Positions to density logits in one kernel: the encoding never reaches memory.

Persistent programs; a tile is BLOCK samples x all levels, so each thread gathers for several levels at once and the
loads overlap. Lanes run along the samples: neighbours on a ray share cache lines. The blended features become the
left operand of the density network's first layer; of its second layer only the first row is needed, a sum instead of
a product.

dtypes: table fp16, bf16 or fp32 sets the operand type; weights, sums and the result fp32. Deterministic, no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hash_encode import HashLayout
from ..reference import fused_mlp as reference
from ._common import CompileCase, check_kernel_float
from ._grid import clamp_unit, level_constants, load_point, used_rows
from ._mlp import fits, fp32_precision, load_weight, operand_type, padded, processors, relu_layer
from .fused_mlp import forward as mlp_forward
from .hash_encode import hash_encode

BLOCK, WARPS, PROGRAMS = 32, 4, 8
FUSED = False  # on an H200 two launches over 1.2 M samples take a third of the fused kernel's time


@triton.jit
def _cells(x, scale):
    """Cell and fraction [LEVELS, BLOCK] of coordinates (BLOCK,) at all scales (LEVELS,)."""
    p = clamp_unit(x)[None, :] * scale[:, None] + 0.5
    cell = p.to(tl.int32)
    return cell, p - cell.to(tl.float32)


@triton.jit
def _rows(ix, iy, iz, nodes, hash_mask):
    hashed = (ix ^ (iy * -1640531535) ^ (iz * 805459861)) & hash_mask
    return tl.where(hash_mask >= 0, hashed, ix + nodes * (iy + nodes * iz))


@triton.jit
def _blend_x(p_level, row0, row1, fx, weight, m, F: tl.constexpr):
    """The two corners along x times `weight`, as in `hash_encode._blend_x`, for all levels at once."""
    i_pair = tl.arange(0, 2 * F)[None, None, :]
    paired = (row0 ^ row1) == 1
    b_pair = tl.load(p_level + ((row0 >> 1) * (2 * F))[:, :, None] + i_pair, mask=m, other=0.0)
    m_lone = m & (paired == 0)[:, :, None]
    b_lone = tl.load(p_level + (row1 * F)[:, :, None] + tl.arange(0, F)[None, None, :], mask=m_lone, other=0.0)
    near, far = weight * (1.0 - fx), weight * fx
    first = (i_pair // F) == (row0 & 1)[:, :, None]
    b_weight = tl.where(first, near[:, :, None], tl.where(paired, far, 0.0)[:, :, None])
    return b_weight * b_pair.to(tl.float32), far[:, :, None] * b_lone.to(tl.float32)


@triton.jit
def _encode_tile(
    p_positions, p_table, p_levels, p_scales, i, m, stride_xn, stride_xc,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK, ROWS * F]: the encoding of BLOCK samples; levels from LEVELS to ROWS are zero."""
    i_level = tl.arange(0, ROWS)
    m_level = i_level < LEVELS
    p = p_levels + i_level * 4
    offset = tl.load(p, mask=m_level, other=0).to(tl.int64) * (8 * F)
    nodes = tl.load(p + 1, mask=m_level, other=0)[:, None]
    hash_mask = tl.load(p + 2, mask=m_level, other=0)[:, None]
    scale = tl.load(p_scales + i_level, mask=m_level, other=0.0)
    x, y, z = load_point(p_positions, i, m, stride_xn, stride_xc)
    ix, fx = _cells(x, scale)
    iy, fy = _cells(y, scale)
    iz, fz = _cells(z, scale)
    m_entry = (m_level[:, None] & m[None, :])[:, :, None]
    p_level = p_table + offset[:, None, None]
    b_pair = tl.zeros([ROWS, BLOCK, 2 * F], tl.float32)
    b_lone = tl.zeros([ROWS, BLOCK, F], tl.float32)
    for c in tl.static_range(4):
        weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
        row0 = _rows(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        row1 = _rows(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        pair, lone = _blend_x(p_level, row0, row1, fx, weight, m_entry, F)
        b_pair += pair
        b_lone += lone
    b_sum = tl.sum(tl.reshape(b_pair, [ROWS, BLOCK, 2, F]), 2) + b_lone
    return tl.reshape(tl.permute(b_sum, (1, 0, 2)), [BLOCK, ROWS * F])


@triton.jit(do_not_specialize=["n"])
def _density_kernel(
    p_positions, p_table, p_levels, p_scales, p_w1, p_w2, p_out, p_used, n, stride_xn, stride_xc,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, DH: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    W1 = load_weight(p_w1, ROWS * F, PH, LEVELS * F, DH, LEVELS * F, T)
    i_hidden = tl.arange(0, PH)
    w2 = tl.load(p_w2 + i_hidden, mask=i_hidden < DH, other=0.0).to(T).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        b_x = _encode_tile(
            p_positions, p_table, p_levels, p_scales, i, m, stride_xn, stride_xc,
            LEVELS=LEVELS, ROWS=ROWS, F=F, BLOCK=BLOCK,
        )  # fmt: skip
        h = relu_layer(b_x.to(T), W1, T, PRECISION)
        logit = tl.sum(h.to(tl.float32) * w2[None, :], 1)
        tl.store(p_out + i, tl.where(m, logit, 0.0), mask=i < n)
    for block in range(tl.cdiv(n_used, BLOCK) + tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_out + i, tl.zeros([BLOCK], tl.float32), mask=i < n)


def ngp_density(
    positions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: tuple[Tensor, Tensor],
    *,
    n_used: Tensor | None = None,
) -> Tensor:
    if not fits(weights, table.dtype, positions.device):
        encoding = hash_encode(positions, table, layout, n_used=n_used)
        return reference.fused_mlp(encoding, [weights[0], weights[1][:1]])[:, 0].float()
    density_in, density_out = (w.contiguous() for w in weights)
    check_kernel_float(positions=positions, table=table, density_in=density_in, density_out=density_out)
    if not FUSED:
        encoding = hash_encode(positions, table, layout, n_used=n_used)
        return mlp_forward(encoding, [density_in, density_out[:1]], n_used)[:, 0].float()
    positions, n = positions.float(), positions.shape[0]
    out = torch.empty(n, dtype=torch.float32, device=positions.device)
    if n == 0:
        return out
    levels, scales = level_constants(layout, table.device)
    features, hidden = layout.n_features, density_in.shape[0]
    rows = max(16 // features, 1 << (layout.n_levels - 1).bit_length())
    _density_kernel[(min(triton.cdiv(n, BLOCK), PROGRAMS * processors(table.device)),)](
        p_positions=positions, p_table=table.contiguous(), p_levels=levels, p_scales=scales,
        p_w1=density_in, p_w2=density_out, p_out=out, p_used=n_used, n=n,
        stride_xn=positions.stride(0), stride_xc=positions.stride(1),
        LEVELS=layout.n_levels, ROWS=rows, F=features, DH=hidden, PH=padded(hidden),
        T=operand_type(table.dtype, table.device), PRECISION=fp32_precision(), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out


def _case(features: int) -> CompileCase:
    pointers = {"p_positions": "fp32", "p_table": "fp16", "p_levels": "i32", "p_scales": "fp32", "p_w1": "fp32"}
    pointers |= {"p_w2": "fp32", "p_out": "fp32", "p_used": "i32"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"n": "i32", "stride_xc": "i32"}
    constexprs = {"LEVELS": 32 // features, "ROWS": 32 // features, "F": features, "DH": 64, "PH": 64, "T": tl.float16}
    constexprs |= {"PRECISION": "tf32", "BLOCK": BLOCK, "stride_xn": 1}
    return CompileCase(_density_kernel, signature, constexprs, WARPS, name=f"density-fp16-{features}")


TENSOR_CORE_CASES = [_case(2), _case(4)]
