"""The occupancy grid's arithmetic.

decay_and_max   three launches: keep the old value of each listed cell, store it decayed, then take the maximum over
                repeats. Separate launches, since a cell may be listed twice and must decay once. The maximum is an
                integer atomic: the bits of non-negative floats are ordered like the floats, and a maximum does not
                depend on the order of its arguments, so the result is the same every time.
threshold_bits  two launches: PARTS programs add up their share of the cells, then every program adds the PARTS sums
                itself and packs BLOCK cells into words. Nothing is read back; no atomics.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ._common import INTERPRETED, CompileCase, check_kernel_float
from ._launch import cdiv, launchable

BLOCK = 1024
PARTS = 512


@launchable(do_not_specialize=["n"])
def _gather_kernel(p_density, p_cells, p_old, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    tl.store(p_old + i, tl.load(p_density + i_cell, mask=m, other=0.0), mask=m)


@launchable(do_not_specialize=["n"])
def _decay_kernel(p_density, p_cells, p_old, n, decay, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    old = tl.load(p_old + i, mask=m, other=-1.0)
    tl.store(p_density + i_cell, old * decay, mask=m & (old >= 0.0))


@launchable(do_not_specialize=["n"])
def _maximum_kernel(p_density_bits, p_cells, p_old, p_fresh, n, stride_fresh, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    i_cell = tl.load(p_cells + i, mask=m, other=0)
    old = tl.load(p_old + i, mask=m, other=-1.0)
    fresh = tl.load(p_fresh + i.to(tl.int64) * stride_fresh, mask=m, other=0.0).to(tl.float32)
    useful = (fresh > 0.0) & (fresh < float("inf"))  # false for NaN
    tl.atomic_max(
        p_density_bits + i_cell, fresh.to(tl.int32, bitcast=True), mask=m & useful & (old >= 0.0), sem="relaxed"
    )


@launchable(do_not_specialize=["n_cells"])
def _sum_kernel(p_density, p_sums, p_counts, n_cells, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_count = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, n_cells, PARTS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(p_density + i, mask=i < n_cells, other=-1.0)
        seen = value >= 0.0
        b_sum += tl.where(seen, value, 0.0)
        b_count += seen.to(tl.int32)
    tl.store(p_sums + tl.program_id(0), tl.sum(b_sum, 0))
    tl.store(p_counts + tl.program_id(0), tl.sum(b_count, 0))


@launchable(do_not_specialize=["n_words"])
def _bits_kernel(
    p_density, p_sums, p_counts, p_bits, p_mean, n_words, threshold, PARTS: tl.constexpr, WORDS: tl.constexpr
):
    i_part = tl.arange(0, PARTS)
    count = tl.sum(tl.load(p_counts + i_part), 0)
    mean = tl.sum(tl.load(p_sums + i_part), 0) / tl.maximum(count, 1).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(p_mean, mean)
    i_word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    i_bit = tl.arange(0, 32)
    m = i_word < n_words
    value = tl.load(p_density + i_word[:, None] * 32 + i_bit[None, :], mask=m[:, None], other=-1.0)
    occupied = (value > tl.minimum(mean, threshold)).to(tl.int32)
    tl.store(p_bits + i_word, tl.sum(occupied << i_bit[None, :], 1), mask=m)  # bits do not overlap: the sum is the or


@torch.no_grad()
def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    check_kernel_float(fresh=fresh)
    n = cells.shape[0]
    if n == 0:
        return
    cells, grid = cells.contiguous(), (cdiv(n, BLOCK),)
    old = torch.empty(n, dtype=torch.float32, device=density.device)
    _gather_kernel[grid](density, cells, old, n, BLOCK=BLOCK)
    _decay_kernel[grid](density, cells, old, n, decay, BLOCK=BLOCK)
    _maximum_kernel[grid](density.view(torch.int32), cells, old, fresh, n, fresh.stride(0), BLOCK=BLOCK)


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    n_cells, n_words = density.shape[0], bits.shape[0]
    sums = torch.empty(PARTS, dtype=torch.float32, device=density.device)
    counts = torch.empty(PARTS, dtype=torch.int32, device=density.device)
    mean = torch.empty((), dtype=torch.float32, device=density.device)
    parts = 8 if INTERPRETED else PARTS
    _sum_kernel[(parts,)](density, sums, counts, n_cells, PARTS=parts, BLOCK=BLOCK)
    words = BLOCK // 32
    _bits_kernel[(max(1, cdiv(n_words, words)),)](
        density, sums, counts, bits, mean, n_words, float(threshold), PARTS=parts, WORDS=words
    )
    return mean


_CELLS = {"p_density": "*fp32", "p_cells": "*i64", "p_old": "*fp32", "n": "i32"}
_SUMS = {"p_density": "*fp32", "p_sums": "*fp32", "p_counts": "*i32"}
COMPILE_CASES = [
    CompileCase(_gather_kernel, _CELLS, {"BLOCK": BLOCK}, num_warps=4),
    CompileCase(_decay_kernel, _CELLS | {"decay": "fp32"}, {"BLOCK": BLOCK}, num_warps=4),
    CompileCase(
        _maximum_kernel,
        _CELLS | {"p_density_bits": "*i32", "p_fresh": "*fp32", "stride_fresh": "i32"},
        {"BLOCK": BLOCK},
        num_warps=4,
    ),
    CompileCase(_sum_kernel, _SUMS | {"n_cells": "i32"}, {"PARTS": PARTS, "BLOCK": BLOCK}, num_warps=4),
    CompileCase(
        _bits_kernel,
        _SUMS | {"p_bits": "*i32", "p_mean": "*fp32", "n_words": "i32", "threshold": "fp32"},
        {"PARTS": PARTS, "WORDS": BLOCK // 32},
        num_warps=4,
    ),
]
