"""Hash encoding on a GPU: the eight corners of each sample's cell, blended; and the gradients back.

Forward: one program = BLOCK samples of one level, level fastest in the grid. The two corners along x are neighbours in
the table wherever `row0 ^ row1 == 1`, and one load of 2 F numbers fetches both; elsewhere a second load is predicated
on. Stored feature-major. Backward to positions: one program = BLOCK samples, all levels in turn, so no atomics.
Backward to the table: as the forward, by atomic additions, of pairs (PAIR) and of sums over runs of samples in one cell
(RUNS), or without small ones (THIN); in deterministic mode of int64 fixed-point numbers (a scale). Of regions a program
takes the POINTS of its samples one after the other. docs/ops/hash_encode.md derives all three.

dtypes: positions fp32; table fp16, bf16 or fp32; weights and sums fp32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import InputError
from .. import _triton as gpu
from .._sink import GradientSink, Node, zero_tail
from .._triton import cdiv, check_kernel_float, launchable
from . import GROUP, HashLayout


@functools.lru_cache(maxsize=64)
def level_constants(layout: HashLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """(n_levels, 4) int32: first row / 8, nodes, mask of a hashed level (-1: dense), unused; (n_levels,) fp32 scales.
    Rows start at multiples of 8, so the first row stays in 32 bits however large the table is."""
    rows = [(lv.offset // 8, lv.nodes, lv.size - 1 if lv.hashed else -1, 0) for lv in layout.levels]
    constants = torch.tensor(rows, dtype=torch.int32).to(device)
    return constants, torch.tensor([lv.scale for lv in layout.levels], dtype=torch.float32).to(device)


@triton.jit
def cell_of(x, scale):
    """Cell and fraction of a coordinate along one axis."""
    p = gpu.clamp_unit(x) * scale + 0.5
    cell = p.to(tl.int32)  # p >= 0.5, so truncation is floor
    return cell, p - cell.to(tl.float32)


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
def _erf(x):
    """The error function of x >= 0, by the rational approximation of Hastings: off by 2e-7 at most."""
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 1.0 - series * tl.exp(-x * x)


@triton.jit
def _point_weight(p_footprints, i, m, k, stride, scale, POINTS: tl.constexpr):
    """What a level counts at the k-th point of each sample: one of POINTS, faded by its footprint."""
    footprint = tl.load(p_footprints + i + k * stride, mask=m, other=1.0)
    return _erf(1.0 / (2.8284271 * tl.maximum(footprint, 1e-12) * scale)) / POINTS  # at a point no level fades


BLOCK, WARPS = GROUP, 4
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
    x, y, z = gpu.load_point(p_positions, i, m, stride_xn, stride_xc)
    ix, fx = cell_of(x, scale)
    iy, fy = cell_of(y, scale)
    iz, fz = cell_of(z, scale)
    return ix, iy, iz, fx, fy, fz


@triton.jit
def _thin_out(b_grad, m_any, p_positions, i, m, i_level, stride_xn, stride_xc, thin, BLOCK: tl.constexpr):
    """`thin_out` of the reference, of one group."""
    x, y, z = gpu.load_point(p_positions, i, m, stride_xn, stride_xc)
    bits = x.to(tl.int32, bitcast=True) ^ (y.to(tl.int32, bitcast=True) * -1640531535)
    bits = (bits ^ (z.to(tl.int32, bitcast=True) * 805459861)) + i_level * 374761393
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2048144789
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * -1028477379
    chance = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    size = tl.max(tl.abs(b_grad), 1)
    least = tl.sum(size, 0) * (thin / BLOCK)
    factor = tl.where(size < least, least / tl.where(size > 0.0, size, 1.0), 1.0)
    return b_grad * factor[:, None], m_any & (size > chance * least)


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
    p_positions, p_footprints, p_grad, p_table, p_levels, p_scales, p_used, p_found_inf, p_scale, n, first_level,
    stride_xn, stride_xk, stride_xc, stride_fk, stride_gn, stride_gf, thin,
    F: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, RUNS: tl.constexpr, THIN: tl.constexpr,
    POINTS: tl.constexpr,
):  # fmt: skip
    i_level, start = first_level + tl.program_id(1), tl.program_id(0) * BLOCK
    n_used = gpu.used_rows(p_used, n)
    if start < n_used:
        i = start + tl.arange(0, BLOCK)
        m = i < n_used
        b_grad, m_write = _load_gradient(p_grad, p_found_inf, i, m, stride_gn, stride_gf, i_level, F=F, BLOCK=BLOCK)
        if THIN:
            b_grad, m_write = _thin_out(b_grad, m_write, p_positions, i, m, i_level, stride_xn, stride_xc, thin, BLOCK)
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        for k in range(POINTS):
            p_points, b_part, m_add = p_positions + k * stride_xk, b_grad, m_write
            if p_footprints is not None:
                b_part *= _point_weight(p_footprints, i, m, k, stride_fk, scale, POINTS)[:, None]
            ix, iy, iz, fx, fy, fz = _cell(p_points, i, m, stride_xn, stride_xc, scale)
            flags = tl.zeros([BLOCK, F], tl.int32)
            if RUNS:
                first, last = _run_bounds(p_points, i, n_used, stride_xn, stride_xc, scale, ix, iy, iz, BLOCK=BLOCK)
                flags += first.to(tl.int32)[:, None]
                m_add = m & last
            for c in tl.static_range(4):
                jy, jz = iy + (c & 1), iz + (c >> 1)
                weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
                row0 = row_of(ix, jy, jz, nodes, hash_mask)
                row1 = row_of(ix + 1, jy, jz, nodes, hash_mask)
                b_near = (weight * (1.0 - fx))[:, None] * b_part
                b_far = (weight * fx)[:, None] * b_part
                if RUNS:
                    _flags, b_near = tl.associative_scan((flags, b_near), 0, _join_runs)
                    _flags, b_far = tl.associative_scan((flags, b_far), 0, _join_runs)
                if PAIR:
                    _add_pair(p_table + offset * F, row0, row1, b_near, b_far, m_add, p_scale, F=F, BLOCK=BLOCK)
                else:
                    p = p_table + offset * F + tl.arange(0, F)[None, :]
                    _add(p + (row0 * F)[:, None], b_near, m_add, p_scale)
                    _add(p + (row1 * F)[:, None], b_far, m_add, p_scale)


@functools.lru_cache(maxsize=16)
def _vector_atomics(device: torch.device) -> bool:
    """Whether blocks of two and four fp32 numbers are one atomic operation."""
    if device.type != "cuda":
        return True  # the interpreter takes either; exercise the one that fast GPUs take
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


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


def _points(positions: Tensor, footprints: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel that say where the points of a sample are; `footprints` are stored point by point."""
    if footprints is None:
        (n, c), k, step, points = positions.stride(), 0, 0, 1
    else:
        (n, k, c), (step, points) = positions.stride(), footprints.shape
    strides = {"stride_xn": n, "stride_xk": k, "stride_xc": c, "stride_fk": step}
    return {"p_positions": positions, "p_footprints": footprints, "POINTS": points, **strides}


def table_gradient(
    buffer, positions, grad, layout, n_used, found_inf, thin=0.0, footprints=None
) -> Callable[[int, int], None]:
    """What adds rows of whole levels to a buffer of the table's gradient, for the incoming gradient (n, n_levels *
    n_features) in any strides. `thin`, as a sink has it, counts on levels that are not added up in runs."""
    if buffer.dtype not in (torch.float32, torch.float16):
        raise InputError("sink buffer of table", "torch.float32 or torch.float16", str(buffer.dtype))
    n, n_coarse = positions.shape[0], _coarse_levels(layout)
    if n == 0:
        return lambda first_row, last_row: None
    sums, scale, inverse = buffer, None, None
    if torch.are_deterministic_algorithms_enabled():
        scale, inverse = _fixed_point_scale(grad, n_used)
        sums = torch.zeros(buffer.shape, dtype=torch.int64, device=buffer.device)
    levels, scales = level_constants(layout, sums.device)
    # A vector atomic holds 16 bytes.
    pair = 2 * layout.n_features * sums.element_size() <= 16
    pair = pair and (sums.dtype == torch.float16 or _vector_atomics(sums.device))

    def add(first_row: int, last_row: int) -> None:
        start, end = layout.levels_of(first_row, last_row)
        for first, last, runs in ((start, min(end, n_coarse), True), (max(start, n_coarse), end, False)):
            block = RUN_BLOCK if runs else BLOCK
            if first < last:
                # Level after level: the cache holds one of them, not a whole table.
                _backward_table_kernel[(cdiv(n, block), last - first)](
                    p_grad=grad, p_table=sums, p_levels=levels, p_scales=scales, p_used=n_used,
                    p_found_inf=found_inf, p_scale=scale, n=n, first_level=first,
                    stride_gn=grad.stride(0), stride_gf=grad.stride(1), thin=thin, F=layout.n_features, BLOCK=block,
                    PAIR=pair, RUNS=runs, THIN=thin > 0.0 and not runs, num_warps=RUN_WARPS if runs else WARPS,
                    **_points(positions, footprints),
                )  # fmt: skip
        if inverse is not None:
            buffer[first_row:last_row].add_(sums[first_row:last_row].to(torch.float32) * inverse)

    return add


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


@triton.jit
def encode_level(
    p_positions, p_table, p_levels, p_scales, i, m, i_level, stride_xn, stride_xc, F: tl.constexpr, BLOCK: tl.constexpr
):
    """One level of the encoding of BLOCK samples: [BLOCK, 2 F] of pairs and [BLOCK, F] of lone corners, to be added."""
    offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
    ix, iy, iz, fx, fy, fz = _cell(p_positions, i, m, stride_xn, stride_xc, scale)
    b_pair = tl.zeros([BLOCK, 2 * F], tl.float32)
    b_lone = tl.zeros([BLOCK, F], tl.float32)
    for c in tl.static_range(4):
        weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
        row0 = row_of(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        row1 = row_of(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        pair, lone = _blend_x(p_table + offset * F, row0, row1, fx, weight, m, F)
        b_pair += pair
        b_lone += lone
    return b_pair, b_lone


@triton.jit
def store_level(p_out, b_pair, b_lone, i, m, i_level, stride, F: tl.constexpr):
    """The sums of `encode_level` as columns of p_out, feature-major."""
    for f in tl.static_range(F):
        # The column index of a register is a constant, so these sums are register picks, not reductions.
        value = tl.sum(tl.where((tl.arange(0, 2 * F) % F == f)[None, :], b_pair, 0.0), 1)
        value += tl.sum(tl.where((tl.arange(0, F) == f)[None, :], b_lone, 0.0), 1)
        tl.store(p_out + (i_level * F + f).to(tl.int64) * stride + i, value.to(p_out.dtype.element_ty), mask=m)


# One sample a thread: what a stride is divisible by helps no access, and would have these compiled per number of rows.
_STRIDES = ["stride_xk", "stride_xc", "stride_fk"]


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=[*_STRIDES, "stride_of"])
def _forward_kernel(
    p_positions, p_footprints, p_table, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xk, stride_xc,
    stride_fk, stride_of, F: tl.constexpr, BLOCK: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    i_level, start = tl.program_id(1), tl.program_id(0) * BLOCK
    i = start + tl.arange(0, BLOCK)
    n_used = gpu.used_rows(p_used, n)
    b_pair = tl.zeros([BLOCK, 2 * F], tl.float32)
    b_lone = tl.zeros([BLOCK, F], tl.float32)
    if start < n_used:
        for k in range(POINTS):
            p_points, m = p_positions + k * stride_xk, i < n_used
            pair, lone = encode_level(
                p_points, p_table, p_levels, p_scales, i, m, i_level, stride_xn, stride_xc, F, BLOCK
            )
            if p_footprints is not None:
                scale = tl.load(p_scales + i_level)
                weight = _point_weight(p_footprints, i, m, k, stride_fk, scale, POINTS)[:, None]
                pair, lone = pair * weight, lone * weight
            b_pair += pair
            b_lone += lone
    store_level(p_out, b_pair, b_lone, i, i < n, i_level, stride_of, F)  # rows past the used ones become zero


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=[*_STRIDES, "stride_gf"])
def _backward_positions_kernel(
    p_positions, p_footprints, p_table, p_grad, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xk, stride_xc,
    stride_fk, stride_gn, stride_gf, LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    i, m = gpu.own_block(gpu.used_rows(p_used, n), BLOCK)
    i_feature = tl.arange(0, F)
    x, y, z = gpu.load_point(p_positions + k * stride_xk, i, m, stride_xn, stride_xc)
    gx = tl.zeros([BLOCK], tl.float32)
    gy, gz = gx, gx
    for i_level in range(LEVELS):
        offset, nodes, hash_mask, scale = load_level(p_levels, p_scales, i_level)
        ix, fx = cell_of(x, scale)
        iy, fy = cell_of(y, scale)
        iz, fz = cell_of(z, scale)
        columns = (i_level * F + i_feature).to(tl.int64) * stride_gf
        p = p_grad + i.to(tl.int64)[:, None] * stride_gn + columns[None, :]
        b_grad = tl.load(p, mask=m[:, None], other=0.0).to(tl.float32)  # [BLOCK, F]
        slope = scale
        if p_footprints is not None:
            slope = scale * _point_weight(p_footprints, i, m, k, stride_fk, scale, POINTS)
        for c in tl.static_range(8):
            row = row_of(ix + (c & 1), iy + ((c >> 1) & 1), iz + (c >> 2), nodes, hash_mask)
            p = p_table + offset * F + (row * F)[:, None] + i_feature[None, :]
            b_entry = tl.load(p, mask=m[:, None], other=0.0).to(tl.float32)
            dot = tl.sum(b_grad * b_entry, 1) * slope
            gx, gy, gz = gpu.add_slopes(gx, gy, gz, dot, fx, fy, fz, c)
    gpu.store_slopes(p_out + k * 3 * n, i, n, m, x, y, z, gx, gy, gz)


def encode_forward(
    positions: Tensor, table: Tensor, layout: HashLayout, n_used: Tensor | None, footprints: Tensor | None = None
) -> Tensor:
    n = positions.shape[0]
    out = gpu.feature_major(n, layout.n_outputs, table.dtype, table.device)
    if n:
        levels, scales = level_constants(layout, table.device)
        _forward_kernel[(cdiv(n, BLOCK), layout.n_levels)](
            p_table=table, p_out=out, p_levels=levels, p_scales=scales, p_used=n_used, n=n, stride_of=out.stride(1),
            F=layout.n_features, BLOCK=BLOCK, num_warps=WARPS, **_points(positions, footprints),
        )  # fmt: skip
    return out


def positions_gradient(positions, table, grad, layout, n_used, footprints=None) -> Tensor:
    n, points = positions.shape[0], _points(positions, footprints)
    out = torch.empty(points["POINTS"], 3, n, dtype=torch.float32, device=positions.device)
    if n:
        levels, scales = level_constants(layout, table.device)
        _backward_positions_kernel[(cdiv(n, BLOCK), points["POINTS"])](
            p_table=table, p_grad=grad, p_out=out, p_levels=levels, p_scales=scales, p_used=n_used, n=n,
            stride_gn=grad.stride(0), stride_gf=grad.stride(1),
            LEVELS=layout.n_levels, F=layout.n_features, BLOCK=BLOCK, num_warps=WARPS, **points,
        )  # fmt: skip
    return out.permute(2, 0, 1).view(positions.shape)


class _HashEncode(Node):
    @staticmethod
    def forward(ctx, positions, table, half, layout, sink, n_used, footprints) -> Tensor:
        source = table if half is None else half
        ctx.save_for_backward(positions, source if ctx.needs_input_grad[0] else None, n_used, footprints)
        ctx.layout, ctx.sink, ctx.like = layout, sink, (table.shape, table.dtype)
        return encode_forward(positions, source, layout, n_used, footprints)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, source, n_used, footprints = ctx.saved_tensors
        grad_positions = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_positions = positions_gradient(positions, source, grad, ctx.layout, n_used, footprints)
        if ctx.needs_input_grad[1]:
            (shape, dtype), sink = ctx.like, ctx.sink
            if sink is None:
                sink = GradientSink((torch.zeros(shape, dtype=torch.float32, device=grad.device),))
            buffer, flags = sink.buffers[0], (sink.found_inf, sink.thin)
            sink.add(table_gradient(buffer, positions, grad, ctx.layout, n_used, *flags, footprints))
            grad_table = sink.buffers[0].to(dtype) if ctx.sink is None else None
        return grad_positions, grad_table


def hash_encode(positions, table, layout, *, half=None, sink=None, n_used=None, footprints=None) -> Tensor:
    check_kernel_float(positions=positions, table=table, half=half, footprints=footprints)
    positions, table = positions.float(), table.contiguous()
    if half is not None:
        half = half.detach().contiguous()
    if not torch.is_grad_enabled():  # looking ahead, many times: without what autograd costs
        return encode_forward(positions, table if half is None else half, layout, n_used, footprints)
    return _HashEncode.apply(positions, table, half, layout, sink, n_used, footprints)


def encode_regions(positions, footprints, table, layout, *, half=None, sink=None, n_used=None) -> Tensor:
    by_point = footprints.float().t().contiguous().t()
    return hash_encode(positions, table, layout, half=half, sink=sink, n_used=n_used, footprints=by_point)
