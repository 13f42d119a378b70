"""From samples per ray to offsets, cut to what fits a capacity: one launch, no atomics, no read-back.

Who counts also leaves the sum of every GROUP rays. Program p owns BLOCK rays and adds up all sums before its own
itself: more and more reads, but in parallel and from the cache, which for the sizes of a training step beats handing a
total from program to program. Rays are kept whole from the first on; a program that starts past the overflow looks for
the place where it happened.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import INTERPRETED, CompileCase
from ._launch import cdiv, launchable

GROUP = 4  # rays behind one sum
BLOCK = 4096  # rays of one program
WIDE = 1024 if INTERPRETED else 16384  # sums added at a time
MOST = (1 << 31) - 1  # offsets are int32


@triton.jit
def _fit_block(p_values, first, end, base, capacity, BLOCK: tl.constexpr):
    """Totals up to and including each value of a block, and the largest of them that fits."""
    i = first + tl.arange(0, BLOCK)
    value = tl.load(p_values + i, mask=i < end, other=0).to(tl.int64)
    total = base + tl.cumsum(value, 0)
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
        i, total, base = _fit_block(p_sums, first, n_sums, last_total, capacity, BLOCK)
        group = first + tl.sum((total <= capacity).to(tl.int32), 0)
        last_total = tl.max(total, 0)
        first += BLOCK
    i, total, used = _fit_block(p_counts, group * GROUP, n_rays, base, capacity, GROUP)
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
        i, total, used = _fit_block(p_counts, own, n_rays, base, capacity, BLOCK)
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


def fit_offsets(
    counts: Tensor, sums: Tensor, capacity: int | None, limit: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """offsets (n_rays + 1,) int32 and, for a fixed capacity, how many whole rays fit, at most `limit`: () int32."""
    n_rays, device = counts.shape[0], counts.device
    kept = None if capacity is None else torch.empty((), dtype=torch.int32, device=device)
    if n_rays == 0:
        if kept is not None:
            kept.zero_()
        return torch.zeros(1, dtype=torch.int32, device=device), kept
    offsets = torch.empty(n_rays + 1, dtype=torch.int32, device=device)
    _fit_kernel[(cdiv(n_rays, BLOCK),)](
        counts, sums, offsets, kept, limit, n_rays, MOST if capacity is None else capacity,
        GROUP=GROUP, BLOCK=BLOCK, WIDE=WIDE, num_warps=8,
    )  # fmt: skip
    return offsets, kept


COMPILE_CASES = [
    CompileCase(
        _fit_kernel,
        dict.fromkeys(("p_counts", "p_sums", "p_offsets", "p_kept", "p_limit"), "*i32")
        | {"n_rays": "i32", "capacity": "i32"},
        {"GROUP": GROUP, "BLOCK": BLOCK, "WIDE": WIDE},
        num_warps=8,
    )
]
