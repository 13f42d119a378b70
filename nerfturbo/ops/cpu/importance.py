"""Inversion of the cumulative weight: targets rise along a ray, so one walk over its bins serves them all.

Decomposition: a task = a chunk of rays. Sums in fp64, results fp32. Deterministic.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ._launch import array, as_float32, jit, launch

CHUNK = 512


@jit(exact=True)
def _invert(first, last, edges, weights, jitter, padding, out):
    """jitter is (n_rays, 1) or (n_rays, n_out)."""
    n_bins, n_out = weights.shape[1], out.shape[1]
    cdf = np.empty(n_bins + 1, np.float32)
    for ray in range(first, last):
        total = np.float32(0.0)
        for b in range(n_bins):
            total += weights[ray, b] + padding
        running = np.float64(0.0)
        cdf[0] = np.float32(0.0)
        for b in range(n_bins):
            running += weights[ray, b] + padding if total > 0.0 else edges[ray, b + 1] - edges[ray, b]
            cdf[b + 1] = running
        right, previous = 1, np.float32(0.0)
        for i in range(n_out):
            shift = jitter[ray, i if jitter.shape[1] > 1 else 0]
            target = (np.float32(i) + shift) / np.float32(n_out) * cdf[n_bins]
            if target < previous:
                right = 1
            previous = target
            while right < n_bins and cdf[right] <= target:
                right += 1
            span, low, high = cdf[right] - cdf[right - 1], edges[ray, right - 1], edges[ray, right]
            inside = np.float32(0.0)
            if span > 0.0:
                inside = min(max((target - cdf[right - 1]) / span, np.float32(0.0)), np.float32(1.0))
            out[ray, i] = min(low + inside * (high - low), high)


@torch.no_grad()
def importance_sample(
    edges: Tensor, weights: Tensor, n_samples: int, *, jitter: Tensor | None, padding: float
) -> Tensor:
    n_rays = edges.shape[0]
    shift = torch.full((n_rays, 1), 0.5) if jitter is None else jitter
    out = torch.empty(n_rays, n_samples + 1)
    histogram = (array(as_float32("edges", edges)), array(as_float32("weights", weights)))
    launch(_invert, n_rays, CHUNK, *histogram, array(as_float32("jitter", shift)), np.float32(padding), out.numpy())
    return out
