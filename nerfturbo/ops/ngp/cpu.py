"""Instant-NGP's density and visibility in rounds; the networks are products of torch, whose libraries no kernel beats.

Visibility: a round takes FIRST samples of each ray that still lets light through, the next one twice as many, and so
on. Within a round all samples pass level by level through the encoder and then through the network.

fp32 inside; half encodings are widened once. Rows past `n_used`, and rows that no ray owns, are not read.
"""

import math

import numpy as np
import torch
from torch import Tensor

from .._cpu import array, as_float32, jit, launch, scratch
from ..composite.cpu import merge_weak_samples
from ..hash_encode.cpu import encode
from . import MAX_LOGIT, NgpDensity, reference

SLICE = 1 << 15  # points whose density is looked up at a time
FIELD_SLICE = 1 << 12  # points that pass through both networks at a time


def ngp_field(encoding, directions, ray_indices, weights, *, sink=None, n_used=None) -> Tensor:
    """The reference, without a pass over rows that are all in use; without gradients in slices that stay in cache."""
    n = encoding.shape[0]
    used = n if n_used is None else min(int(n_used), n)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (encoding, directions, *weights)):
        rest = None if used == n else n_used
        return reference.ngp_field(encoding, directions, ray_indices, weights, sink=sink, n_used=rest)
    out, (width, features), split = torch.zeros(4, n), weights[1].shape[::-1], directions.shape[1]
    density_in, density_out, colour_in, colour_mid, colour_out = (as_float32("weights", w.detach()) for w in weights)
    sizes = {"hidden": width, "other": width, "joint": split + features}
    for start in range(0, used, FIELD_SLICE):
        rows = slice(start, min(start + FIELD_SLICE, used))
        hidden, other, joint = (scratch(name, size, rows.stop - start) for name, size in sizes.items())
        own = directions[rows] if ray_indices is None else directions.index_select(0, ray_indices[rows].long())
        joint[:split] = own.t()
        torch.mm(density_in, as_float32("encoding", encoding[rows]).t(), out=hidden).relu_()
        out[3, rows] = torch.mm(density_out, hidden, out=joint[split:])[0]
        torch.mm(colour_in, joint, out=hidden).relu_()
        out[:3, rows] = torch.mm(colour_out, torch.mm(colour_mid, hidden, out=other).relu_())
    return out.t()


def _density_logits(field: NgpDensity, positions: Tensor, out: Tensor) -> None:
    """out (n,) for positions (n, 3), both fp32; in slices, whose encoding stays in cache until the network reads it."""
    table, layout = as_float32("table", field.table), field.layout
    density_in, density_out = (as_float32("weights", weight) for weight in field.weights)
    for start in range(0, positions.shape[0], SLICE):
        part = positions[start : start + SLICE]
        sizes = {"unit": 3, "encoding": layout.n_outputs, "hidden": density_in.shape[0]}
        unit, encoding, hidden = (scratch(name, size, part.shape[0]) for name, size in sizes.items())
        encode(part, table, layout, unit, encoding)
        torch.mm(density_in, encoding, out=hidden).relu_()
        torch.mm(density_out[:1], hidden, out=out[start : start + SLICE][None])


def density_at(field, positions, *, n_used, logits) -> Tensor:
    used = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    out = torch.empty(positions.shape[0])
    out[used:] = 0.0
    _density_logits(field, as_float32("positions", positions)[:used], out[:used])
    return out if logits else out.clamp_(max=MAX_LOGIT).exp_()


FIRST = 8  # samples of a ray in the first round
RAY_CHUNK = 256  # rays per task
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


def visibility(field, origins, directions, samples, *, early_stop_eps, alpha_thre, thinning) -> Tensor:
    keep = torch.zeros(samples.capacity, dtype=torch.uint8)
    rays = (as_float32("origins", origins), as_float32("directions", directions))
    intervals = (samples.t_starts, samples.t_ends)
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
        launch(_place, live.size, RAY_CHUNK, live, begin, *intervals, *rays, *box, slots, positions)
        logits = torch.empty(positions.shape[0])
        _density_logits(field, positions, logits)
        rays_state = (live, begin, through, *intervals, logits, slots, *limits)
        launch(_advance, live.size, RAY_CHUNK, *rays_state, keep, optical)
        live = live[(begin[live] < end[live]) & ~(through[live] < limits[0])]
        steps *= 2
    return keep.view(torch.bool) if thinning is None else merge_weak_samples(optical, samples, thinning)
