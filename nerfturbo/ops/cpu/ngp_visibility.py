"""Density and visibility in rounds: the next few samples of every ray that still lets light through.

A round takes FIRST samples of each ray, the next one twice as many, and so on: few rounds for a ray that nothing stops,
little wasted on one that stops at once. Within a round all samples pass level by level through the encoder and then
through the network, as if they were all there is: that keeps tables in cache, which following one ray
after the other would not.

fp32 whatever comes in; deterministic. Rows that no ray owns are never read.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from ..ngp_field import MAX_LOGIT
from ..ngp_visibility import NgpDensity
from ..thinning import Thinning
from ._launch import array, as_float32, jit, launch
from .ngp_field import ngp_density
from .thinning import thin_codes

FIRST = 8  # samples of a ray in the first round
CHUNK = 256  # rays per task
TOP = np.float32(MAX_LOGIT)


@jit()
def _place(first, last, live, begin, starts, ends, origins, directions, low, size, slots, positions):
    """positions[slots[k] ...] of the next samples of ray live[k], with the box at [0, 1]."""
    for k in range(first, last):
        ray, count = live[k], slots[k + 1] - slots[k]
        for j in range(count):
            i = begin[ray] + j
            middle = (starts[i] + ends[i]) * np.float32(0.5)
            for axis in range(3):
                x = origins[ray, axis] + middle * directions[ray, axis]
                positions[slots[k] + j, axis] = (x - low[axis]) / size[axis]


@jit()
def _advance(first, last, live, begin, through, starts, ends, logits, slots, eps, threshold, keep, optical):
    """Flags of this round's samples, then where each ray goes on and how much light is left. `optical`, where there is
    room for it, gets their thickness."""
    for k in range(first, last):
        ray, light = live[k], through[live[k]]
        for j in range(slots[k + 1] - slots[k]):
            if light < eps:
                break
            i, logit = begin[ray] + j, logits[slots[k] + j]
            thickness = np.float32(math.exp(TOP if logit > TOP else logit)) * (ends[i] - starts[i])
            decay = np.float32(math.expm1(-thickness))  # -alpha
            if -decay >= threshold:  # false for NaN
                keep[i] = 1
                if optical.shape[0]:
                    optical[i] = thickness
                light += decay * light
        begin[ray] += slots[k + 1] - slots[k]
        through[ray] = light


@torch.no_grad()
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
    keep = torch.zeros(samples.capacity, dtype=torch.uint8)
    table = as_float32("field.table", field.table.detach())
    weights = (field.weights[0].detach().float(), field.weights[1][:1].detach().float())
    rays = (array(as_float32("origins", origins)), array(as_float32("directions", directions)))
    intervals = (array(samples.t_starts), array(samples.t_ends))
    box = (np.array(field.aabb.low, np.float32), np.array(field.aabb.size, np.float32))
    limits = (np.float32(early_stop_eps), np.float32(alpha_thre))
    begin, end = array(samples.offsets[:-1].clone()), array(samples.offsets[1:])
    optical = torch.zeros(0 if thinning is None else samples.capacity)
    through = np.ones(samples.n_rays, np.float32)
    live, steps = np.flatnonzero(end > begin), FIRST
    while live.size:
        slots = np.zeros(live.size + 1, np.int64)
        np.cumsum(np.minimum(end[live] - begin[live], steps), out=slots[1:])
        positions = torch.empty(int(slots[-1]), 3)
        launch(_place, live.size, CHUNK, live, begin, *intervals, *rays, *box, slots, positions.numpy())
        logits = ngp_density(positions, table, field.layout, weights).numpy()
        rays_state = (live, begin, through, *intervals, logits, slots, *limits)
        launch(_advance, live.size, CHUNK, *rays_state, keep.numpy(), optical.numpy())
        live = live[(begin[live] < end[live]) & ~(through[live] < limits[0])]
        steps *= 2
    return keep.view(torch.bool) if thinning is None else thin_codes(optical, samples, thinning)
