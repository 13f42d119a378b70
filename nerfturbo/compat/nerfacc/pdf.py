"""Searching and resampling along rays, batched or flattened. Nothing here is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from ._rays import RayIntervals, RaySamples, offsets_of, offsets_of_counts, packed_info_of


@torch.no_grad()
def searchsorted(
    sorted_sequence: RayIntervals | RaySamples, values: RayIntervals | RaySamples
) -> tuple[Tensor, Tensor]:
    """ids_left, ids_right in the shape of `values.vals`: sequence[left] <= value < sequence[right] on the same ray.

    A value outside its ray's range counts as clipped to it: it gets the first or the last two neighbours. The indices
    of batched values count along the ray, those of flattened values over the whole flattened sequence.

    >>> key = RayIntervals(torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([[0, 2], [2, 3]]))
    >>> query = RayIntervals(torch.tensor([0.5, 1.5, 2.5]), torch.tensor([[0, 1], [1, 2]]))
    >>> [ids.tolist() for ids in searchsorted(key, query)]
    [[0, 3, 3], [1, 4, 4]]
    """
    keys, queries = sorted_sequence.vals, values.vals
    if keys.dim() > 1 and queries.dim() > 1 and keys.shape[-1] > 1:
        right = torch.searchsorted(keys[..., :-1].contiguous(), queries.contiguous(), right=True).clamp_min(1)
        return right - 1, right
    first, count = _chunks(sorted_sequence)
    rays = _rays_of(values)
    base, last = first[rays], (first + count - 1)[rays]
    right = _upper_bound(keys.reshape(-1), base, last, queries.reshape(-1))
    right = torch.minimum(torch.maximum(right, base + 1), torch.maximum(last, base))
    left = torch.maximum(right - 1, base)
    if queries.dim() > 1:
        left, right = left - base, right - base
    return left.view(queries.shape), right.view(queries.shape)


@torch.no_grad()
def importance_sampling(
    intervals: RayIntervals, cdfs: Tensor, n_intervals_per_ray: Tensor | int, stratified: bool = False
) -> tuple[RayIntervals, RaySamples]:
    """New intervals and their centres, spread evenly over each ray's share of the cumulative distribution `cdfs`.

    The centre of interval i is where the distribution, linear between the given edges, reaches
    (i + b) / n of its range; b is 0.5, or, stratified, one random number per ray. Edges lie between centres. With a
    number for `n_intervals_per_ray` the result is batched, (n_rays, n + 1) and (n_rays, n); with a tensor (n_rays,)
    it is flattened.

    >>> edges = RayIntervals(torch.tensor([[0.0, 1.0, 2.0]]))
    >>> new, centres = importance_sampling(edges, torch.tensor([[0.0, 0.5, 1.0]]), 2)
    >>> new.vals.tolist(), centres.vals.tolist()
    ([[0.0, 1.0, 2.0]], [[0.5, 1.5]])
    """
    if cdfs.shape != intervals.vals.shape:
        raise InputError("cdfs", f"shape {tuple(intervals.vals.shape)}, as the edges", str(tuple(cdfs.shape)))
    if isinstance(n_intervals_per_ray, Tensor):
        return _resample_ragged(intervals, cdfs, n_intervals_per_ray.reshape(-1).long(), stratified)
    number = int(n_intervals_per_ray)
    if number < 1:
        raise InputError("n_intervals_per_ray", "at least 1", str(number))
    if intervals.vals.dim() == 1:
        counts = torch.full_like(_chunks(intervals)[1], number)
        edges, centres = _resample_ragged(intervals, cdfs, counts, stratified)
        return RayIntervals(edges.vals.view(-1, number + 1)), RaySamples(centres.vals.view(-1, number))
    old, batch = intervals.vals.flatten(0, -2), intervals.vals.shape[:-1]
    low, high, cdfs = old[:, :1], old[:, -1:], cdfs.flatten(0, -2)
    order = torch.arange(number, device=cdfs.device, dtype=cdfs.dtype)
    share = (order + _bias(cdfs, old.shape[0], stratified)) / number
    wanted = cdfs[:, :1] + share * (cdfs[:, -1:] - cdfs[:, :1])
    above = torch.searchsorted(cdfs.contiguous(), wanted, right=True).clamp_max(cdfs.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    c0, c1 = cdfs.gather(1, below), cdfs.gather(1, above)
    centres = _between(c0, c1, old.gather(1, below), old.gather(1, above), wanted)
    edges = torch.cat([low, high], dim=-1) if number == 1 else _edges(centres, low, high)
    return RayIntervals(edges.view(*batch, number + 1)), RaySamples(centres.view(*batch, number))


def _edges(centres: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """(..., n + 1), n > 1: between the centres, and as far beyond the first and the last of them within the limits."""
    between = (centres[..., 1:] + centres[..., :-1]) * 0.5
    start, end = 2.0 * centres[..., :1] - between[..., :1], 2.0 * centres[..., -1:] - between[..., -1:]
    return torch.cat([start.clamp_min(low), between, end.clamp_max(high)], dim=-1)


def _bias(cdfs: Tensor, n_rays: int, stratified: bool) -> Tensor:
    """(n_rays, 1): where in its share of the distribution each centre of a ray lies, at random or in the middle."""
    if stratified:
        return torch.rand(n_rays, 1, device=cdfs.device, dtype=cdfs.dtype)
    return cdfs.new_full((n_rays, 1), 0.5)


def _resample_ragged(
    intervals: RayIntervals, cdfs: Tensor, counts: Tensor, stratified: bool
) -> tuple[RayIntervals, RaySamples]:
    """`importance_sampling` of another number of intervals on each ray: n centres have n + 1 edges, none have none."""
    (first, count), edges = _chunks(intervals), intervals.vals.reshape(-1)
    each = torch.arange(first.shape[0], device=cdfs.device)
    rays, n_edges = torch.repeat_interleave(each, counts), (counts + 1) * (counts > 0)
    order = torch.arange(rays.shape[0], device=cdfs.device) - offsets_of_counts(counts)[rays]
    share = (order + _bias(cdfs, first.shape[0], stratified)[rays, 0]) / counts[rays]
    flat, base, last = cdfs.reshape(-1), first[rays], (first + count - 1)[rays]
    wanted = flat[base] + share * (flat[last] - flat[base])
    above = _upper_bound(flat, base, last, wanted)
    below = torch.maximum(above - 1, base)
    centres = _between(flat[below], flat[above], edges[below], edges[above], wanted)
    low, high = edges[base], edges[last]
    alone, is_first, is_last = counts[rays] == 1, order == 0, order == counts[rays] - 1
    before, after = centres.roll(1), centres.roll(-1)
    start = torch.where(is_first, torch.maximum(centres - (after - centres) * 0.5, low), (centres + before) * 0.5)
    end = torch.minimum(centres + (centres - before) * 0.5, high)
    start, end = torch.where(alone, low, start), torch.where(alone, high, end)
    edge_offsets, owners = offsets_of_counts(n_edges), torch.repeat_interleave(each, n_edges)
    at = (edge_offsets[rays] + order).long()
    new = torch.zeros_like(owners, dtype=edges.dtype).scatter(0, at, start).scatter(0, at[is_last] + 1, end[is_last])
    is_left, is_right = (torch.zeros_like(new, dtype=torch.bool).index_fill(0, at + i, True) for i in (0, 1))
    return (
        RayIntervals(new, packed_info_of(edge_offsets), owners, is_left, is_right),
        RaySamples(centres, packed_info_of(offsets_of_counts(counts)), rays),
    )


def _between(c0: Tensor, c1: Tensor, t0: Tensor, t1: Tensor, wanted: Tensor) -> Tensor:
    """Where the line from (t0, c0) to (t1, c1) reaches `wanted`; the middle, where it does not rise."""
    flat_part = c1 - c0 < 1e-10
    slope = (t1 - t0) / torch.where(flat_part, torch.ones_like(c0), c1 - c0)
    return torch.where(flat_part, (t0 + t1) * 0.5, t0 + (wanted - c0) * slope)


def _chunks(segments: RayIntervals | RaySamples) -> tuple[Tensor, Tensor]:
    """First element and number of elements of each ray, (n_rays,) int64 each."""
    vals = segments.vals
    if vals.dim() > 1:
        rays = torch.arange(vals.numel() // max(vals.shape[-1], 1), device=vals.device)
        return rays * vals.shape[-1], torch.full_like(rays, vals.shape[-1])
    offsets = offsets_of(vals, segments.packed_info, segments.ray_indices, None)
    if offsets is None:
        raise InputError("packed_info", "packed_info or ray_indices beside flattened values", "neither")
    info = packed_info_of(offsets)
    return info[:, 0], info[:, 1]


def _rays_of(segments: RayIntervals | RaySamples) -> Tensor:
    """The ray of each element, flattened."""
    if segments.vals.dim() == 1 and segments.ray_indices is not None:
        return segments.ray_indices.long()
    first, count = _chunks(segments)
    rays = torch.arange(first.shape[0], device=first.device)
    return torch.repeat_interleave(rays, count, output_size=segments.vals.numel())


def _upper_bound(keys: Tensor, low: Tensor, high: Tensor, values: Tensor) -> Tensor:
    """The first index in [low, high) whose key is larger than the value, else `high`; every query has its own range."""
    if keys.shape[0] == 0:
        return low
    for _ in range(keys.shape[0].bit_length()):
        middle = (low + high) // 2
        beyond = (keys[middle.clamp_max(keys.shape[0] - 1)] > values) | (low >= high)
        low, high = torch.where(beyond, low, middle + 1), torch.where(beyond, middle, high)
        high = torch.maximum(low, high)
    return low


def _sample_from_weighted(
    bins: Tensor,
    weights: Tensor,
    num_samples: int,
    stratified: bool = False,
    vmin: float | Tensor = -torch.inf,
    vmax: float | Tensor = torch.inf,
) -> tuple[Tensor, Tensor]:
    """Edges (..., n + 1) and centres (..., n) drawn from the histogram of weights (..., b) over bins (..., b + 1)."""
    total = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    running = torch.cumsum(weights / total, dim=-1)
    cdf = torch.cat([torch.zeros_like(running[..., :1]), running[..., :-1], torch.ones_like(running[..., :1])], -1)
    rows, cdf = bins.reshape(-1, bins.shape[-1]), cdf.reshape(-1, bins.shape[-1])
    drawn = importance_sampling(RayIntervals(rows), cdf, num_samples, stratified)[1]
    centres = drawn.vals.view(*bins.shape[:-1], num_samples)
    if num_samples == 1:
        return torch.cat([centres.clamp_min(vmin), centres.clamp_max(vmax)], dim=-1), centres
    return _edges(centres, vmin, vmax), centres
