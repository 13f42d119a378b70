"""Searching and resampling along rays, batched or flattened. Nothing here is differentiable."""

from math import inf
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, refuse
from ...ops import packed_cumsum, packed_sum
from . import _rays
from ._rays import RayIntervals, RaySamples, packed_info_of

__all__ = ["importance_sampling", "ray_resampling", "searchsorted"]

Limit = float | Tensor


@torch.no_grad()
def searchsorted(
    sorted_sequence: RayIntervals | RaySamples, values: RayIntervals | RaySamples
) -> tuple[Tensor, Tensor]:
    """ids_left, ids_right in the shape of `values.vals`: sequence[left] <= value < sequence[right] on the same ray. A
    value outside its ray's range counts as clipped to it: it gets the first or the last two neighbours. The indices of
    batched values count along the ray, those of flattened values over the whole flattened sequence.

    >>> key = RayIntervals(torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([[0, 2], [2, 3]]))
    >>> query = RayIntervals(torch.tensor([0.5, 1.5, 2.5]), torch.tensor([[0, 1], [1, 2]]))
    >>> [ids.tolist() for ids in searchsorted(key, query)]
    [[0, 3, 3], [1, 4, 4]]
    """
    (keys, first, last), (queries, _, n) = (_padded(part, part.vals) for part in (sorted_sequence, values))
    n_rays = queries.shape[0]  # fewer than of the keys, where the last rays have no values
    first, last = (part[:n_rays] if isinstance(part, Tensor) else part for part in (first, last))
    right = torch.searchsorted(keys[:n_rays, :-1].contiguous(), queries.contiguous(), right=True)
    right = right.clamp_min(1).clamp(max=last).clamp_min(0)
    left = (right - 1).clamp_min(0)
    if values.vals.dim() > 1:
        return left.view(values.vals.shape), right.view(values.vals.shape)
    if sorted_sequence.vals.dim() > 1:
        first = torch.arange(n_rays, device=keys.device)[:, None] * keys.shape[1]
    real = torch.arange(queries.shape[1], device=queries.device) <= n
    return (left + first)[real], (right + first)[real]


@torch.no_grad()
def importance_sampling(
    intervals: RayIntervals, cdfs: Tensor, n_intervals_per_ray: Tensor | int, stratified: bool = False
) -> tuple[RayIntervals, RaySamples]:
    """New intervals and their centres, spread evenly over each ray's share of the cumulative distribution `cdfs`. The
    centre of interval i is where the distribution, linear between the given edges, reaches (i + b) / n of its range; b
    is 0.5, or, stratified, one random number per ray. Edges lie between centres. With a number for
    `n_intervals_per_ray` the result is batched, (n_rays, n + 1) and (n_rays, n); with a tensor (n_rays,) it is
    flattened.

    >>> edges = RayIntervals(torch.tensor([[0.0, 1.0, 2.0]]))
    >>> new, centres = importance_sampling(edges, torch.tensor([[0.0, 0.5, 1.0]]), 2)
    >>> new.vals.tolist(), centres.vals.tolist()
    ([[0.0, 1.0, 2.0]], [[0.5, 1.5]])
    """
    shape = intervals.vals.shape
    refuse(cdfs.shape != shape, "cdfs", f"shape {tuple(shape)}, as the edges", tuple(cdfs.shape))
    (old, _, last), (cdfs, _, _) = _padded(intervals, intervals.vals), _padded(intervals, cdfs)
    ragged = isinstance(n_intervals_per_ray, Tensor)
    n = n_intervals_per_ray.reshape(-1, 1).long() if ragged else int(n_intervals_per_ray)
    width = int(n) if not isinstance(n, Tensor) else max(1, int(n.max())) if n.numel() else 1
    refuse(width < 1, "n_intervals_per_ray", "at least 1", width)
    order = torch.arange(width, device=cdfs.device)
    bias = torch.rand(len(cdfs), 1, device=cdfs.device, dtype=cdfs.dtype) if stratified else 0.5
    share = (order.to(cdfs.dtype) + bias) / n
    wanted = cdfs[:, :1] + share * (cdfs[:, -1:] - cdfs[:, :1])
    above = torch.searchsorted(cdfs.contiguous(), wanted, right=True).clamp(max=last).clamp_min(0)
    below = (above - 1).clamp_min(0)
    c0, c1 = cdfs.gather(1, below), cdfs.gather(1, above)
    t0, t1, flat = old.gather(1, below), old.gather(1, above), c1 - c0 < 1e-10  # flat parts: their middle
    centres = torch.where(flat, (t0 + t1) * 0.5, t0 + (wanted - c0) * (t1 - t0) / torch.where(flat, 1.0, c1 - c0))
    low, high = old[:, :1], old[:, -1:]
    if isinstance(n, Tensor):
        return _ragged(centres, n, low, high)
    edges = torch.cat([low, high], dim=-1) if width == 1 else _edges(centres, low, high)
    batch = shape[:-1] or (-1,)
    return RayIntervals(edges.view(*batch, width + 1)), RaySamples(centres.view(*batch, width))


def _ragged(centres: Tensor, n: Tensor, low: Tensor, high: Tensor) -> tuple[RayIntervals, RaySamples]:
    """The first n (n_rays, 1) of the centres of each ray, flattened, and their n + 1 edges; none have none."""
    order = torch.arange(centres.shape[1] + 1, device=centres.device)
    last, before = (centres.gather(1, (n - back).clamp_min(0)) for back in (1, 2))
    beyond = torch.where(order[:-1] < n, centres, 2.0 * last - before)
    edges = _edges(beyond, low, high).minimum(high) if centres.shape[1] > 1 else torch.cat([low, high], dim=-1)
    edges = torch.where(n == 1, torch.where(order == 0, low, high), edges)
    real, kept = order[:-1] < n, (order <= n) & (n > 0)
    is_left, is_right = ((order < n).expand_as(kept)[kept], (order > 0).expand_as(kept)[kept])
    infos = [packed_info_of(_rays.offsets_of_counts(counts[:, 0])) for counts in ((n + 1) * (n > 0), n)]
    return (
        RayIntervals(edges[kept], infos[0], kept.nonzero()[:, 0], is_left, is_right),
        RaySamples(centres[real], infos[1], real.nonzero()[:, 0]),
    )


@torch.no_grad()
def ray_resampling(
    packed_info: Tensor, t_starts: Tensor, t_ends: Tensor, weights: Tensor, n_samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """packed_info (n_rays, 2), t_starts and t_ends (all, 1): `n_samples` new samples on each ray that has any. Their
    edges lie where the running sum of the weights (n,) or (n, 1), linear inside each sample, reaches (j + 1/2) /
    (n_samples + 1) of its range. A ray without weight is resampled by its length in samples."""
    offsets, flat = _rays.offsets_of_packed_info(packed_info, t_starts.shape[0]), weights.reshape(-1)
    counts, rays = offsets.diff(), _rays.indices_of(offsets, flat.shape[0])
    total = packed_sum(flat.contiguous(), offsets)
    flat = flat + ((1e-5 - total).clamp_min(0.0) / counts.clamp_min(1))[rays]
    ends = packed_cumsum(flat, offsets, exclusive=False)
    cdfs = torch.stack([ends - flat, ends], dim=-1).reshape(-1)
    edges = RayIntervals(torch.cat([t_starts, t_ends], dim=-1).reshape(-1), packed_info_of(offsets * 2))
    per_ray = torch.where(counts > 0, n_samples, 0)
    centres = importance_sampling(edges, cdfs, per_ray + (counts > 0))[1].vals.view(-1, n_samples + 1)
    new = packed_info_of(_rays.offsets_of_counts(per_ray)).to(packed_info.dtype)
    return new, centres[:, :-1].reshape(-1, 1), centres[:, 1:].reshape(-1, 1)


def _edges(centres: Tensor, low: Limit, high: Limit) -> Tensor:
    """(..., n + 1), n > 1: between the centres, and as far beyond the first and the last of them within the limits."""
    between = (centres[..., 1:] + centres[..., :-1]) * 0.5
    start, end = 2.0 * centres[..., :1] - between[..., :1], 2.0 * centres[..., -1:] - between[..., -1:]
    return torch.cat([start.clamp_min(low), between, end.clamp_max(high)], dim=-1)


def _padded(segments: RayIntervals | RaySamples, values: Tensor) -> tuple[Tensor, Any, Any]:
    """Values (n_rays, longest) in the form of the segments, the last of a ray repeated. With them, for flattened ones:
    where each ray begins, and the column of its last value, -1 for none, (n_rays, 1); for batched ones: numbers."""
    if values.dim() > 1:
        return values.flatten(0, -2), 0, values.shape[-1] - 1
    offsets = _rays.offsets_of(values, segments.packed_info, segments.ray_indices, None)
    if offsets is None:
        raise InputError("packed_info", "packed_info or ray_indices beside flattened values", "neither")
    first, count = packed_info_of(offsets).split(1, dim=-1)
    if values.shape[0] == 0:
        return values.new_zeros(first.shape[0], 1), first, count - 1
    column = torch.arange(int(count.max()), device=values.device).clamp(max=(count - 1).clamp_min(0))
    return values[(first + column).clamp_max(values.shape[0] - 1)], first, count - 1


def _sample_from_weighted(
    bins: Tensor, weights: Tensor, num_samples: int, stratified: bool = False, vmin: Limit = -inf, vmax: Limit = inf
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
