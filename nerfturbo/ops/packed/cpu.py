"""Sums, scans and compaction of packed samples: a task = a chunk of rays, each walked from first to last sample. Any
floating input, fp32 sums in sample order, gradients in the input's dtype. Deterministic."""

import functools

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from .._cpu import as_float32, jit, launch
from .._sink import linear
from ..composite import PER_OCTAVE

CHUNK = 1024  # rays
ONE, OCTAVE = np.float32(1.0), np.float32(PER_OCTAVE)


@jit()
def _sum(first, last, offsets, values, out):
    """out (n_rays, channels) = sums of the rays' rows of values (n, channels)."""
    for ray in range(first, last):
        for channel in range(values.shape[1]):
            total = np.float32(0.0)
            for i in range(offsets[ray], offsets[ray + 1]):
                total += values[i, channel]
            out[ray, channel] = total


@jit()
def _spread(first, last, offsets, values, out):
    """The transpose of `_sum`: every row gets its ray's value."""
    for ray in range(first, last):
        for i in range(offsets[ray], offsets[ray + 1]):
            for channel in range(values.shape[1]):
                out[i, channel] = values[ray, channel]


@jit()
def _scan(first, last, offsets, values, exclusive, reverse, out):
    for ray in range(first, last):
        total, n = np.float32(0.0), offsets[ray + 1] - offsets[ray]
        for k in range(n):
            i = offsets[ray + 1] - 1 - k if reverse else offsets[ray] + k
            if exclusive:
                out[i] = total
            total += values[i]
            if not exclusive:
                out[i] = total


@jit()
def _count_kept(first, last, offsets, keep, counts):
    for ray in range(first, last):
        total = 0
        for i in range(offsets[ray], offsets[ray + 1]):
            total += keep[i] != 0
        counts[ray] = total


@jit()
def _move_kept(first, last, offsets, keep, codes, t_starts, t_ends, new_offsets, new_starts, new_ends, new_rays):
    for ray in range(first, last):
        target = new_offsets[ray]
        if new_offsets[ray + 1] == target:
            continue
        for i in range(offsets[ray], offsets[ray + 1]):
            if keep[i]:
                new_starts[target] = t_starts[i]
                new_ends[target] = t_ends[i]
                if codes and keep[i] > 1:  # the sample stands for others: `thinning`
                    stretch = np.float32(2.0 ** ((np.float32(keep[i]) - ONE) / OCTAVE))
                    half = (t_ends[i] - t_starts[i]) * stretch * np.float32(0.5)
                    middle = (t_starts[i] + t_ends[i]) * np.float32(0.5)
                    new_starts[target], new_ends[target] = middle - half, middle + half
                new_rays[target] = ray
                target += 1


def fit_offsets(counts: np.ndarray, capacity: int | None) -> tuple[Tensor, Tensor | None]:
    """offsets (n_rays + 1,) int32 and, for a fixed capacity, how many whole rays fit: () int32."""
    ends = np.cumsum(np.append(0, counts))
    kept = len(counts) if capacity is None else int(np.searchsorted(ends, capacity, side="right")) - 1
    offsets = torch.from_numpy(ends.clip(max=ends[kept])).int()
    return offsets, None if capacity is None else torch.tensor(kept, dtype=torch.int32)


def empty_samples(offsets: Tensor, capacity: int | None, n_rays_kept: Tensor | None) -> PackedSamples:
    """Room for the samples that `offsets` promises, with a clean tail."""
    used = int(offsets[-1])
    length = used if capacity is None else capacity
    t_starts, t_ends = torch.empty(length), torch.empty(length)
    ray_indices = torch.empty(length, dtype=torch.int32)
    for tail in (t_starts[used:], t_ends[used:], ray_indices[used:]):
        tail.zero_()
    return PackedSamples(t_starts, t_ends, ray_indices, offsets, n_rays_kept)


def packed_sum(values: Tensor, offsets: Tensor) -> Tensor:
    shape, n_rays = values.shape, offsets.shape[0] - 1

    def run(values: Tensor) -> Tensor:
        rows = as_float32("values", values if values.dim() == 2 else values[:, None])
        out = torch.empty(n_rays, *shape[1:])  # no view: callers may write to it, which autograd forbids for views
        launch(_sum, n_rays, CHUNK, offsets, rows, out.view(n_rays, rows.shape[1]))
        return out

    def back(grad: Tensor) -> Tensor:
        out = torch.empty(shape[0], shape[1] if len(shape) == 2 else 1)
        out[int(offsets[-1]) :] = 0.0
        launch(_spread, n_rays, CHUNK, offsets, grad.float().reshape(n_rays, out.shape[1]), out)
        return out.view(shape)

    return linear(values, run, back)


def _cumsum(offsets: Tensor, exclusive: bool, reverse: bool, values: Tensor) -> Tensor:
    out = torch.empty(values.shape[0])
    out[int(offsets[-1]) :] = 0.0
    launch(_scan, offsets.shape[0] - 1, CHUNK, offsets, as_float32("values", values), exclusive, reverse, out)
    return out


def packed_cumsum(values: Tensor, offsets: Tensor, *, exclusive: bool, reverse: bool) -> Tensor:
    scan, back = (functools.partial(_cumsum, offsets, exclusive, turn) for turn in (reverse, not reverse))
    return linear(values, scan, back)


@torch.no_grad()
def compact(samples: PackedSamples, keep: Tensor, *, capacity: int | None) -> PackedSamples:
    offsets, mask, codes = samples.offsets, keep.contiguous().view(torch.uint8), keep.dtype == torch.uint8
    counts = np.empty(samples.n_rays, np.int32)
    launch(_count_kept, samples.n_rays, CHUNK, offsets, mask, counts)
    new_offsets, kept = fit_offsets(counts, capacity)
    if samples.n_rays_kept is not None:
        kept = samples.n_rays_kept if kept is None else torch.minimum(kept, samples.n_rays_kept)
    new = empty_samples(new_offsets, capacity, kept)
    old = (as_float32("t_starts", samples.t_starts), as_float32("t_ends", samples.t_ends))
    written = (new_offsets, new.t_starts, new.t_ends, new.ray_indices)
    launch(_move_kept, samples.n_rays, CHUNK, offsets, mask, codes, *old, *written)
    return new
