"""Sums, scans and compaction of packed samples. Layouts and tiles as in `_triton`; values fp16/bf16/fp32, fp32 inside.
A program sums or scans a tile of rays; the backward of a sum spreads a ray's gradient, that of a scan is the scan in
the other direction. Offsets are one launch: who counts also leaves the sum of every GROUP rays. Program p owns
FIT_BLOCK rays and adds up all sums before its own itself, which beats handing a total from program to program. Rays are
kept whole from the first on; a program that starts past the overflow looks for the place where it happened. No atomics;
nothing is read back when a capacity is given. Derivations: docs/ops/packed.md."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import PackedSamples
from .. import _triton as gpu
from .._sink import linear
from .._triton import INTERPRETED, TAIL_BLOCK, cdiv, check_kernel_float, launchable, next_power_of_2
from ..composite import PER_OCTAVE

GROUP = 4  # rays behind one sum
FIT_BLOCK = 1024  # rays of one program
WIDE = 1024 if INTERPRETED else 16384  # sums added at a time
MOST = (1 << 31) - 1  # offsets are int32


@triton.jit
def _fit_block(p_values, first, end, base, capacity, BLOCK: tl.constexpr, SUM: tl.constexpr):
    """Totals up to and including each value of a block, summed in SUM, and the largest of them that fits."""
    i = first + tl.arange(0, BLOCK)
    total = base + tl.cumsum(tl.load(p_values + i, mask=i < end, other=0).to(SUM), 0).to(tl.int64)
    return i, total, tl.maximum(base, tl.max(tl.where(total <= capacity, total, 0), 0))


@triton.jit
def _used_at_overflow(p_counts, p_sums, n_rays, capacity, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Samples of the rays that fit, where not all do: walk over the sums, then over the group that breaks."""
    n_sums = (n_rays + GROUP - 1) // GROUP
    base = tl.zeros([], tl.int64)
    group = 0
    first = 0
    last_total = base
    while last_total <= capacity:
        i, total, base = _fit_block(p_sums, first, n_sums, last_total, capacity, BLOCK, tl.int64)
        group = first + tl.sum((total <= capacity).to(tl.int32), 0)
        last_total = tl.max(total, 0)
        first += BLOCK
    i, total, used = _fit_block(p_counts, group * GROUP, n_rays, base, capacity, GROUP, tl.int32)
    return used


@launchable(do_not_specialize=["n_rays", "capacity"])
def _fit_kernel(
    p_counts, p_sums, p_offsets, p_kept, p_limit, n_rays, capacity,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * BLOCK
    base = tl.zeros([], tl.int64)
    for first in range(0, own // GROUP, WIDE):
        i = first + tl.arange(0, WIDE)
        base += tl.sum(tl.load(p_sums + i, mask=i < own // GROUP, other=0).to(tl.int64), 0)
    if own == 0:
        tl.store(p_offsets, 0)
    if base > capacity:
        used = _used_at_overflow(p_counts, p_sums, n_rays, capacity, GROUP, BLOCK)
        i = own + tl.arange(0, BLOCK)
        tl.store(p_offsets + 1 + i, (used + tl.zeros([BLOCK], tl.int64)).to(tl.int32), mask=i < n_rays)
    else:
        i, total, used = _fit_block(p_counts, own, n_rays, base, capacity, BLOCK, tl.int32)  # a ray has 2^20 at most
        tl.store(p_offsets + 1 + i, tl.minimum(total, used).to(tl.int32), mask=i < n_rays)
        if p_kept is not None:
            if (tl.max(total, 0) > capacity) | (own + BLOCK >= n_rays):
                kept = own + tl.sum(((total <= capacity) & (i < n_rays)).to(tl.int32), 0)
                if p_limit is not None:
                    kept = tl.minimum(kept, tl.load(p_limit))
                tl.store(p_kept, kept)


def empty_counts(n_rays: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the samples of each ray and of each GROUP rays."""
    counts = torch.empty(n_rays, dtype=torch.int32, device=device)
    return counts, torch.empty(cdiv(n_rays, GROUP), dtype=torch.int32, device=device)


def fit_offsets(counts, sums, capacity, limit=None) -> tuple[Tensor, Tensor | None]:
    """offsets (n_rays + 1,) int32 and, for a fixed capacity, how many whole rays fit, at most `limit`: () int32."""
    n_rays, device = counts.shape[0], counts.device
    kept = None if capacity is None else torch.empty((), dtype=torch.int32, device=device)
    if n_rays == 0:
        if kept is not None:
            kept.zero_()
        return torch.zeros(1, dtype=torch.int32, device=device), kept
    offsets = torch.empty(n_rays + 1, dtype=torch.int32, device=device)
    _fit_kernel[(cdiv(n_rays, FIT_BLOCK),)](
        counts, sums, offsets, kept, limit, n_rays, MOST if capacity is None else capacity,
        GROUP=GROUP, BLOCK=FIT_BLOCK, WIDE=WIDE, num_warps=8,
    )  # fmt: skip
    return offsets, kept


OCTAVE = tl.constexpr(PER_OCTAVE)
CHANNELS = 4  # summed by one program; the grid's second axis takes the rest


@launchable(do_not_specialize=["n_rays"])
def _sum_kernel(
    p_values, p_offsets, p_out, n_rays, n_channels, stride_row, stride_channel,
    CHANNELS: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    i_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), tl.num_programs(0)):
        i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
        total = tl.zeros([RAYS, CHANNELS], tl.float32)
        for k in range(0, tl.max(count, 0), STEPS):
            step = k + tl.arange(0, STEPS)
            m = step[None, :] < count[:, None]  # (RAYS, STEPS)
            row = (start[:, None] + step[None, :]).to(tl.int64) * stride_row
            for c in tl.static_range(CHANNELS):
                channel = tl.program_id(1) * CHANNELS + c
                value = tl.load(p_values + row + channel * stride_channel, mask=m & (channel < n_channels), other=0.0)
                part = tl.sum(value.to(tl.float32), 1)
                total += tl.where(i_channel[None, :] == channel, part[:, None], 0.0)
        m_out = m_ray[:, None] & (i_channel[None, :] < n_channels)
        tl.store(p_out + i_ray.to(tl.int64)[:, None] * n_channels + i_channel[None, :], total, mask=m_out)


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _spread_kernel(
    p_grad_out, p_offsets, p_grad, n_rays, n_rows, ray_programs, n_channels, stride_out, stride_out_channel,
    stride_row, stride_channel, CHANNELS: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    first_channel = tl.program_id(1) * CHANNELS
    if tl.program_id(0) < ray_programs:
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            for c in tl.static_range(CHANNELS):
                channel = first_channel + c
                p_ray = p_grad_out + i_ray.to(tl.int64) * stride_out + channel * stride_out_channel
                grad = tl.load(p_ray, mask=m_ray & (channel < n_channels), other=0.0)
                for k in range(0, tl.max(count, 0), STEPS):
                    row, m = gpu.tile_rows(start, count, k, STEPS)
                    p = p_grad + row.to(tl.int64) * stride_row + channel * stride_channel
                    value = grad[:, None] + tl.zeros([RAYS, STEPS], tl.float32)
                    tl.store(p, value, mask=m & (channel < n_channels))
    else:
        n_used = tl.load(p_offsets + n_rays)
        for channel in range(first_channel, tl.minimum(first_channel + CHANNELS, n_channels)):
            gpu.zero_tail(p_grad + channel * stride_channel, stride_row, ray_programs, n_used, n_rows, TAIL)


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _cumsum_kernel(
    p_values, p_offsets, p_out, n_rays, n_rows, ray_programs, stride,
    EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            before = tl.zeros([RAYS, STEPS], tl.float32)
            for k in range(0, tl.max(count, 0), STEPS):
                step = (k + tl.arange(0, STEPS))[None, :] + tl.zeros([RAYS, STEPS], tl.int32)
                m = step < count[:, None]
                if REVERSE:
                    step = count[:, None] - 1 - step
                row = start[:, None] + step
                value = tl.load(p_values + row.to(tl.int64) * stride, mask=m, other=0.0).to(tl.float32)
                running = tl.cumsum(value, 1)
                total = gpu.spread_last(running, RAYS, STEPS)
                if EXCLUSIVE:  # shifted, not subtracted: a large value must not eat the digits of the sum before it
                    running = gpu.shift_right(running, 0.0, RAYS, STEPS)
                tl.store(p_out + row, before + running, mask=m)
                before += total
    else:
        gpu.zero_tail(p_out, 1, ray_programs, tl.load(p_offsets + n_rays), n_rows, TAIL)


@launchable(do_not_specialize=["n_rays"])
def _count_kernel(p_keep, p_offsets, p_counts, p_sums, n_rays, GROUP: tl.constexpr, STEPS: tl.constexpr):
    for group in range(tl.program_id(0), tl.cdiv(n_rays, GROUP), tl.num_programs(0)):
        i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, group, n_rays, GROUP)
        b_kept = tl.zeros([GROUP, STEPS], tl.int32)
        for k in range(0, tl.max(count, 0), STEPS):
            row, m = gpu.tile_rows(start, count, k, STEPS)
            b_kept += (tl.load(p_keep + row, mask=m, other=0) != 0).to(tl.int32)
        kept = tl.sum(b_kept, 1)
        tl.store(p_counts + i_ray, kept, mask=m_ray)
        tl.store(p_sums + group, tl.sum(kept, 0))


@triton.jit
def write_tail(p_starts, p_ends, p_rays, first_program, n_used, n_rows, TAIL: tl.constexpr):
    """t = 0 and ray 0 in the places that hold no sample."""
    gpu.zero_tail(p_starts, 1, first_program, n_used, n_rows, TAIL)
    gpu.zero_tail(p_ends, 1, first_program, n_used, n_rows, TAIL)
    gpu.zero_tail(p_rays, 1, first_program, n_used, n_rows, TAIL)


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _compact_kernel(
    p_starts, p_ends, p_keep, p_offsets, p_new_starts, p_new_ends, p_new_rays, p_new_offsets, n_rays, n_rows,
    ray_programs, CODES: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            target = tl.load(p_new_offsets + i_ray, mask=m_ray, other=0)
            end = tl.load(p_new_offsets + i_ray + 1, mask=m_ray, other=0)
            count = tl.where(end > target, count, 0)  # a ray that lost all its samples, or did not fit
            before = target[:, None] + tl.zeros([RAYS, STEPS], tl.int32)
            for k in range(0, tl.max(count, 0), STEPS):
                row, m = gpu.tile_rows(start, count, k, STEPS)
                code = tl.load(p_keep + row, mask=m, other=0)
                keep = (code != 0).to(tl.int32)
                running = before + tl.cumsum(keep, 1)
                before = gpu.spread_last(running, RAYS, STEPS)
                m_keep = keep != 0
                t0 = tl.load(p_starts + row, mask=m_keep, other=0.0)
                t1 = tl.load(p_ends + row, mask=m_keep, other=0.0)
                if CODES:  # a sample may stand for others: `thinning`
                    half = (t1 - t0) * (0.5 * tl.exp2((code.to(tl.float32) - 1.0) * (1.0 / OCTAVE)))
                    middle = 0.5 * (t0 + t1)
                    t0 = tl.where(code > 1, middle - half, t0)
                    t1 = tl.where(code > 1, middle + half, t1)
                tl.store(p_new_starts + running - 1, t0, mask=m_keep)
                tl.store(p_new_ends + running - 1, t1, mask=m_keep)
                tl.store(p_new_rays + running - 1, i_ray[:, None] + tl.zeros([RAYS, STEPS], tl.int32), mask=m_keep)
    else:
        n_used = tl.load(p_new_offsets + n_rays)
        write_tail(p_new_starts, p_new_ends, p_new_rays, ray_programs, n_used, n_rows, TAIL)


def packed_sum(values: Tensor, offsets: Tensor) -> Tensor:
    check_kernel_float(values=values)
    if values.dim() == 1:
        return packed_sum(values[:, None], offsets).squeeze(1)
    (n_rows, n_channels), dtype, n_rays = values.shape, values.dtype, offsets.shape[0] - 1
    tile, programs = gpu.ray_grid(n_rows, n_rays, values.device)
    channels = min(CHANNELS, next_power_of_2(max(n_channels, 1)))

    def run(values: Tensor) -> Tensor:
        out = torch.empty(n_rays, n_channels, dtype=torch.float32, device=values.device)
        if out.numel():
            _sum_kernel[(programs, cdiv(n_channels, channels))](
                values, offsets, out, n_rays, n_channels, *values.stride(), CHANNELS=channels, **tile, num_warps=1
            )
        return out

    def back(grad_out: Tensor) -> Tensor:
        grad = torch.empty(n_rows, n_channels, dtype=dtype, device=offsets.device)
        if grad.numel():
            _spread_kernel[(programs + gpu.tail_programs(n_rows), cdiv(n_channels, channels))](
                grad_out, offsets, grad, n_rays, n_rows, programs, n_channels, *grad_out.stride(), *grad.stride(),
                CHANNELS=channels, **tile, TAIL=TAIL_BLOCK, num_warps=1,
            )  # fmt: skip
        return grad

    return linear(values, run, back)


def _cumsum(values: Tensor, offsets: Tensor, exclusive: bool, reverse: bool, dtype: torch.dtype) -> Tensor:
    n_rows, n_rays = values.shape[0], offsets.shape[0] - 1
    out = torch.empty(n_rows, dtype=dtype, device=values.device)
    if n_rows:
        tile, programs = gpu.ray_grid(n_rows, n_rays, values.device)
        _cumsum_kernel[(programs + gpu.tail_programs(n_rows),)](
            values, offsets, out, n_rays, n_rows, programs, values.stride(0),
            EXCLUSIVE=exclusive, REVERSE=reverse, **tile, TAIL=TAIL_BLOCK, num_warps=1,
        )  # fmt: skip
    return out


def packed_cumsum(values: Tensor, offsets: Tensor, *, exclusive: bool, reverse: bool) -> Tensor:
    check_kernel_float(values=values)
    dtype = values.dtype
    return linear(
        values,
        lambda values: _cumsum(values, offsets, exclusive, reverse, torch.float32),
        lambda grad: _cumsum(grad, offsets, exclusive, not reverse, dtype),
    )


def empty_samples(n_rows: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t_starts = torch.empty(n_rows, dtype=torch.float32, device=like.device)
    return t_starts, torch.empty_like(t_starts), torch.empty(n_rows, dtype=torch.int32, device=like.device)


def compact(samples: PackedSamples, keep: Tensor, *, capacity: int | None) -> PackedSamples:
    check_kernel_float(t_starts=samples.t_starts)
    n_rays, device, marks = samples.n_rays, keep.device, keep.contiguous().view(torch.uint8)
    tile = gpu.tile_for(samples.capacity, n_rays)
    counts, sums = empty_counts(n_rays, device)
    if n_rays:
        _count_kernel[(gpu.ray_programs(cdiv(n_rays, GROUP), device),)](
            marks, samples.offsets, counts, sums, n_rays, GROUP=GROUP, STEPS=tile["STEPS"], num_warps=1
        )
    offsets, kept = fit_offsets(counts, sums, capacity, samples.n_rays_kept)
    # Without a capacity there is room for all: the host reads how many are left while the device writes them.
    n_rows = samples.capacity if capacity is None else capacity
    new = empty_samples(n_rows, keep)
    if n_rows:
        programs = gpu.ray_programs(cdiv(n_rays, tile["RAYS"]), device)
        tail = 0 if capacity is None else gpu.tail_programs(n_rows)
        _compact_kernel[(programs + tail,)](
            samples.t_starts, samples.t_ends, marks, samples.offsets, *new, offsets, n_rays, n_rows, programs,
            CODES=keep.dtype == torch.uint8, **tile, TAIL=TAIL_BLOCK, num_warps=1,
        )  # fmt: skip
    if capacity is None:
        n_used = int(offsets[-1])
        new = tuple(values[:n_used] for values in new)
    return PackedSamples(*new, offsets, samples.n_rays_kept if kept is None else kept)
