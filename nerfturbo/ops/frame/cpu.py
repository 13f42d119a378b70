"""Front-to-back rounds on a CPU: rays walk from cell to cell as in `march`, and stop at what one round allows. A task =
a chunk of the queue. Find, a prefix sum that gives rows to the rays that fit, write; composite; gather the survivors in
order. fp32; deterministic."""

import math

import numpy as np
import torch

from ...types import Aabb
from .._cpu import as_float32, jit, launch
from ..march import cpu as marching
from ..march.cpu import summarize_grid
from ..positions.cpu import box_interval
from . import COLOR, DEPTH, STEP, TAKEN, THROUGH, WALKED, WINDOW, LiveRays, NextSamples, RoundLimits

CHUNK = 256  # rays
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
SPAN = np.float32(WINDOW)
__all__ = ["absorb_samples", "next_samples", "summarize_grid"]


@jit(exact=True, inner=True)
def _find(o, d, grid, rule, t_min, t_max, k, limit):
    """From lattice step k on: the first sample's step, a word that tells the samples from there, how many, and the
    step to go on with, -1 at the end of the ray."""
    ix = ONE / (d[0] if abs(d[0]) > marching.TINY else marching.TINY)
    iy = ONE / (d[1] if abs(d[1]) > marching.TINY else marching.TINY)
    iz = ONE / (d[2] if abs(d[2]) > marching.TINY else marching.TINY)
    margin = marching.ROUNDING * (abs(o[0]) + abs(o[1]) + abs(o[2]) + t_max)
    first_step = max(np.float32(math.floor(marching._inverse(rule, t_min))) - ONE, ZERO)
    last_step = min(np.float32(math.ceil(marching._inverse(rule, t_max))) + ONE, first_step + np.float32(WALKED))
    k, first, word, count = max(k, first_step), ZERO, np.uint32(0), 0
    while k <= last_step:
        middle = marching._midpoint(rule, k)
        if middle >= t_max:
            break
        if middle < t_min:
            k += ONE
            continue
        px, py, pz = o[0] + d[0] * middle, o[1] + d[1] * middle, o[2] + d[2] * middle
        occupied, growth, x, y, z, size = marching._look(grid, px, py, pz)
        leave = min(t_max - margin, marching._leave(grid, 0, growth, x, size, o[0], ix, margin))
        leave = min(leave, marching._leave(grid, 1, growth, y, size, o[1], iy, margin))
        leave = min(leave, marching._leave(grid, 2, growth, z, size, o[2], iz, margin))
        last = min(marching._last_before(rule, ZERO, k, leave), last_step) if leave > middle else k
        if occupied:
            first = k if count == 0 else first
            last = min(last, first + SPAN - ONE)
            while k <= last and count < limit:
                word |= np.uint32(1) << np.uint32(k - first)
                count += 1
                k += ONE
        else:
            k = last + ONE
        if count > 0 and (count >= limit or k - first >= SPAN):
            return first, word, count, k
    return first, word, count, -ONE


@jit(exact=True)
def _find_all(
    start, end, queue, origins, directions, state, grid, rule, box, near, far, limits, firsts, words, counts, steps
):
    """Places start ... end - 1 of the queue; limits (3,) are least, most and growth."""
    for place in range(start, end):
        ray = queue[place]
        t_min, t_max = box_interval(origins, directions, ray, box, near, far)
        counts[place], steps[place] = 0, -ONE
        if t_max > t_min:
            limit = min(max(np.float32(math.floor(state[ray, TAKEN] * limits[2])), limits[0]), limits[1])
            firsts[place], words[place], counts[place], steps[place] = _find(
                origins[ray], directions[ray], grid, rule, t_min, t_max, state[ray, STEP], limit
            )


@jit(exact=True)
def _fit(counts, rows, spans):
    """Rows for the rays in turn while they fit; returns the rows in use. The others get no row, and -1 as a mark."""
    used = 0
    for place in range(counts.shape[0]):
        spans[0, place], spans[1, place] = used, counts[place]
        if used + counts[place] > rows:
            spans[1, place] = -1
        else:
            used += counts[place]
    return used


@jit()
def _write(start, end, queue, origins, directions, state, rule, firsts, words, steps, spans, positions, t0s, t1s, rays):
    for place in range(start, end):
        ray, row, word = queue[place], spans[0, place], words[place]
        if spans[1, place] < 0:  # waits
            spans[1, place] = 0
            continue
        state[ray, STEP] = steps[place]
        state[ray, TAKEN] += np.float32(spans[1, place])
        k = firsts[place]
        for _ in range(spans[1, place]):
            while word & np.uint32(1) == 0:
                word >>= np.uint32(1)
                k += ONE
            t0s[row], t1s[row], rays[row] = marching._lattice(rule, k), marching._lattice(rule, k + ONE), ray
            middle = (t0s[row] + t1s[row]) * HALF
            for axis in range(3):
                positions[axis, row] = origins[ray, axis] + middle * directions[ray, axis]
            word >>= np.uint32(1)
            k += ONE
            row += 1


@jit()
def _absorb(start, end, queue, state, spans, t0s, t1s, density, rgb, eps, threshold, logits, alive):
    for place in range(start, end):
        ray, first = queue[place], spans[0, place]
        through, depth = state[ray, THROUGH], state[ray, DEPTH]
        for row in range(first, first + spans[1, place]):
            if through < eps:
                break
            sigma = density[row]
            if logits:
                sigma = np.float32(math.exp(min(sigma, np.float32(15.0))))
            decay = np.float32(math.expm1(-sigma * (t1s[row] - t0s[row])))  # -alpha
            if not -decay >= threshold:
                continue
            weight = -decay * through
            through += decay * through
            depth += weight * ((t0s[row] + t1s[row]) * HALF)
            for channel in range(rgb.shape[1]):
                value = rgb[row, channel]
                if logits:
                    value = ONE / (ONE + np.float32(math.exp(-value)))
                state[ray, COLOR + channel] += weight * value
        state[ray, THROUGH], state[ray, DEPTH] = through, depth
        alive[place] = state[ray, STEP] >= ZERO and through >= eps


@torch.no_grad()
def next_samples(live: LiveRays, *, rows: int, limits: RoundLimits, aabb: Aabb | None) -> NextSamples:
    n_live, rule = int(live.n_live), marching._rule(live.rule)
    outer = live.grid.aabb.scaled(2.0 ** (live.grid.levels - 1))
    box = np.array([outer.low, outer.high], np.float32)
    bounds = np.array([limits.least, limits.most, limits.growth], np.float32)
    rays = (live.places[live.side, :n_live], live.origins, live.directions, live.state)
    firsts, words = np.empty(n_live, np.float32), np.empty(n_live, np.uint32)
    counts, steps = np.empty(n_live, np.int32), np.empty(n_live, np.float32)
    limited = (box, np.float32(live.rule.near), np.float32(live.rule.far), bounds)
    grid = marching._grid(live.grid, live.summary)
    launch(_find_all, n_live, CHUNK, *rays, grid, rule, *limited, firsts, words, counts, steps)
    spans = torch.empty(2, live.state.shape[0], dtype=torch.int32)
    used = _fit(counts, rows, spans.numpy())
    positions, t_starts, t_ends = torch.empty(3, used), torch.empty(used), torch.empty(used)
    ray_indices = torch.empty(used, dtype=torch.int32)
    found = (firsts, words, steps, spans)
    launch(_write, n_live, CHUNK, *rays, rule, *found, positions, t_starts, t_ends, ray_indices)
    if aabb is not None:
        low, size = aabb.tensor()[0], torch.tensor(aabb.size)
        positions.sub_(low[:, None]).div_(size[:, None])
    live.counts[2] = used
    return NextSamples(positions.t(), t_starts, t_ends, ray_indices, spans, live.counts[2])


@torch.no_grad()
def absorb_samples(live, samples, density, rgb, *, early_stop_eps, alpha_thre, logits) -> None:
    n_live = int(live.n_live)
    queue, alive = live.places[live.side, :n_live], torch.empty(n_live, dtype=torch.bool)
    # As they lie in memory, whatever their order: only read, they need no copy.
    field = (as_float32("density", density).detach().numpy(), as_float32("rgb", rgb).detach().numpy())
    taken, limits = (samples.spans, samples.t_starts, samples.t_ends), (early_stop_eps, alpha_thre)
    settings = (*(np.float32(limit) for limit in limits), logits)
    launch(_absorb, n_live, CHUNK, queue, live.state, *taken, *field, *settings, alive)
    survivors = queue[alive]
    live.places[1 - live.side, : survivors.shape[0]] = survivors
    live.counts[1 - live.side] = survivors.shape[0]
    live.counts[2] = 0
