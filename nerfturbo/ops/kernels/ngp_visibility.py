"""Density and visibility in one walk along the rays, from the front, until they are opaque.

Two launches. The first lists the rays that have samples, long ones from the front of the list and short ones from its
back, so that none of the long ones is begun last. Then persistent programs, each with SLOTS slots: a slot holds one
ray, takes its next STEPS samples in each round, and takes another ray from the list, by an atomic counter, once its own
has ended or is opaque. So every round works on a full tile of SLOTS * STEPS samples, whatever the rays' lengths.
Samples of a tile are encoded for all levels at once, and multiplied on tensor cores.

dtypes: rays and intervals fp32; table fp16, bf16 or fp32 sets the operand type; weights and sums fp32. Which slot
takes which ray depends on timing, the result does not: deterministic.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import PackedSamples
from ..ngp_field import MAX_LOGIT
from ..ngp_visibility import NgpDensity
from ..thinning import OPAQUE, Thinning, visible_thickness
from ._common import INTERPRETED, CompileCase, check_kernel_float, one_minus_exp, processors, scalar_or_pointer
from ._grid import clamp_unit, level_constants
from ._launch import cdiv, launchable
from ._mlp import fits, fp32_precision, load_weight, operand_type, padded, relu_layer
from ._ngp_density import ngp_density
from .composite import visibility
from .sample_positions import sample_positions
from .thinning import thin_codes

SLOTS, STEPS, WARPS, PROGRAMS = 16 if INTERPRETED else 4, 8, 4, 4
LIST_BLOCK = 512
LONG = 48  # samples of a ray that is begun early
THICK = tl.constexpr(OPAQUE)  # more would only cost digits in sums
HEADER = 16  # bytes before the flags, zeroed with them: the counters n_long, n_short, n_taken


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


@launchable(do_not_specialize=["n_rays"])
def _list_kernel(p_offsets, p_counters, p_list, n_rays, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """p_list (n_rays, 4) int32: ray, first sample and end of the rays that have any."""
    i_ray = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(p_offsets + i_ray, mask=i_ray < n_rays, other=0)
    end = tl.load(p_offsets + i_ray + 1, mask=i_ray < n_rays, other=0)
    is_long = (end - start >= LONG).to(tl.int32)
    is_short = (end > start).to(tl.int32) - is_long
    first_long = tl.atomic_add(p_counters, tl.sum(is_long, 0), sem="relaxed")
    first_short = tl.atomic_add(p_counters + 1, tl.sum(is_short, 0), sem="relaxed")
    from_front = first_long + tl.cumsum(is_long, 0) - 1
    from_back = n_rays - first_short - tl.cumsum(is_short, 0)
    p = p_list + tl.where(is_long > 0, from_front, from_back) * 4
    m = end > start
    tl.store(p, i_ray, mask=m)
    tl.store(p + 1, start, mask=m)
    tl.store(p + 2, end, mask=m)


@triton.jit
def _refill(p_counters, p_list, slots, n_rays):
    """Hand rays to the slots whose own is done, while any are left; `taken` is the place last read in the list."""
    ray, place, end, depth, taken = slots
    n_long = tl.load(p_counters)
    n_listed = n_long + tl.load(p_counters + 1)
    done = place >= end
    n_done = tl.sum(done.to(tl.int32), 0)
    if (n_done > 0) & (taken < n_listed):
        taken = tl.atomic_add(p_counters + 2, n_done, sem="relaxed")
        index = taken + tl.cumsum(done.to(tl.int32), 0) - 1
        m = done & (index < n_listed)
        p = p_list + tl.where(index < n_long, index, n_rays - 1 - (index - n_long)) * 4
        ray = tl.where(m, tl.load(p, mask=m, other=0), ray)
        place = tl.where(m, tl.load(p + 1, mask=m, other=0), place)
        end = tl.where(m, tl.load(p + 2, mask=m, other=0), end)
        depth = tl.where(m, 0.0, depth)
    return ray, place, end, depth, taken


@triton.jit
def _coordinate(p_origins, p_directions, ray, middle, low, scale, AXIS: tl.constexpr):
    """(SLOTS * STEPS,): one coordinate of the samples, with the box at [0, 1]."""
    origin = tl.load(p_origins + ray * 3 + AXIS)[:, None]
    direction = tl.load(p_directions + ray * 3 + AXIS)[:, None]
    return tl.reshape((origin + middle * direction - low) * scale, [middle.numel])


@triton.jit
def _blend_pairs(p_level, row0, row1, fx, weight, m, F: tl.constexpr):
    """The two corners along x times `weight`, as [ROWS, BLOCK, 2 F] whose two halves are yet to be added.

    Rows are read as aligned pairs, the second one only where it is another pair than the first: both loads have one
    layout of threads, so that the arithmetic of rows and weights is not done once for each of two.
    """
    i_pair = tl.arange(0, 2 * F)[None, None, :]
    paired = (row0 >> 1) == (row1 >> 1)
    b_first = tl.load(p_level + ((row0 >> 1) * (2 * F))[:, :, None] + i_pair, mask=m, other=0.0)
    m_second = m & (paired == 0)[:, :, None]
    b_second = tl.load(p_level + ((row1 >> 1) * (2 * F))[:, :, None] + i_pair, mask=m_second, other=0.0)
    near, far = weight * (1.0 - fx), weight * fx
    is_near = (i_pair // F) == (row0 & 1)[:, :, None]
    is_far = (i_pair // F) == (row1 & 1)[:, :, None]
    b_near = tl.where(is_near, near[:, :, None], tl.where(paired, far, 0.0)[:, :, None]) * b_first.to(tl.float32)
    return b_near + tl.where(is_far, far[:, :, None], 0.0) * b_second.to(tl.float32)


@triton.jit
def _encode_points(
    p_table, p_levels, p_scales, x, y, z, m,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK, ROWS * F]: the encoding of BLOCK points; levels from LEVELS to ROWS are zero."""
    i_level = tl.arange(0, ROWS)
    m_level = i_level < LEVELS
    p = p_levels + i_level * 4
    offset = tl.load(p, mask=m_level, other=0).to(tl.int64) * (8 * F)
    nodes = tl.load(p + 1, mask=m_level, other=0)[:, None]
    hash_mask = tl.load(p + 2, mask=m_level, other=0)[:, None]
    scale = tl.load(p_scales + i_level, mask=m_level, other=0.0)
    ix, fx = _cells(x, scale)
    iy, fy = _cells(y, scale)
    iz, fz = _cells(z, scale)
    m_entry = (m_level[:, None] & m[None, :])[:, :, None]
    p_level = p_table + offset[:, None, None]
    b_pair = tl.zeros([ROWS, BLOCK, 2 * F], tl.float32)
    for c in tl.static_range(4):
        weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
        row0 = _rows(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        row1 = _rows(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        b_pair += _blend_pairs(p_level, row0, row1, fx, weight, m_entry, F)
    b_sum = tl.sum(tl.reshape(b_pair, [ROWS, BLOCK, 2, F]), 2)
    return tl.reshape(tl.permute(b_sum, (1, 0, 2)), [BLOCK, ROWS * F])


@launchable(do_not_specialize=["n_rays"])
def _visible_kernel(
    p_origins, p_directions, p_starts, p_ends, p_counters, p_list, p_table, p_levels, p_scales, p_w1, p_w2,
    p_alpha_thre, p_keep, p_optical, n_rays, box, limit, alpha_thre, MAX_LOGIT: tl.constexpr,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, DH: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """p_keep must hold zeros: only samples that are visible are written. `limit` is the optical depth of the end.
    With `p_optical`, their thickness is written there instead."""
    if p_alpha_thre is not None:
        alpha_thre = tl.load(p_alpha_thre)
    W1 = load_weight(p_w1, ROWS * F, PH, LEVELS * F, DH, LEVELS * F, T)
    i_hidden = tl.arange(0, PH)
    w2 = tl.load(p_w2 + i_hidden, mask=i_hidden < DH, other=0.0).to(T).to(tl.float32)
    nothing = tl.zeros([SLOTS], tl.int32)
    slots = (nothing, nothing, nothing, tl.zeros([SLOTS], tl.float32), tl.full((), 0, tl.int32))
    ray, place, end, depth, taken = _refill(p_counters, p_list, slots, n_rays)
    while tl.max((place < end).to(tl.int32), 0) > 0:
        row = place[:, None] + tl.arange(0, STEPS)[None, :]
        m = row < end[:, None]
        t0 = tl.load(p_starts + row, mask=m, other=0.0)
        t1 = tl.load(p_ends + row, mask=m, other=0.0)
        middle = 0.5 * (t0 + t1)
        x = _coordinate(p_origins, p_directions, ray, middle, box[0], box[3], 0)
        y = _coordinate(p_origins, p_directions, ray, middle, box[1], box[4], 1)
        z = _coordinate(p_origins, p_directions, ray, middle, box[2], box[5], 2)
        b_x = _encode_points(
            p_table, p_levels, p_scales, x, y, z, tl.reshape(m, [SLOTS * STEPS]),
            LEVELS=LEVELS, ROWS=ROWS, F=F, BLOCK=SLOTS * STEPS,
        )  # fmt: skip
        h = relu_layer(b_x.to(T), W1, T, PRECISION)
        logit = tl.sum(h.to(tl.float32) * w2[None, :], 1)
        # This gather keeps the order, but ends the product's layout, in which each thread would hold four samples.
        logit = tl.reshape(tl.gather(logit, tl.arange(0, SLOTS * STEPS), 0), [SLOTS, STEPS])
        optical = tl.exp(tl.where(logit > MAX_LOGIT, MAX_LOGIT, logit)) * (t1 - t0)
        counted = m & (one_minus_exp(optical) >= alpha_thre)  # false for NaN
        optical = tl.where(counted, tl.minimum(optical, THICK), 0.0)
        before = depth[:, None] + (tl.cumsum(optical, 1) - optical)
        if p_optical is not None:
            tl.store(p_optical + row, optical, mask=counted & (before <= limit))
        else:
            tl.store(p_keep + row, tl.full([SLOTS, STEPS], 1, tl.uint8), mask=counted & (before <= limit))
        depth += tl.sum(optical, 1)
        place = tl.where(depth <= limit, place + STEPS, end)
        ray, place, end, depth, taken = _refill(p_counters, p_list, (ray, place, end, depth, taken), n_rays)


def _launch(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    field: NgpDensity,
    limit: float,
    alpha_thre: float | Tensor,
    thinning: Thinning | None,
) -> Tensor:
    table, layout = field.table.detach().contiguous(), field.layout
    density_in, density_out = (w.detach().contiguous() for w in field.weights)
    check_kernel_float(table=table, density_in=density_in, density_out=density_out)
    device, n_rays, features, hidden = table.device, samples.n_rays, layout.n_features, density_in.shape[0]
    # What is written, flags or thickness, lies behind the counters: one memory, zeroed at once.
    dtype = torch.uint8 if thinning is None else torch.float32
    zeros = torch.zeros(HEADER // dtype.itemsize + samples.capacity, dtype=dtype, device=device)
    counters, seen = zeros[: HEADER // dtype.itemsize].view(torch.int32), zeros[HEADER // dtype.itemsize :]
    rays = torch.empty(n_rays, 4, dtype=torch.int32, device=device)
    _list_kernel[(cdiv(n_rays, LIST_BLOCK),)](
        p_offsets=samples.offsets, p_counters=counters, p_list=rays, n_rays=n_rays, LONG=LONG, BLOCK=LIST_BLOCK,
        num_warps=4,
    )  # fmt: skip
    number, pointer = scalar_or_pointer(alpha_thre, device)
    levels, scales = level_constants(layout, device)
    _visible_kernel[(min(cdiv(n_rays, SLOTS), PROGRAMS * processors(device)),)](
        p_origins=origins, p_directions=directions, p_starts=samples.t_starts.contiguous(),
        p_ends=samples.t_ends.contiguous(), p_counters=counters, p_list=rays, p_table=table, p_levels=levels,
        p_scales=scales, p_w1=density_in, p_w2=density_out, p_alpha_thre=pointer,
        p_keep=seen if thinning is None else None, p_optical=None if thinning is None else seen, n_rays=n_rays,
        box=(*field.aabb.low, *(1.0 / size for size in field.aabb.size)), limit=limit, alpha_thre=number,
        MAX_LOGIT=MAX_LOGIT, LEVELS=layout.n_levels, ROWS=_rows_for(layout.n_levels, features), F=features,
        DH=hidden, PH=padded(hidden), T=operand_type(table.dtype, device), PRECISION=fp32_precision(),
        SLOTS=SLOTS, STEPS=STEPS, num_warps=WARPS,
    )  # fmt: skip
    return seen.view(torch.bool) if thinning is None else thin_codes(seen, samples, thinning)


def _rows_for(levels: int, features: int) -> int:
    """Levels of a tile: a power of two, and at least the 16 columns that a tensor core multiplies."""
    return max(16 // features, 1 << (levels - 1).bit_length())


def ngp_visibility(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    field: NgpDensity,
    *,
    early_stop_eps: float,
    alpha_thre: float | Tensor,
    thinning: Thinning | None = None,
) -> Tensor:
    if samples.capacity == 0 or samples.n_rays == 0:
        dtype = torch.bool if thinning is None else torch.uint8
        return torch.zeros(samples.capacity, dtype=dtype, device=origins.device)
    check_kernel_float(origins=origins, directions=directions)
    origins, directions = origins.detach().float().contiguous(), directions.detach().float().contiguous()
    if not fits(field.weights, field.table.dtype, origins.device):
        positions = sample_positions(origins, directions, samples, aabb=field.aabb)
        logits = ngp_density(positions, field.table, field.layout, field.weights, n_used=samples.n_samples)
        density = logits.clamp(max=MAX_LOGIT).exp()
        keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
        if thinning is None:
            return keep
        return thin_codes(visible_thickness(density, samples, keep), samples, thinning)
    limit = math.inf if early_stop_eps <= 0.0 else -math.log(early_stop_eps)  # T >= eps is depth <= -log(eps)
    return _launch(origins, directions, samples, field, limit, alpha_thre, thinning)


def _case(features: int, dtype: str = "fp16", hidden: int = 64, *, thin: bool = False) -> CompileCase:
    floats = ("p_origins", "p_directions", "p_starts", "p_ends", "p_scales", "p_w1", "p_w2", "p_alpha_thre")
    signature: dict[str, str | tuple[str, ...]] = dict.fromkeys(floats, "*fp32")
    signature |= {"p_counters": "*i32", "p_list": "*i32", "p_table": f"*{dtype}", "p_levels": "*i32"}
    signature |= {"n_rays": "i32", "box": ("fp32",) * 6, "limit": "fp32", "alpha_thre": "fp32"}
    operand = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    constexprs = {"LEVELS": 32 // features, "ROWS": 32 // features, "F": features, "DH": hidden, "PH": hidden}
    constexprs |= {"T": operand, "PRECISION": "tf32", "SLOTS": SLOTS, "STEPS": STEPS, "MAX_LOGIT": MAX_LOGIT}
    name = f"visible-{dtype}-{features}-{hidden}{'-thin' if thin else ''}"
    if thin:
        return CompileCase(
            _visible_kernel, signature | {"p_optical": "*fp32"}, constexprs | {"p_keep": None}, WARPS, name=name
        )
    return CompileCase(
        _visible_kernel, signature | {"p_keep": "*u8"}, constexprs | {"p_optical": None}, WARPS, name=name
    )


_LIST = {"p_offsets": "*i32", "p_counters": "*i32", "p_list": "*i32", "n_rays": "i32"}
COMPILE_CASES = [CompileCase(_list_kernel, _LIST, {"LONG": LONG, "BLOCK": LIST_BLOCK}, 4)]
TENSOR_CORE_CASES = [_case(2), _case(4), _case(4, "bf16"), _case(4, "fp32"), _case(4, hidden=128), _case(4, thin=True)]
