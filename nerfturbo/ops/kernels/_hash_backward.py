"""Gradient of the hash encoding to its table: weight times incoming gradient, added to eight corners per sample.

One program = BLOCK samples of one level, level fastest in the grid. Atomic additions, which are not deterministic:

- PAIR: the two corners along x that are neighbours in the table go out as one block of 2 F numbers, which becomes a
  vector atomic (fp32: compute capability 9.0 and up; fp16: two numbers everywhere, more from 9.0 on). Where fp32
  vectors are missing, pairs win nothing and each corner goes out alone.
- RUNS: on coarse levels consecutive samples of a ray share a cell, and thousands of atomics would queue for few rows.
  A segmented scan over the samples of one warp adds them up first; only the last sample of a run writes.
- FIXED, the deterministic mode: sums are int64 fixed-point numbers, and integer addition knows no order. The scale is
  a power of two from the largest incoming gradient, so that the sum cannot overflow and keeps ~40 bits. It costs 8
  bytes per number of the table, one more pass over it, and scalar 64-bit atomics.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import InputError
from .._sink import zero_tail
from ..hash_encode import HashLayout
from ._common import CompileCase
from ._grid import cell_of, level_constants, load_level, load_point, row_of, used_rows
from ._launch import cdiv, launchable

BLOCK, WARPS = 128, 4
RUN_BLOCK, RUN_WARPS = 32, 1
RUN_SCALE = 450.0  # levels up to this many cells across the box are added up in runs first


@triton.jit
def _join_runs(flag_a, a, flag_b, b):
    """Segmented addition: a set flag starts a new run."""
    return flag_a | flag_b, tl.where(flag_b != 0, b, a + b)


@triton.jit
def _add(p, b_value, m, p_scale):
    """Atomic addition of a block [BLOCK, k], as fixed-point numbers where a scale is given."""
    if p_scale is not None:
        b_value = b_value * tl.load(p_scale)
    tl.atomic_add(p, b_value.to(p.dtype.element_ty), mask=m[:, None], sem="relaxed")


@triton.jit
def _add_pair(p_level, row0, row1, b_near, b_far, m, p_scale, F: tl.constexpr, BLOCK: tl.constexpr):
    """Both corners along x, [BLOCK, F] each: one block where they are neighbours in the table, else two."""
    i_feature = tl.arange(0, F)
    paired = (row0 ^ row1) == 1
    odd = ((row0 & 1) != 0)[:, None]
    b_pair = tl.join(tl.where(odd, b_far, b_near), tl.where(odd, b_near, b_far))  # [BLOCK, F, 2]
    b_pair = tl.reshape(tl.permute(b_pair, (0, 2, 1)), [BLOCK, 2 * F])
    p = p_level + ((row0 >> 1) * (2 * F))[:, None] + tl.arange(0, 2 * F)[None, :]
    _add(p, b_pair, m & paired, p_scale)
    m_lone = m & (paired == 0)
    _add(p_level + (row0 * F)[:, None] + i_feature[None, :], b_near, m_lone, p_scale)
    _add(p_level + (row1 * F)[:, None] + i_feature[None, :], b_far, m_lone, p_scale)


@triton.jit
def _load_gradient(p_grad, p_found_inf, i, m, stride_gn, stride_gf, i_level, F: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, F]: the incoming gradients of a level; and which rows hold any."""
    b_grad = tl.zeros([BLOCK, F], tl.float32)
    m_any = i < 0
    for f in tl.static_range(F):
        p = p_grad + i.to(tl.int64) * stride_gn + (i_level * F + f).to(tl.int64) * stride_gf
        grad = tl.load(p, mask=m, other=0.0).to(tl.float32)
        m_any = m_any | (grad != 0.0)
        if p_found_inf is not None:
            bad = (grad != grad) | (tl.abs(grad) == float("inf"))
            tl.store(p_found_inf + i * 0, tl.full([BLOCK], 1.0, tl.float32), mask=bad)
        b_grad = tl.where((tl.arange(0, F) == f)[None, :], grad[:, None], b_grad)
    return b_grad, m_any


@triton.jit
def _cell(p_positions, i, m, stride_xn, stride_xc, scale):
    x, y, z = load_point(p_positions, i, m, stride_xn, stride_xc)
    ix, fx = cell_of(x, scale)
    iy, fy = cell_of(y, scale)
    iz, fz = cell_of(z, scale)
    return ix, iy, iz, fx, fy, fz


@triton.jit
def _run_bounds(p_positions, i, n_used, stride_xn, stride_xc, scale, ix, iy, iz, BLOCK: tl.constexpr):
    """First and last sample of each run of consecutive samples in one cell, within this block."""
    i_block = tl.arange(0, BLOCK)
    m_before = (i < n_used) & (i_block > 0)
    jx, jy, jz, _x, _y, _z = _cell(p_positions, i - 1, m_before, stride_xn, stride_xc, scale)
    first = (i_block == 0) | (jx != ix) | (jy != iy) | (jz != iz)
    m_after = (i + 1 < n_used) & (i_block < BLOCK - 1)
    jx, jy, jz, _x, _y, _z = _cell(p_positions, i + 1, m_after, stride_xn, stride_xc, scale)
    last = (m_after == 0) | (jx != ix) | (jy != iy) | (jz != iz)
    return first, last


@launchable(do_not_specialize=["n", "first_level"], do_not_specialize_on_alignment=["stride_xc", "stride_gf"])
def _backward_table_kernel(
    p_positions, p_grad, p_table, p_levels, p_scales, p_used, p_found_inf, p_scale, n, first_level,
    stride_xn, stride_xc, stride_gn, stride_gf,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    i_level = first_level + tl.program_id(0) % LEVELS
    start = (tl.program_id(0) // LEVELS) * BLOCK
    n_used = used_rows(p_used, n)
    if start < n_used:
        i = start + tl.arange(0, BLOCK)
        m = i < n_used
        b_grad, m_write = _load_gradient(p_grad, p_found_inf, i, m, stride_gn, stride_gf, i_level, F=F, BLOCK=BLOCK)
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        ix, iy, iz, fx, fy, fz = _cell(p_positions, i, m, stride_xn, stride_xc, scale)
        flags = tl.zeros([BLOCK, F], tl.int32)
        if RUNS:
            first, last = _run_bounds(p_positions, i, n_used, stride_xn, stride_xc, scale, ix, iy, iz, BLOCK=BLOCK)
            flags += first.to(tl.int32)[:, None]
            m_write = m & last
        for c in tl.static_range(4):
            jy, jz = iy + (c & 1), iz + (c >> 1)
            weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
            row0 = row_of(ix, jy, jz, nodes, hash_mask)
            row1 = row_of(ix + 1, jy, jz, nodes, hash_mask)
            b_near = (weight * (1.0 - fx))[:, None] * b_grad
            b_far = (weight * fx)[:, None] * b_grad
            if RUNS:
                _flags, b_near = tl.associative_scan((flags, b_near), 0, _join_runs)
                _flags, b_far = tl.associative_scan((flags, b_far), 0, _join_runs)
            if PAIR:
                _add_pair(p_table + offset * F, row0, row1, b_near, b_far, m_write, p_scale, F=F, BLOCK=BLOCK)
            else:
                p = p_table + offset * F + tl.arange(0, F)[None, :]
                _add(p + (row0 * F)[:, None], b_near, m_write, p_scale)
                _add(p + (row1 * F)[:, None], b_far, m_write, p_scale)


@functools.lru_cache(maxsize=16)
def _vector_atomics(device: torch.device) -> bool:
    """Whether blocks of two and four fp32 numbers are one atomic operation."""
    if device.type != "cuda":
        return True  # the interpreter takes either; exercise the one that fast GPUs take
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _launch(
    sums: Tensor, scale: Tensor | None, found_inf: Tensor | None, positions: Tensor, grad: Tensor, layout: HashLayout,
    n_used: Tensor | None, first: int, count: int, runs: bool,
) -> None:  # fmt: skip
    if count == 0:
        return
    n, block = positions.shape[0], RUN_BLOCK if runs else BLOCK
    levels, scales = level_constants(layout, sums.device)
    # A vector atomic holds 16 bytes.
    pair = 2 * layout.n_features * sums.element_size() <= 16
    pair = pair and (sums.dtype == torch.float16 or _vector_atomics(sums.device))
    _backward_table_kernel[(cdiv(n, block) * count,)](
        p_positions=positions, p_grad=grad, p_table=sums, p_levels=levels, p_scales=scales, p_used=n_used,
        p_found_inf=found_inf, p_scale=scale, n=n, first_level=first,
        stride_xn=positions.stride(0), stride_xc=positions.stride(1),
        stride_gn=grad.stride(0), stride_gf=grad.stride(1),
        LEVELS=count, F=layout.n_features, BLOCK=block, PAIR=pair, RUNS=runs, num_warps=RUN_WARPS if runs else WARPS,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _coarse_levels(layout: HashLayout) -> int:
    return sum(level.scale <= RUN_SCALE for level in layout.levels)


def _fixed_point_scale(grad: Tensor, n_used: Tensor | None) -> tuple[Tensor, Tensor]:
    """The power of two that makes gradients integers, and its inverse (NaN where the gradient is not finite)."""
    largest = zero_tail(grad, n_used).abs().amax().float()
    _, exponent = torch.frexp(largest)
    bits = 61 - math.ceil(math.log2(8 * grad.shape[0]))  # as if every corner of every sample met in one row
    power = (bits - exponent).clamp(-120, 120).float()
    power = torch.where(torch.isfinite(largest), power, torch.zeros_like(power))
    inverse = torch.where(torch.isfinite(largest), torch.exp2(-power), torch.full_like(power, float("nan")))
    return torch.exp2(power), inverse


def add_table_gradient(
    buffer: Tensor,
    positions: Tensor,
    grad: Tensor,
    layout: HashLayout,
    n_used: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """buffer += gradient of the table, for the incoming gradient (n, n_levels * n_features) in any strides."""
    if buffer.dtype not in (torch.float32, torch.float16):
        raise InputError("sink buffer of table", "torch.float32 or torch.float16", str(buffer.dtype))
    if positions.shape[0] == 0:
        return
    n_coarse = _coarse_levels(layout)
    sums, scale, inverse = buffer, None, None
    if torch.are_deterministic_algorithms_enabled():
        scale, inverse = _fixed_point_scale(grad, n_used)
        sums = torch.zeros(buffer.shape, dtype=torch.int64, device=buffer.device)
    common = (sums, scale, found_inf, positions, grad, layout, n_used)
    _launch(*common, 0, n_coarse, True)
    _launch(*common, n_coarse, layout.n_levels - n_coarse, False)
    if inverse is not None:
        buffer.add_(sums.to(torch.float32) * inverse)


def _case(dtype: str, features: int, runs: bool, pair: bool = True, scale: str | None = None) -> CompileCase:
    signature = {
        "p_positions": "*fp32", "p_grad": "*fp16", "p_table": f"*{dtype}", "p_levels": "*i32", "p_scales": "*fp32",
        "p_used": "*i32", "p_found_inf": "*fp32", "n": "i32", "first_level": "i32",
        "stride_xc": "i32", "stride_gf": "i32",
    }  # fmt: skip
    constexprs = {
        "LEVELS": 8, "F": features, "BLOCK": RUN_BLOCK if runs else BLOCK, "PAIR": pair, "RUNS": runs,
        "stride_xn": 1, "stride_gn": 1, "p_scale": None,
    }  # fmt: skip
    if scale is not None:
        del constexprs["p_scale"]
        signature["p_scale"] = scale
    kind = "runs" if runs else "each"
    return CompileCase(
        _backward_table_kernel, signature, constexprs, RUN_WARPS if runs else WARPS,
        name=f"table-{dtype}-{features}-{kind}{'' if pair else '-lone'}",
    )  # fmt: skip


COMPILE_CASES = [
    *(
        _case(dtype, features, runs)
        for dtype, features in (("fp32", 2), ("fp16", 2), ("fp16", 4))
        for runs in (True, False)
    ),
    *(_case("fp32", features, runs, pair=False) for features in (2, 4) for runs in (True, False)),
    *(_case("i64", 2, runs, pair=False, scale="*fp32") for runs in (True, False)),
]
