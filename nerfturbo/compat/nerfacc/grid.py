"""Boxes and grids met by rays; nothing here is differentiable. Nested cubes of cells, each box twice as large as the
one before, are marched by kernels; other boxes, other resolutions and the walk from cell to cell in plain torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, refuse
from ...ops import march
from ...ops._checks import check_shape
from ...ops.march import OccupancyBits, StepRule, pack_bits
from ...ops.march.reference import collect, inverse_lattice, lattice
from ...types import Aabb, PackedSamples
from . import _rays
from ._rays import RayIntervals, RaySamples, or_older, packed_info_of

__all__ = ["ray_aabb_intersect", "traverse_grids"]

MOST_REMEMBERED = 1 << 26  # samples of a walk that may be kept for its next steps: 0.8 GB
FAR = 1e10  # where nerfacc's unbounded rays end
NESTED_TOLERANCE = 1e-5  # of a box's size


def _one_box_intersect(rays_o: Tensor, rays_d: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    return ray_aabb_intersect(rays_o, rays_d, aabb)


@or_older(_one_box_intersect)
@torch.no_grad()
def ray_aabb_intersect(
    rays_o: Tensor, rays_d: Tensor, aabbs: Tensor, near_plane: float = -float("inf"),
    far_plane: float = float("inf"), miss_value: float = float("inf"),
) -> Any:  # fmt: skip
    """t_mins, t_maxs and hits, each (n_rays, m), of rays (n_rays, 3) and boxes (m, 6) of low and high corners. A box
    behind the origin is not hit. Misses hold `miss_value`; hits are clipped to near and far. For one box (6,) as until
    nerfacc 0.3: t_min and t_max (n_rays,), from 0 on, and 1e10 for a miss.

    >>> origins, directions = torch.tensor([[0.0, 0.0, -3.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    >>> t_min, t_max, hit = ray_aabb_intersect(origins, directions, torch.tensor([[-1.0, -1, -1, 1, 1, 1]]))
    >>> t_min.tolist(), t_max.tolist(), hit.tolist()
    ([[2.0]], [[4.0]], [[True]])
    """
    if aabbs.dim() == 1:
        t_mins, t_maxs, _ = ray_aabb_intersect(rays_o, rays_d, aabbs[None], 0.0, far_plane, FAR)
        return t_mins[:, 0], t_maxs[:, 0]
    for name, value, width in (("rays_o", rays_o, 3), ("rays_d", rays_d, 3), ("aabbs", aabbs, 6)):
        check_shape(name, value, ("n", width))
    origins, directions = rays_o[:, None, :], rays_d[:, None, :]
    low, high = aabbs[None, :, :3], aabbs[None, :, 3:]
    first, second = (low - origins) / directions, (high - origins) / directions
    enter, leave = torch.minimum(first, second), torch.maximum(first, second)
    # A ray along a face is inside that slab for ever, or never; the division gives no number for one on the face.
    along, inside = directions == 0.0, (origins >= low) & (origins <= high)
    forever = torch.where(inside, torch.inf, -torch.inf).to(enter.dtype)
    t_mins, t_maxs = torch.where(along, -forever, enter).amax(-1), torch.where(along, forever, leave).amin(-1)
    hits = (t_maxs > t_mins) & (t_maxs > 0.0)
    t_mins, t_maxs = (torch.where(hits, t.clamp(near_plane, far_plane), miss_value) for t in (t_mins, t_maxs))
    return t_mins, t_maxs, hits


_ray_aabb_intersect = ray_aabb_intersect


@torch.no_grad()
def traverse_grids(
    rays_o: Tensor, rays_d: Tensor, binaries: Tensor, aabbs: Tensor, near_planes: Tensor | None = None,
    far_planes: Tensor | None = None, step_size: float | None = 1e-3, cone_angle: float | None = 0.0,
    traverse_steps_limit: int | None = None, over_allocate: bool | None = False, rays_mask: Tensor | None = None,
    t_sorted: Tensor | None = None, t_indices: Tensor | None = None, hits: Tensor | None = None,
) -> tuple[RayIntervals, RaySamples, Tensor]:  # fmt: skip
    """The intervals of each ray whose midpoint lies in an occupied cell, their centres, and where each ray stopped.
    `binaries` (m, x, y, z) bool are grids over the boxes `aabbs` (m, 6); where boxes overlap the first one counts. A
    ray's steps start at its near plane; each has length max(step_size, cone_angle * t). A step size of 0 gives the
    stretches inside each occupied cell instead. `traverse_steps_limit` bounds the samples per ray: call again with the
    returned planes as near planes to go on. `rays_mask` leaves rays out. Results have their exact length, so that
    `over_allocate` and the precomputed intersections are accepted and not needed."""
    n_rays = rays_o.shape[0]
    check_shape("binaries", binaries, ("m", "x", "y", "z"))
    check_shape("aabbs", aabbs, (binaries.shape[0], 6))
    limit = traverse_steps_limit or -1
    refuse(bool(over_allocate) and limit <= 0, "traverse_steps_limit", "a positive number with over_allocate", limit)
    near = rays_o.new_zeros(n_rays) if near_planes is None else near_planes
    far = rays_o.new_full((n_rays,), float("inf")) if far_planes is None else far_planes
    planes = Planes(near, far, step_size or 0.0, cone_angle or 0.0)
    grids = Grids(binaries, aabbs)
    if limit > 0:
        sources = [rays_o, rays_d, *grids] + ([] if far_planes is None else [far_planes])
        key = planes.step_size, planes.cone_angle, *((id(source), _rays.version_of(source)) for source in sources)
        walk = None if near_planes is None else _rays.recall(near_planes, "walk")
        if walk is None or walk.key != key:
            samples, exits = traverse(rays_o, rays_d, grids, planes)
            walk = Walk(samples, samples.offsets[:-1], exits, key, sources)
        samples, exits, walk = walk.next_steps(near, rays_mask, limit)
        if walk.samples.capacity <= MOST_REMEMBERED:
            _rays.remember(exits, "walk", walk)
    else:
        if rays_mask is not None:
            planes = planes._replace(far=torch.where(rays_mask, far, near))
        samples, exits = traverse(rays_o, rays_d, grids, planes)
    return *_as_segments(samples), exits


def _as_segments(samples: PackedSamples) -> tuple[RayIntervals, RaySamples]:
    """Touching samples share an edge; so there are as many edges as samples and runs of touching samples."""
    t_starts, t_ends, offsets = samples.t_starts, samples.t_ends, samples.offsets
    n, device = t_starts.shape[0], t_starts.device
    rays, rows = _rays.indices_of(offsets, n), torch.arange(n, device=device)
    gap = (t_starts - t_ends.roll(1)).abs() > 0.25 * (t_ends - t_starts)
    opens = gap | (rows == offsets[rays])
    runs = torch.cumsum(opens, 0)
    right = rows + runs  # where the right edge of each sample stands
    n_edges = n + (int(runs[-1]) if n else 0)
    vals = t_starts.new_zeros(n_edges).index_copy(0, right, t_ends)
    vals = vals.index_copy(0, right[opens] - 1, t_starts[opens])
    is_right = torch.zeros(n_edges, dtype=torch.bool, device=device).index_fill(0, right, True)
    is_left = torch.zeros_like(is_right).index_fill(0, right - 1, True)
    edge_offsets = offsets + torch.nn.functional.pad(runs, (1, 0))[offsets.long()].int()
    owners = _rays.indices_of(edge_offsets, n_edges)
    intervals = RayIntervals(vals, packed_info_of(edge_offsets), owners, is_left, is_right)
    valid = torch.ones_like(rays, dtype=torch.bool)
    return intervals, RaySamples(samples.midpoints(), packed_info_of(offsets), rays, valid)


def _enlarge_aabb(aabb: Tensor, factor: float) -> Tensor:
    """The box (6,) scaled about its centre."""
    center, half = (aabb[:3] + aabb[3:]) * 0.5, (aabb[3:] - aabb[:3]) * 0.5
    return torch.cat([center - half * factor, center + half * factor])


def _query(x: Tensor, data: Tensor, base_aabb: Tensor) -> tuple[Tensor, Tensor]:
    """`values_at` points (n, 3) of nested grids."""
    return values_at(nested_grids(data, base_aabb), x)


Span = tuple[Tensor, Tensor]  # (n_rays,) from where to where
Test = Callable[[Tensor], Tensor]  # points (..., 3) -> (...,) bool


class Grids(NamedTuple):
    binaries: Tensor  # (m, x, y, z) bool
    aabbs: Tensor  # (m, 6)


def nested_grids(data: Tensor, base_aabb: Tensor) -> Grids:
    """Grids (m, x, y, z), the first over the box (6,), each twice as large as the one before."""
    return Grids(data, torch.stack([_enlarge_aabb(base_aabb, 2.0**level) for level in range(data.shape[0])]))


class Planes(NamedTuple):
    """Where each ray's steps begin and end, and how long they are."""

    near: Tensor  # (n_rays,)
    far: Tensor  # (n_rays,)
    step_size: float
    cone_angle: float

    @property
    def rule(self) -> StepRule:
        return StepRule(self.step_size, 0.0, float("inf"), self.cone_angle)


def traverse(origins: Tensor, directions: Tensor, grids: Grids, planes: Planes) -> tuple[PackedSamples, Tensor]:
    """Samples in occupied cells, of exact length, and t (n_rays,) where each ray leaves the grids or its far plane."""
    origins, directions = origins.detach().contiguous(), directions.detach().contiguous()
    if origins.dtype in (torch.float16, torch.bfloat16):
        origins, directions = origins.float(), directions.float()
    near, far = planes.near.to(origins.dtype), planes.far.to(origins.dtype)
    planes = planes._replace(near=near, far=far)
    t_min, t_max, hits = ray_aabb_intersect(origins, directions, grids.aabbs.to(origins.dtype))
    hit = hits.any(-1)  # from where a ray enters the first box to where it leaves the last
    enter = torch.where(hit, torch.maximum(t_min.amin(-1), near), near)
    leave = torch.where(hits, t_max, -float("inf")).amax(-1)
    leave = torch.maximum(torch.minimum(leave, far), near)
    if planes.step_size <= 0.0:
        return _cell_stretches(origins, directions, grids, enter, leave), leave
    occupancy = occupancy_bits(grids)
    if occupancy is None or origins.shape[0] == 0:
        return lattice_samples(
            origins, directions, planes, (enter, leave), lambda points: values_at(grids, points)[0].bool()
        ), leave
    # The lattice starts at every ray's own near plane.
    begin = inverse_lattice(planes.rule, near.clamp_min(0.0))
    limits = torch.stack([near, far], dim=-1)
    return march(origins, directions, occupancy, planes.rule, jitter=begin - begin.floor(), limits=limits), leave


def occupancy_bits(grids: Grids) -> OccupancyBits | None:
    """The grids as the marching kernel takes them, made again when they have changed; None if they do not fit."""
    binaries, aabbs = grids
    resolution, levels = binaries.shape[1], binaries.shape[0]
    if set(binaries.shape[1:]) != {resolution} or resolution % 4 or levels > 16:
        return None
    box = _rays.remembered(aabbs, "nested", lambda: (_nested_box(aabbs),))[0]
    if box is None:
        return None
    bits = _rays.remembered(binaries, "bits", lambda: pack_bits(binaries.reshape(-1).bool()))
    return OccupancyBits(bits, box, resolution, levels)


def _nested_box(aabbs: Tensor) -> Aabb | None:
    """The first box when every further one is twice as large about the same centre, else None; read back."""
    boxes = aabbs.detach().double().cpu()
    center, half = (boxes[:, :3] + boxes[:, 3:]) * 0.5, (boxes[:, 3:] - boxes[:, :3]) * 0.5
    if not bool((half > 0.0).all()) or not bool(torch.isfinite(boxes).all()):
        raise InputError("aabbs", "finite boxes with low < high", str(boxes.tolist()))
    scale = torch.pow(2.0, torch.arange(len(boxes), dtype=torch.float64))[:, None]
    wrong = (center - center[0]).abs() + (half - half[0] * scale).abs()
    if bool((wrong > NESTED_TOLERANCE * half).any()):
        return None
    low, high = boxes[0].view(2, 3).tolist()
    return Aabb(tuple(low), tuple(high))


def values_at(grids: Grids, points: Tensor) -> tuple[Tensor, Tensor]:
    """(...,) value of the cell of the first box that holds each point (..., 3), 0 outside all; and which are inside."""
    anywhere = torch.zeros(points.shape[:-1], dtype=torch.bool, device=points.device)
    result = anywhere.to(grids.binaries.dtype)
    for level in reversed(range(grids.binaries.shape[0])):
        low, high = grids.aabbs[level].to(points.dtype).view(2, 3)
        inside, value = cell_values((points - low) / (high - low), grids.binaries[level])
        result, anywhere = torch.where(inside, value, result), anywhere | inside
    return result, anywhere


def cell_values(unit: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Which points (..., 3) lie in [0, 1]^3, and the value of each one's cell (x, y, z)."""
    resolution = torch.tensor(grid.shape, device=unit.device)
    cell = torch.minimum((unit.clamp(0.0, 1.0) * resolution).long(), resolution - 1)
    return ((unit >= 0.0) & (unit <= 1.0)).all(-1), grid[cell[..., 0], cell[..., 1], cell[..., 2]]


def lattice_samples(
    origins: Tensor, directions: Tensor, planes: Planes, span: Span, keep: Test, most_steps: int | None = None
) -> PackedSamples:
    """Every step of every ray within its span whose midpoint (..., 3) passes the test `keep`."""
    rule, (enter, leave) = planes.rule, span
    begin, enter_at, last = (inverse_lattice(rule, t.clamp_min(0.0)) for t in (planes.near, enter, leave))
    first = begin + (enter_at - begin).floor().sub(1).clamp_min(0.0)
    n_steps = int((last - first).clamp_min(0).max().ceil().item()) if origins.shape[0] else 0
    bad, expected = most_steps is not None and n_steps > most_steps, f"at most {most_steps} steps along a ray"
    refuse(bad, "far_plane", expected, n_steps, "give a far_plane or a cone_angle")
    order = torch.arange(n_steps + 2, device=origins.device, dtype=origins.dtype)

    def pieces(rays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = first[rays, None] + order
        t0, t1 = lattice(rule, index), lattice(rule, index + 1.0)
        middle = (t0 + t1) * 0.5
        within = (middle >= enter[rays, None]) & (middle < leave[rays, None])
        return t0, t1, within & keep(origins[rays, None] + directions[rays, None] * middle[..., None])

    return PackedSamples.from_counts(*collect(origins[:, 0], n_steps + 2, pieces))


def _cell_stretches(origins: Tensor, directions: Tensor, grids: Grids, enter: Tensor, leave: Tensor) -> PackedSamples:
    """Cut each ray at every face of every cell, and keep the pieces in occupied cells."""
    faces, axes = [], []
    for box in grids.aabbs.to(origins.dtype):
        for axis, cells in enumerate(grids.binaries.shape[1:]):
            faces.append(box[axis] + (box[axis + 3] - box[axis]) * torch.arange(cells + 1, device=box.device) / cells)
            axes.append(torch.full((cells + 1,), axis, device=box.device))
    face, axis = torch.cat(faces), torch.cat(axes)

    def pieces(rays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = (face - origins[rays][:, axis]) / directions[rays][:, axis]
        bounds = torch.stack([enter[rays], leave[rays]], dim=-1)
        t = torch.cat([torch.nan_to_num(t, nan=0.0), bounds], dim=-1)
        t = torch.minimum(torch.maximum(t, bounds[:, :1]), bounds[:, 1:]).sort(-1).values
        t0, t1 = t[:, :-1], t[:, 1:]
        points = origins[rays, None] + directions[rays, None] * ((t0 + t1) * 0.5)[..., None]
        return t0, t1, (t1 - t0 > 1e-6 * t1.abs().clamp_min(1e-3)) & values_at(grids, points)[0].bool()

    return PackedSamples.from_counts(*collect(origins[:, 0], face.shape[0], pieces))


class Walk(NamedTuple):
    """A traversal that stops every few samples: all its samples, and how far each ray has come."""

    samples: PackedSamples
    cursor: Tensor  # (n_rays,) the next sample of each ray
    exits: Tensor  # (n_rays,) where each ray leaves the grids
    key: tuple[object, ...]  # its steps, and what it was made of: another walk, or a changed grid, has another one
    sources: list[Tensor]  # kept, so that what the key says of them stays true

    def next_steps(self, near: Tensor, mask: Tensor | None, limit: int) -> "tuple[PackedSamples, Tensor, Walk]":
        """The next `limit` samples of each ray in the mask, where each ray stops then, and the walk from there on."""
        counts = (self.samples.offsets[1:] - self.cursor).clamp_max(limit)
        counts = counts if mask is None else torch.where(mask, counts, 0)
        offsets = _rays.offsets_of_counts(counts)
        total = int(offsets[-1]) if counts.numel() else 0
        rays = _rays.indices_of(offsets, total)
        rows = torch.arange(total, device=offsets.device) - offsets[rays] + self.cursor[rays]
        samples = PackedSamples(self.samples.t_starts[rows], self.samples.t_ends[rows], rays.int(), offsets)
        stops = self.exits if mask is None else torch.where(mask, self.exits, near)
        if total:
            last = samples.t_ends[(offsets[1:] - 1).clamp_min(0).long()]
            stops = torch.where(counts == limit, last, stops)
        stops = stops.clone()  # a tensor of its own, for the walk to be _rays.remembered with
        return samples, stops, self._replace(cursor=self.cursor + counts)
