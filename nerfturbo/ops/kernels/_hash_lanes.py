"""Another way to add up runs for the hash table's gradient: along each lane instead of across the lanes of a warp.

One program = BLOCK lanes x STEPS consecutive samples of one level. A lane walks over its samples and adds up eight
corners as long as they stay in one cell; when the cell changes it writes the sums out. No exchange between lanes, so
far fewer instructions than a segmented scan, for slightly more atomics, since a run also ends with its lane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..hash_encode import HashLayout
from ._common import CompileCase
from ._grid import level_constants, load_level, row_of, used_rows
from ._hash_backward import _add, _add_pair, _cell, _load_gradient
from ._launch import cdiv, launchable

BLOCK, STEPS, WARPS = 32, 8, 1


@triton.jit
def _flush(
    p_level, c: tl.constexpr, cx, cy, cz, b_near, b_far, m, nodes, hash_mask, p_scale,
    F: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Write the sums of the two corners along x at the (y, z) corner c."""
    row0 = row_of(cx, cy + (c & 1), cz + (c >> 1), nodes, hash_mask)
    row1 = row_of(cx + 1, cy + (c & 1), cz + (c >> 1), nodes, hash_mask)
    if PAIR:
        _add_pair(p_level, row0, row1, b_near, b_far, m, p_scale, F=F, BLOCK=BLOCK)
    else:
        p = p_level + tl.arange(0, F)[None, :]
        _add(p + (row0 * F)[:, None], b_near, m, p_scale)
        _add(p + (row1 * F)[:, None], b_far, m, p_scale)


@triton.jit
def _extend(b_sum, weight, b_grad, fresh):
    """The sum of a run: begun anew where `fresh`."""
    return tl.where(fresh[:, None], 0.0, b_sum) + weight[:, None] * b_grad


@launchable(do_not_specialize=["n", "first_level"], do_not_specialize_on_alignment=["stride_xc", "stride_gf"])
def _lanes_kernel(
    p_positions, p_grad, p_table, p_levels, p_scales, p_used, p_found_inf, p_scale, n, first_level,
    stride_xn, stride_xc, stride_gn, stride_gf,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    i_level = first_level + tl.program_id(0) % LEVELS
    start = (tl.program_id(0) // LEVELS) * (BLOCK * STEPS)
    n_used = used_rows(p_used, n)
    if start < n_used:
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        p_level = p_table + offset * F
        i_first = start + tl.arange(0, BLOCK) * STEPS
        n0 = tl.zeros([BLOCK, F], tl.float32)
        n1, n2, n3, f0, f1, f2, f3 = n0, n0, n0, n0, n0, n0, n0
        cx = tl.full([BLOCK], -1, tl.int32)
        cy, cz, live = cx, cx, cx * 0
        for k in range(STEPS + 1):  # the last round only writes
            i = i_first + k
            m = (i < n_used) & (k < STEPS)
            b_grad, m_any = _load_gradient(p_grad, p_found_inf, i, m, stride_gn, stride_gf, i_level, F=F, BLOCK=BLOCK)
            ix, iy, iz, fx, fy, fz = _cell(p_positions, i, m, stride_xn, stride_xc, scale)
            ix = tl.where(m, ix, -1)  # an unused sample ends the run before it
            fresh = (ix != cx) | (iy != cy) | (iz != cz)
            m_write = fresh & (live != 0)
            _flush(p_level, 0, cx, cy, cz, n0, f0, m_write, nodes, hash_mask, p_scale, F, BLOCK, PAIR)
            _flush(p_level, 1, cx, cy, cz, n1, f1, m_write, nodes, hash_mask, p_scale, F, BLOCK, PAIR)
            _flush(p_level, 2, cx, cy, cz, n2, f2, m_write, nodes, hash_mask, p_scale, F, BLOCK, PAIR)
            _flush(p_level, 3, cx, cy, cz, n3, f3, m_write, nodes, hash_mask, p_scale, F, BLOCK, PAIR)
            gx, gy, gz = 1.0 - fx, 1.0 - fy, 1.0 - fz
            n0 = _extend(n0, gx * gy * gz, b_grad, fresh)
            f0 = _extend(f0, fx * gy * gz, b_grad, fresh)
            n1 = _extend(n1, gx * fy * gz, b_grad, fresh)
            f1 = _extend(f1, fx * fy * gz, b_grad, fresh)
            n2 = _extend(n2, gx * gy * fz, b_grad, fresh)
            f2 = _extend(f2, fx * gy * fz, b_grad, fresh)
            n3 = _extend(n3, gx * fy * fz, b_grad, fresh)
            f3 = _extend(f3, fx * fy * fz, b_grad, fresh)
            live = tl.where(fresh, 0, live) | m_any.to(tl.int32)
            cx, cy, cz = ix, iy, iz


def launch_lanes(
    sums: Tensor, scale: Tensor | None, found_inf: Tensor | None, positions: Tensor, grad: Tensor, layout: HashLayout,
    n_used: Tensor | None, first: int, count: int, pair: bool,
) -> None:  # fmt: skip
    n = positions.shape[0]
    levels, scales = level_constants(layout, sums.device)
    _lanes_kernel[(cdiv(n, BLOCK * STEPS) * count,)](
        p_positions=positions, p_grad=grad, p_table=sums, p_levels=levels, p_scales=scales, p_used=n_used,
        p_found_inf=found_inf, p_scale=scale, n=n, first_level=first,
        stride_xn=positions.stride(0), stride_xc=positions.stride(1),
        stride_gn=grad.stride(0), stride_gf=grad.stride(1),
        LEVELS=count, F=layout.n_features, BLOCK=BLOCK, STEPS=STEPS, PAIR=pair, num_warps=WARPS,
    )  # fmt: skip


def _case(dtype: str, features: int, pair: bool, warps: int = WARPS) -> CompileCase:
    signature = {
        "p_positions": "*fp32", "p_grad": "*fp16", "p_table": f"*{dtype}", "p_levels": "*i32", "p_scales": "*fp32",
        "p_used": "*i32", "p_found_inf": "*fp32", "n": "i32", "first_level": "i32",
    }  # fmt: skip
    constexprs = {"LEVELS": 16, "F": features, "BLOCK": 32 * warps, "STEPS": STEPS, "PAIR": pair, "p_scale": None}
    constexprs |= {"stride_xn": 1, "stride_gn": 1, "stride_xc": 1 << 18, "stride_gf": 1 << 18}
    return CompileCase(_lanes_kernel, signature, constexprs, warps, name=f"lanes-{dtype}-{features}-{warps}")


COMPILE_CASES = [_case("fp32", 2, True), _case("fp16", 2, True), _case("fp16", 4, True), _case("fp32", 4, False)]
