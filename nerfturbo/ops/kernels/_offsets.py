"""From samples per ray to offsets, cut to what fits a capacity: one launch, no atomics, no read-back.

Program p owns BLOCK rays. It adds up all counts before its own itself: n^2 / BLOCK reads in all, but from the cache and
in parallel, which beats handing sums from program to program for the sizes of a training step (up to about 2^18 rays).
Rays are kept whole from the first on; every program that starts past the overflow finds the place where it happened.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import CompileCase

BLOCK = 4096
MOST = (1 << 31) - 1  # offsets are int32


@triton.jit
def _fit_at(p_counts, first, base, capacity, n_rays, BLOCK: tl.constexpr):
    """Totals up to and including each ray of a block, and the largest of them that fits."""
    i = first + tl.arange(0, BLOCK)
    count = tl.load(p_counts + i, mask=i < n_rays, other=0)
    total = base + tl.cumsum(count, 0).to(tl.int64)
    fits = total <= capacity
    used = tl.maximum(base, tl.max(tl.where(fits, total, 0), 0))
    return i, total, fits, used


@triton.jit(do_not_specialize=["n_rays", "capacity"])
def _fit_kernel(p_counts, p_offsets, p_kept, p_limit, n_rays, capacity, BLOCK: tl.constexpr):
    own = tl.program_id(0) * BLOCK
    base = tl.zeros([], tl.int64)
    for first in range(0, own, BLOCK):
        i = first + tl.arange(0, BLOCK)  # all before `own`, so inside
        base += tl.sum(tl.load(p_counts + i).to(tl.int64), 0)
    used = base
    if base > capacity:  # the overflow lies before this block: look for it
        found = 0
        base_seen = tl.zeros([], tl.int64)
        used = base_seen
        first = 0
        while found == 0:
            i, total, fits, used = _fit_at(p_counts, first, base_seen, capacity, n_rays, BLOCK)
            base_seen = tl.max(total, 0)
            found = (base_seen > capacity).to(tl.int32)
            first += BLOCK
        i = own + tl.arange(0, BLOCK)
        tl.store(p_offsets + 1 + i, (used + tl.zeros([BLOCK], tl.int64)).to(tl.int32), mask=i < n_rays)
    else:
        i, total, fits, used = _fit_at(p_counts, own, base, capacity, n_rays, BLOCK)
        tl.store(p_offsets + 1 + i, tl.minimum(total, used).to(tl.int32), mask=i < n_rays)
        if own == 0:
            tl.store(p_offsets, 0)
        if p_kept is not None:
            overflow = tl.max(total, 0) > capacity
            if overflow | (own + BLOCK >= n_rays):
                kept = own + tl.sum((fits & (i < n_rays)).to(tl.int32), 0)
                if p_limit is not None:
                    kept = tl.minimum(kept, tl.load(p_limit))
                tl.store(p_kept, kept)


def fit_offsets(counts: Tensor, capacity: int | None, limit: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """offsets (n_rays + 1,) int32 and, for a fixed capacity, how many whole rays fit, at most `limit`: () int32."""
    n_rays, device = counts.shape[0], counts.device
    kept = None if capacity is None else torch.empty((), dtype=torch.int32, device=device)
    if n_rays == 0:
        if kept is not None:
            kept.zero_()
        return torch.zeros(1, dtype=torch.int32, device=device), kept
    offsets = torch.empty(n_rays + 1, dtype=torch.int32, device=device)
    _fit_kernel[(triton.cdiv(n_rays, BLOCK),)](
        counts, offsets, kept, limit, n_rays, MOST if capacity is None else capacity, BLOCK=BLOCK, num_warps=8
    )
    return offsets, kept


COMPILE_CASES = [
    CompileCase(
        _fit_kernel,
        {
            "p_counts": "*i32",
            "p_offsets": "*i32",
            "p_kept": "*i32",
            "p_limit": "*i32",
            "n_rays": "i32",
            "capacity": "i32",
        },
        {"BLOCK": BLOCK},
        num_warps=8,
    )
]
