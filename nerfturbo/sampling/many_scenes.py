"""Rays of many scenes in one batch: each is marched through the grid of its own scene."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.march import StepRule, march
from ..types import PackedSamples, Rays
from .occupancy_grid import OccupancyGrid


def march_scenes(
    rays: Rays, grids: Sequence[OccupancyGrid], scene_indices: Tensor, rule: StepRule, *, jitter: Tensor | None = None
) -> PackedSamples:
    """The samples of each ray in the occupied cells of grids[scene_indices[ray]], in ray order. Not differentiable.

    `scene_indices` (n_rays,) int64. One march per scene, and the numbers of rays per scene are read back once.
    """
    if tuple(scene_indices.shape) != (len(rays),) or scene_indices.is_floating_point():
        got = f"{tuple(scene_indices.shape)} {scene_indices.dtype}"
        raise InputError("scene_indices", f"whole numbers of shape ({len(rays)},)", got)
    order = torch.argsort(scene_indices, stable=True)
    counts = torch.bincount(scene_indices.long().clamp_min(0), minlength=len(grids)).tolist()
    if len(counts) > len(grids) or bool((scene_indices < 0).any()):
        raise InputError("scene_indices", f"scenes from 0 to {len(grids) - 1}", "others among them")
    parts, begin = [], 0
    for grid, count in zip(grids, counts, strict=True):
        mine = order[begin : begin + count]
        begin += count
        if count:
            shift = None if jitter is None else jitter[mine]
            parts.append(march(rays.origins[mine], rays.directions[mine], grid.occupancy, rule, jitter=shift))
    return _in_ray_order(parts, order)


def _in_ray_order(parts: Sequence[PackedSamples], order: Tensor) -> PackedSamples:
    """Put the samples of sorted rays where their rays stand; `order` is the ray that each sorted one was."""
    device, n_rays = order.device, order.shape[0]
    sorted_counts = torch.cat([part.offsets.diff() for part in parts] + [order.new_zeros(0, dtype=torch.int32)])
    counts = torch.zeros(n_rays, dtype=torch.int32, device=device).index_copy(0, order, sorted_counts)
    starts = torch.cat([part.t_starts for part in parts] + [torch.zeros(0, device=device)])
    ends = torch.cat([part.t_ends for part in parts] + [torch.zeros(0, device=device)])
    result = PackedSamples.from_counts(counts, starts, ends)
    owner = torch.repeat_interleave(torch.arange(n_rays, device=device), sorted_counts)  # sorted ray of each sample
    first = torch.cumsum(sorted_counts, 0) - sorted_counts
    place = result.offsets[order[owner]] + torch.arange(starts.shape[0], device=device) - first[owner]
    t_starts, t_ends = torch.empty_like(starts), torch.empty_like(ends)
    t_starts[place], t_ends[place] = starts, ends
    return PackedSamples(t_starts, t_ends, result.ray_indices, result.offsets)
