"""Importance sampling in two launches: cumulative weights per ray, then a binary search per new edge.

The first program owns a tile of rays and scans their bins; rays without weight use the bins' lengths. The second owns
BLOCK new edges of any rays and halves its interval SEARCH times. Inputs fp16/bf16/fp32, fp32 inside. No atomics.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ._common import INTERPRETED, CompileCase, check_kernel_float, spread_last
from ._launch import cdiv, launchable

BLOCK = 256


@launchable(do_not_specialize=["n_rays", "n_bins"])
def _cumulate_kernel(
    p_edges, p_weights, p_cdf, n_rays, n_bins, padding, strides, RAYS: tl.constexpr, STEPS: tl.constexpr
):
    i_ray = (tl.program_id(0) * RAYS + tl.arange(0, RAYS)).to(tl.int64)[:, None]
    m_ray = i_ray < n_rays
    total = tl.zeros([RAYS, STEPS], tl.float32)
    for k in range(0, n_bins, STEPS):
        i_bin = k + tl.arange(0, STEPS)[None, :]
        p = p_weights + i_ray * strides[2] + i_bin * strides[3]
        m = m_ray & (i_bin < n_bins)
        total += tl.where(m, tl.load(p, mask=m, other=0.0).to(tl.float32) + padding, 0.0)
    use_weights = tl.sum(total, 1)[:, None] > 0.0
    p_cdf += i_ray * (n_bins + 1)
    tl.store(p_cdf, tl.zeros([RAYS, 1], tl.float32), mask=m_ray)
    before = tl.zeros([RAYS, STEPS], tl.float32)
    for k in range(0, n_bins, STEPS):
        i_bin = k + tl.arange(0, STEPS)[None, :]
        m = m_ray & (i_bin < n_bins)
        p_edge = p_edges + i_ray * strides[0] + i_bin * strides[1]
        low = tl.load(p_edge, mask=m, other=0.0).to(tl.float32)
        high = tl.load(p_edge + strides[1], mask=m, other=0.0).to(tl.float32)
        weight = tl.load(p_weights + i_ray * strides[2] + i_bin * strides[3], mask=m, other=0.0).to(tl.float32)
        weight = tl.where(m, weight + padding, 0.0)
        running = before + tl.cumsum(tl.where(use_weights, weight, high - low), 1)
        tl.store(p_cdf + 1 + i_bin, running, mask=m)
        before = spread_last(running, RAYS, STEPS)


@launchable(do_not_specialize=["n_total", "n_bins", "n_edges", "search"])
def _invert_kernel(p_edges, p_cdf, p_jitter, p_out, n_total, n_bins, n_edges, search, strides, BLOCK: tl.constexpr):
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i_out < n_total
    i_ray = i_out // n_edges
    i_edge = i_out % n_edges
    shift = 0.5
    if p_jitter is not None:
        shift = tl.load(p_jitter + i_ray * strides[2] + i_edge * strides[3], mask=m, other=0.5).to(tl.float32)
    p_cdf += i_ray * (n_bins + 1)
    target = (i_edge.to(tl.float32) + shift) / n_edges * tl.load(p_cdf + n_bins, mask=m, other=0.0)
    low = tl.zeros([BLOCK], tl.int32)  # cdf[low] <= target, and the bin is low ... low + 1
    high = tl.zeros([BLOCK], tl.int32) + n_bins
    for _ in range(search):
        middle = (low + high) // 2
        below = tl.load(p_cdf + middle, mask=m, other=0.0) <= target
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    low = tl.minimum(low, n_bins - 1)
    cdf0 = tl.load(p_cdf + low, mask=m, other=0.0)
    span = tl.load(p_cdf + low + 1, mask=m, other=0.0) - cdf0
    p_edge = p_edges + i_ray * strides[0] + low * strides[1]
    edge0 = tl.load(p_edge, mask=m, other=0.0).to(tl.float32)
    edge1 = tl.load(p_edge + strides[1], mask=m, other=0.0).to(tl.float32)
    inside = tl.where(span > 0.0, (target - cdf0) / tl.maximum(span, 1.1754943508222875e-38), 0.0)
    inside = tl.minimum(tl.maximum(inside, 0.0), 1.0)
    tl.store(p_out + i_out, tl.minimum(edge0 + inside * (edge1 - edge0), edge1), mask=m)


@torch.no_grad()
def importance_sample(
    edges: Tensor, weights: Tensor, n_samples: int, *, jitter: Tensor | None, padding: float
) -> Tensor:
    check_kernel_float(edges=edges, weights=weights, jitter=jitter)
    n_rays, n_bins = weights.shape
    out = torch.empty(n_rays, n_samples + 1, dtype=torch.float32, device=edges.device)
    if n_rays == 0:
        return out
    cdf = torch.empty(n_rays, n_bins + 1, dtype=torch.float32, device=edges.device)
    rays = 32 if INTERPRETED else 1
    _cumulate_kernel[(cdiv(n_rays, rays),)](
        edges, weights, cdf, n_rays, n_bins, padding, (*edges.stride(), *weights.stride()), RAYS=rays, STEPS=32,
        num_warps=1,
    )  # fmt: skip
    jitter_strides = (0, 0) if jitter is None else jitter.expand(n_rays, n_samples + 1).stride()
    _invert_kernel[(cdiv(out.numel(), BLOCK),)](
        edges, cdf, jitter, out, out.numel(), n_bins, n_samples + 1, n_bins.bit_length(),
        (*edges.stride(), *jitter_strides), BLOCK=BLOCK,
    )  # fmt: skip
    return out


COMPILE_CASES = [
    CompileCase(
        _cumulate_kernel,
        {"p_edges": "*fp32", "p_weights": "*fp32", "p_cdf": "*fp32", "n_rays": "i32", "n_bins": "i32"}
        | {"padding": "fp32", "strides": ("i32",) * 4},
        {"RAYS": 1, "STEPS": 32},
    ),
    CompileCase(
        _invert_kernel,
        {"p_edges": "*fp32", "p_cdf": "*fp32", "p_jitter": "*fp32", "p_out": "*fp32", "strides": ("i32",) * 4}
        | dict.fromkeys(("n_total", "n_bins", "n_edges", "search"), "i32"),
        {"BLOCK": BLOCK},
        num_warps=4,
    ),
]
