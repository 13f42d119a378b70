"""Boxes and grids met by rays. Nothing here is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from ._rays import indices_of, packed_info_of, recall, remember
from ._traverse import Grids, Planes, goes_on, next_steps, start_walk, traverse
from .data_specs import RayIntervals, RaySamples

MOST_REMEMBERED = 1 << 26  # samples of a walk that may be kept for its next steps: 0.8 GB


@torch.no_grad()
def ray_aabb_intersect(
    rays_o: Tensor,
    rays_d: Tensor,
    aabbs: Tensor,
    near_plane: float = -float("inf"),
    far_plane: float = float("inf"),
    miss_value: float = float("inf"),
) -> tuple[Tensor, Tensor, Tensor]:
    """t_mins, t_maxs and hits, each (n_rays, m), of rays (n_rays, 3) and boxes (m, 6) of low and high corners.

    A box behind the origin is not hit. Misses hold `miss_value`; hits are clipped to near and far.

    >>> origins, directions = torch.tensor([[0.0, 0.0, -3.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    >>> t_min, t_max, hit = ray_aabb_intersect(origins, directions, torch.tensor([[-1.0, -1, -1, 1, 1, 1]]))
    >>> t_min.tolist(), t_max.tolist(), hit.tolist()
    ([[2.0]], [[4.0]], [[True]])
    """
    for name, value, width in (("rays_o", rays_o, 3), ("rays_d", rays_d, 3), ("aabbs", aabbs, 6)):
        if value.dim() != 2 or value.shape[-1] != width:
            raise InputError(name, f"shape (n, {width})", str(tuple(value.shape)))
    return _ray_aabb_intersect(rays_o, rays_d, aabbs, near_plane, far_plane, miss_value)


def _ray_aabb_intersect(
    rays_o: Tensor,
    rays_d: Tensor,
    aabbs: Tensor,
    near_plane: float = -float("inf"),
    far_plane: float = float("inf"),
    miss_value: float = float("inf"),
) -> tuple[Tensor, Tensor, Tensor]:
    origins, directions = rays_o[:, None, :], rays_d[:, None, :]
    low, high = aabbs[None, :, :3], aabbs[None, :, 3:]
    first, second = (low - origins) / directions, (high - origins) / directions
    enter, leave = torch.minimum(first, second), torch.maximum(first, second)
    # A ray along a face is inside that slab for ever, or never; the division gives no number for one on the face.
    along, inside = directions == 0.0, (origins >= low) & (origins <= high)
    infinity = torch.full_like(enter, float("inf"))
    enter = torch.where(along, torch.where(inside, -infinity, infinity), enter)
    leave = torch.where(along, torch.where(inside, infinity, -infinity), leave)
    t_mins, t_maxs = enter.amax(-1), leave.amin(-1)
    hits = (t_maxs > t_mins) & (t_maxs > 0.0)
    missed = torch.full_like(t_mins, miss_value)
    t_mins = torch.where(hits, t_mins.clamp(near_plane, far_plane), missed)
    t_maxs = torch.where(hits, t_maxs.clamp(near_plane, far_plane), missed)
    return t_mins, t_maxs, hits


@torch.no_grad()
def traverse_grids(
    rays_o: Tensor,
    rays_d: Tensor,
    binaries: Tensor,
    aabbs: Tensor,
    near_planes: Tensor | None = None,
    far_planes: Tensor | None = None,
    step_size: float | None = 1e-3,
    cone_angle: float | None = 0.0,
    traverse_steps_limit: int | None = None,
    over_allocate: bool | None = False,
    rays_mask: Tensor | None = None,
    t_sorted: Tensor | None = None,
    t_indices: Tensor | None = None,
    hits: Tensor | None = None,
) -> tuple[RayIntervals, RaySamples, Tensor]:
    """The intervals of each ray whose midpoint lies in an occupied cell, their centres, and where each ray stopped.

    `binaries` (m, x, y, z) bool are grids over the boxes `aabbs` (m, 6); where boxes overlap the first one counts.
    A ray's steps start at its near plane; each has length max(step_size, cone_angle * t). A step size of 0 gives the
    stretches inside each occupied cell instead. `traverse_steps_limit` bounds the samples per ray: call again with
    the returned planes as near planes to go on. `rays_mask` leaves rays out. `over_allocate` and the precomputed
    intersections are accepted and not needed: results always have their exact length.
    """
    n_rays = rays_o.shape[0]
    if binaries.dim() != 4 or aabbs.dim() != 2 or aabbs.shape != (binaries.shape[0], 6):
        got = f"{tuple(binaries.shape)} and {tuple(aabbs.shape)}"
        raise InputError("binaries and aabbs", "shapes (m, x, y, z) and (m, 6)", got)
    limit = traverse_steps_limit if traverse_steps_limit is not None else -1
    if over_allocate and limit <= 0:
        raise InputError("traverse_steps_limit", "a positive number with over_allocate", str(traverse_steps_limit))
    near = rays_o.new_zeros(n_rays) if near_planes is None else near_planes
    far = rays_o.new_full((n_rays,), float("inf")) if far_planes is None else far_planes
    planes = Planes(near, far, step_size or 0.0, cone_angle or 0.0)
    grids = Grids(binaries, aabbs)
    if limit > 0:
        walk = None if near_planes is None else recall(near_planes, "walk")
        sources = [rays_o, rays_d, *grids] + ([] if far_planes is None else [far_planes])
        if walk is None or not goes_on(walk, planes, sources):
            walk = start_walk(rays_o, rays_d, grids, planes, sources)
        samples, exits, walk = next_steps(walk, near, rays_mask, limit)
        if walk.samples.capacity <= MOST_REMEMBERED:
            remember(exits, "walk", walk)
    else:
        if rays_mask is not None:
            planes = planes._replace(far=torch.where(rays_mask, far, near))
        samples, exits = traverse(rays_o, rays_d, grids, planes)
    return *_as_segments(samples.t_starts, samples.t_ends, samples.offsets), exits


def _as_segments(t_starts: Tensor, t_ends: Tensor, offsets: Tensor) -> tuple[RayIntervals, RaySamples]:
    """Touching samples share an edge; so there are as many edges as samples and runs of touching samples."""
    n, device = t_starts.shape[0], t_starts.device
    rays = indices_of(offsets, n)
    rows = torch.arange(n, device=device)
    middle = (t_starts + t_ends) * 0.5
    gap = (t_starts - t_ends.roll(1)).abs() > 0.25 * (t_ends - t_starts)
    opens = gap | (rows == offsets[rays]) if n else torch.zeros(0, dtype=torch.bool, device=device)
    runs = torch.cumsum(opens, 0)
    right = rows + runs  # where the right edge of each sample stands
    n_edges = n + (int(runs[-1]) if n else 0)
    vals = t_starts.new_zeros(n_edges).index_copy(0, right, t_ends)
    vals = vals.index_copy(0, right[opens] - 1, t_starts[opens])
    is_right = torch.zeros(n_edges, dtype=torch.bool, device=device).index_fill(0, right, True)
    is_left = torch.zeros_like(is_right).index_fill(0, right - 1, True)
    owners = torch.zeros(n_edges, dtype=torch.long, device=device).index_copy(0, right, rays)
    owners = owners.index_copy(0, right - 1, rays)
    before = torch.cat([runs.new_zeros(1), runs])
    edge_offsets = offsets + before[offsets.long()].int()
    intervals = RayIntervals(vals, packed_info_of(edge_offsets), owners, is_left, is_right)
    return intervals, RaySamples(middle, packed_info_of(offsets), rays, torch.ones_like(rays, dtype=torch.bool))


def _enlarge_aabb(aabb: Tensor, factor: float) -> Tensor:
    """The box (6,) scaled about its centre."""
    center, half = (aabb[:3] + aabb[3:]) * 0.5, (aabb[3:] - aabb[:3]) * 0.5
    return torch.cat([center - half * factor, center + half * factor])


def _query(x: Tensor, data: Tensor, base_aabb: Tensor) -> tuple[Tensor, Tensor]:
    """Values (n,) of nested grids (m, x, y, z), each twice as large as the one before, at points (n, 3); and which
    points lie inside the outermost box. Points outside have the value 0."""
    low, high = base_aabb[:3], base_aabb[3:]
    unit = (x - (low + high) * 0.5) / (high - low)  # [-0.5, 0.5] inside the first box
    size = unit.abs().amax(-1).clamp_min(0.1)
    level = (torch.frexp(size).exponent.long() + 1).clamp_min(0)
    inside = level < data.shape[0]
    resolution = torch.tensor(data.shape[1:], device=x.device)
    cell = ((unit / torch.pow(2.0, level.to(x.dtype))[:, None] + 0.5) * resolution).long()
    cell = torch.minimum(cell.clamp_min(0), resolution - 1)
    level = level.clamp_max(data.shape[0] - 1)
    return data[level, cell[:, 0], cell[:, 1], cell[:, 2]] * inside, inside
