"""Instant-NGP from positions to logits, persistent programs over the rows in use: late rounds of a frame cost little.

Two kernels: the first writes the encoding, feature-major, level after level as in `hash_encode`, the second runs both
networks on it. (One kernel for both was slower, see `_ngp_density`.)

dtypes: positions fp32; table fp16, bf16 or fp32 sets the operand type; weights of any float type, sums and logits fp32.
Deterministic. Rows past the device count cost nothing; those of a block that is in use hold anything.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..hash_encode import HashLayout
from ..ngp_field import NgpWeights
from . import hash_encode, ngp_field
from ._common import CompileCase, check_kernel_float, processors
from ._grid import cell_of, level_constants, load_level, load_point, row_of, used_rows
from ._launch import cdiv, launchable
from ._mlp import (
    fits,
    fp32_precision,
    load_tile,
    load_weight,
    operand_type,
    padded,
    relu_layer,
    store_tile,
)
from .hash_encode import _blend_x

BLOCK, WARPS, STAGES, PROGRAMS = 64, 4, 3, 4  # of the networks; programs per multiprocessor
ENCODE_BLOCK, ENCODE_WARPS, ENCODE_PROGRAMS = 128, 4, 12


@launchable(do_not_specialize=["n"])
def _encode_kernel(
    p_positions, p_table, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xc,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    for task in range(tl.program_id(0), tl.cdiv(n_used, BLOCK) * LEVELS, tl.num_programs(0)):
        i_level = task % LEVELS
        i = (task // LEVELS) * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        x, y, z = load_point(p_positions, i, m, stride_xn, stride_xc)
        ix, fx = cell_of(x, scale)
        iy, fy = cell_of(y, scale)
        iz, fz = cell_of(z, scale)
        b_pair = tl.zeros([BLOCK, 2 * F], tl.float32)
        b_lone = tl.zeros([BLOCK, F], tl.float32)
        for c in tl.static_range(4):
            weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
            row0 = row_of(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
            row1 = row_of(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
            pair, lone = _blend_x(p_table + offset * F, row0, row1, fx, weight, m, F)
            b_pair += pair
            b_lone += lone
        for f in tl.static_range(F):
            value = tl.sum(tl.where((tl.arange(0, 2 * F) % F == f)[None, :], b_pair, 0.0), 1)
            value += tl.sum(tl.where((tl.arange(0, F) == f)[None, :], b_lone, 0.0), 1)
            p = p_out + (i_level * F + f).to(tl.int64) * n + i
            tl.store(p, value.to(p_out.dtype.element_ty), mask=m)


@launchable(do_not_specialize=["n"])
def _logits_kernel(
    p_x, p_directions, p_rays, p_w1, p_w2, p_w3, p_w4, p_w5, p_raw, p_used, n,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, DS: tl.constexpr, DF: tl.constexpr, DH: tl.constexpr,
    PS: tl.constexpr, PF: tl.constexpr, PH: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    W1 = load_weight(p_w1, ROWS * F, PH, LEVELS * F, DH, LEVELS * F, T)
    W2 = load_weight(p_w2, PH, PF, DH, DF, DH, T)
    W3a = load_weight(p_w3, PS, PH, DS, DH, DS + DF, T)
    W3b = load_weight(p_w3 + DS, PF, PH, DF, DH, DS + DF, T)
    W4 = load_weight(p_w4, PH, PH, DH, DH, DH, T)
    W5 = load_weight(p_w5, PH, 16, DH, 3, DH, T)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        b_x = load_tile(p_x, i, n, 1, n, LEVELS * F, ROWS * F, EVEN, T)
        ray = tl.load(p_rays + i, mask=m, other=0)
        b_s = load_tile(p_directions, ray, n, DS, 1, DS, PS, True, T)
        b_y = tl.dot(relu_layer(b_x, W1, T, PRECISION), W2, input_precision=PRECISION)
        b_h = tl.dot(b_s, W3a, tl.dot(b_y.to(T), W3b, input_precision=PRECISION), input_precision=PRECISION)
        b_h = relu_layer(tl.maximum(b_h, 0.0).to(T), W4, T, PRECISION)
        b_c = tl.dot(b_h, W5, input_precision=PRECISION)
        store_tile(p_raw, b_c, i, n, 1, n, 3, 16, EVEN)
        logit = tl.sum(tl.where((tl.arange(0, PF) == 0)[None, :], b_y, 0.0), 1)
        tl.store(p_raw + 3 * n.to(tl.int64) + i, logit, mask=m)


def _launch(
    positions: Tensor,
    directions: Tensor,
    ray_indices: Tensor,
    *,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    n_used: Tensor | None,
) -> Tensor:
    n, device, features = positions.shape[0], table.device, layout.n_features
    raw = torch.empty(4, n, dtype=torch.float32, device=device).t()  # the kernel counts n from column to column
    if n == 0:
        return raw
    levels, scales = level_constants(layout, device)
    encoding = torch.empty(layout.n_outputs, n, dtype=table.dtype, device=device)
    tasks = cdiv(n, ENCODE_BLOCK) * layout.n_levels
    # An odd number, so that every program meets all levels: fine ones take several times as long as coarse ones.
    _encode_kernel[(min(tasks, ENCODE_PROGRAMS * processors(device) - 1 | 1),)](
        p_positions=positions, p_table=table, p_out=encoding, p_levels=levels, p_scales=scales, p_used=n_used, n=n,
        stride_xn=positions.stride(0), stride_xc=positions.stride(1), LEVELS=layout.n_levels, F=features,
        BLOCK=ENCODE_BLOCK, num_warps=ENCODE_WARPS,
    )  # fmt: skip
    widths = {"DS": directions.shape[1], "DF": weights.density_out.shape[0], "DH": weights.density_in.shape[0]}
    widths |= {"P" + name[1:]: padded(width) for name, width in widths.items()}
    w1, w2, w3, w4, w5 = weights
    _logits_kernel[(min(cdiv(n, BLOCK), PROGRAMS * processors(device)),)](
        p_x=encoding, p_directions=directions, p_rays=ray_indices, p_w1=w1, p_w2=w2, p_w3=w3, p_w4=w4, p_w5=w5,
        p_raw=raw, p_used=n_used, n=n, LEVELS=layout.n_levels,
        ROWS=max(16 // features, 1 << (layout.n_levels - 1).bit_length()), F=features, **widths,
        T=operand_type(table.dtype, device), PRECISION=fp32_precision(), BLOCK=BLOCK, EVEN=n % BLOCK == 0,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return raw


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    """Whether the kernels here run; otherwise encoding and networks run apart, on all rows."""
    widest = max(*weights.density_in.shape, weights.colour_in.shape[1])
    return widest <= 64 and fits(weights, table.dtype, table.device)


def ngp_logits(
    positions: Tensor,
    directions: Tensor,
    ray_indices: Tensor,
    *,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    n_used: Tensor | None,
) -> Tensor:
    check_kernel_float(positions=positions, directions=directions, table=table, **weights._asdict())
    positions, table = positions.detach().float(), table.detach().contiguous()
    own = NgpWeights(*(w.detach().contiguous() for w in weights))
    if not skips_unused(table, own):
        used = torch.arange(positions.shape[0], device=table.device) < (
            positions.shape[0] if n_used is None else n_used
        )
        rays = torch.where(used, ray_indices, 0)
        encoding = hash_encode.encode_forward(positions, table, layout, n_used)
        return ngp_field.ngp_field(encoding, directions, rays, own, n_used=n_used)
    return _launch(
        positions, directions.contiguous(), ray_indices.contiguous(), table=table, layout=layout, weights=own,
        n_used=n_used,
    )  # fmt: skip


def _case(features: int, dtype: str = "fp16", operand: Any = tl.float16) -> CompileCase:
    pointers = {"p_x": dtype, "p_directions": "fp32", "p_rays": "i32", "p_raw": "fp32", "p_used": "i32"}
    pointers |= {f"p_w{j}": "fp32" for j in range(1, 6)}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"n": "i32"}
    constexprs: dict[str, Any] = {"LEVELS": 32 // features, "ROWS": 32 // features, "F": features, "EVEN": True}
    constexprs |= {"DS": 16, "DF": 16, "DH": 64, "PS": 16, "PF": 16, "PH": 64, "T": operand, "PRECISION": "tf32"}
    constexprs |= {"BLOCK": BLOCK}
    return CompileCase(_logits_kernel, signature, constexprs, WARPS, STAGES, name=f"networks-{dtype}-{features}")


def _encode_case(features: int) -> CompileCase:
    pointers = {"p_positions": "fp32", "p_table": "fp16", "p_out": "fp16", "p_levels": "i32", "p_scales": "fp32"}
    signature = {name: f"*{kind}" for name, kind in (pointers | {"p_used": "i32"}).items()}
    signature |= {"n": "i32", "stride_xc": "i32"}
    shape = {"LEVELS": 32 // features, "F": features, "BLOCK": ENCODE_BLOCK, "stride_xn": 1}
    return CompileCase(_encode_kernel, signature, shape, ENCODE_WARPS, name=f"{features}")


COMPILE_CASES = [_encode_case(2), _encode_case(4)]
TENSOR_CORE_CASES = [_case(4), _case(2), _case(4, "bf16", tl.bfloat16)]
