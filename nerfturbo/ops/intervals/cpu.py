"""Step functions along rays: a task = a chunk of rays, each walked once. Deterministic. fp32; cumulative weights in
fp64. Targets rise along a ray, so one walk over its bins serves them all."""

import numpy as np
import torch
from torch import Tensor

from .._cpu import as_float32, jit, launch
from ..positions import unit_box
from ..positions.cpu import FOLDS, HALF, ONE, TWO, fold_unit
from . import LEAST, LEAST_REST, SPACINGS

CHUNK = 128  # rays
_LEAST, _REST = np.float32(LEAST), np.float32(LEAST_REST)


@jit(inner=True)
def _warp(t, kind):
    if kind == 0:
        return t
    if kind == 1:
        return ONE / max(t, _LEAST)
    return HALF * t if t < ONE else ONE - HALF / t


@jit(inner=True)
def _unwarp(g, kind):
    if kind == 0:
        return g
    if kind == 1:
        return ONE / g
    return TWO * g if g < HALF else HALF / max(ONE - g, _REST)


@jit()
def _place(first, last, places, origins, directions, near, far, kind, unit, box, fold, distances, positions):
    """box: low and 1 / size of each axis. positions (3, n_rays * n)."""
    n = places.shape[1] - 1
    for ray in range(first, last):
        low, high = _warp(near[ray, 0] / unit, kind), _warp(far[ray, 0] / unit, kind)
        t0 = _unwarp(low + (high - low) * places[ray, 0], kind) * unit
        distances[ray, 0] = t0
        for i in range(n):
            t1 = _unwarp(low + (high - low) * places[ray, i + 1], kind) * unit
            distances[ray, i + 1] = t1
            middle = (t0 + t1) * HALF
            x = (origins[ray, 0] + directions[ray, 0] * middle - box[0, 0]) * box[1, 0]
            y = (origins[ray, 1] + directions[ray, 1] * middle - box[0, 1]) * box[1, 1]
            z = (origins[ray, 2] + directions[ray, 2] * middle - box[0, 2]) * box[1, 2]
            x, y, z = fold_unit(x, y, z, fold)
            positions[0, ray * n + i], positions[1, ray * n + i], positions[2, ray * n + i] = x, y, z
            t0 = t1


def place_intervals(places, origins, directions, *, near, far, spacing, unit, space) -> tuple[Tensor, Tensor]:
    n_rays, n = places.shape[0], places.shape[1] - 1
    named = {"places": places, "origins": origins, "directions": directions, "near": near, "far": far}
    inputs = [as_float32(name, value) for name, value in named.items()]
    box = np.array(unit_box(space.aabb), np.float32).reshape(2, 3)
    distances, positions = torch.empty(n_rays, n + 1), torch.empty(3, n_rays * n)
    rule = (SPACINGS.index(spacing), np.float32(unit), box, FOLDS.index(space.contraction))
    launch(_place, n_rays, CHUNK, *inputs, *rule, distances, positions)
    return distances, positions.t()


DRAW_CHUNK = 512


@jit(exact=True)
def _invert(first, last, edges, weights, jitter, padding, blur, out):
    """jitter is (n_rays, 1) or (n_rays, n_out)."""
    n_bins, n_out = weights.shape[1], out.shape[1]
    cdf, drawn = np.empty(n_bins + 1, np.float32), np.empty(n_bins, np.float32)
    for ray in range(first, last):
        total = np.float32(0.0)
        for b in range(n_bins):
            weight = weights[ray, b]
            if blur:
                before, behind = weights[ray, max(b - 1, 0)], weights[ray, min(b + 1, n_bins - 1)]
                weight = np.float32(0.5) * (max(before, weight) + max(weight, behind))
            drawn[b] = weight + padding
            total += drawn[b]
        running = np.float64(0.0)
        cdf[0] = np.float32(0.0)
        for b in range(n_bins):
            running += drawn[b] if total > 0.0 else edges[ray, b + 1] - edges[ray, b]
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
def importance_sample(edges, weights, n_samples, *, jitter, padding, blur) -> Tensor:
    n_rays = edges.shape[0]
    shift = torch.full((n_rays, 1), 0.5) if jitter is None else jitter
    out = torch.empty(n_rays, n_samples + 1)
    inputs = (as_float32("edges", edges), as_float32("weights", weights), as_float32("jitter", shift))
    launch(_invert, n_rays, DRAW_CHUNK, *inputs, np.float32(padding), blur, out)
    return out
