"""Marching rays through nerfacc's grids.

Nested cubes of cells, each box twice as large as the one before, are what `nerfturbo.ops.march` walks, by kernels.
Other grids (any boxes, any resolution per axis) and the walk from cell to cell are done in plain torch here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import march
from ...ops.march import OccupancyBits, StepRule, pack_bits
from ...types import Aabb, PackedSamples
from ._rays import indices_of, offsets_of_counts, remembered, version_of

TESTED_AT_ONCE = 1 << 22  # points held in memory at a time
NESTED_TOLERANCE = 1e-5  # of a box's size


class Grids(NamedTuple):
    binaries: Tensor  # (m, x, y, z) bool
    aabbs: Tensor  # (m, 6)


class Planes(NamedTuple):
    """Where each ray's steps begin and end, and how long they are."""

    near: Tensor  # (n_rays,)
    far: Tensor  # (n_rays,)
    step_size: float
    cone_angle: float


def traverse(origins: Tensor, directions: Tensor, grids: Grids, planes: Planes) -> tuple[PackedSamples, Tensor]:
    """Samples in occupied cells, of exact length, and t (n_rays,) where each ray leaves the grids or its far plane."""
    origins, directions = origins.detach().contiguous(), directions.detach().contiguous()
    if origins.dtype in (torch.float16, torch.bfloat16):
        origins, directions = origins.float(), directions.float()
    near, far = planes.near.to(origins.dtype), planes.far.to(origins.dtype)
    planes = planes._replace(near=near, far=far)
    enter, leave = outer_range(origins, directions, grids.aabbs.to(origins.dtype), near, far)
    if planes.step_size <= 0.0:
        return _cell_stretches(origins, directions, grids, enter, leave), leave
    box = nested_box(grids.aabbs)
    resolution = grids.binaries.shape[1]
    cubes = set(grids.binaries.shape[1:]) == {resolution} and resolution % 4 == 0 and grids.binaries.shape[0] <= 16
    if box is None or not cubes or origins.shape[0] == 0:
        return _lattice_samples(origins, directions, grids, planes, enter, leave), leave
    bits = remembered(grids.binaries, "bits", lambda: pack_bits(grids.binaries.reshape(-1).bool()))
    occupancy = OccupancyBits(bits, box, resolution, grids.binaries.shape[0])
    return march_planes(origins, directions, occupancy, planes), leave


def march_planes(origins: Tensor, directions: Tensor, occupancy: OccupancyBits, planes: Planes) -> PackedSamples:
    """`march` with a lattice that starts at every ray's own near plane."""
    rule = StepRule(planes.step_size, 0.0, float("inf"), planes.cone_angle)
    begin = lattice_index(planes.near.clamp_min(0.0), planes.step_size, planes.cone_angle)
    limits = torch.stack([planes.near, planes.far], dim=-1)
    return march(origins, directions, occupancy, rule, jitter=begin - begin.floor(), limits=limits)


def lattice_index(t: Tensor, step_size: float, cone_angle: float) -> Tensor:
    """The inverse of `lattice_point`: steps of `step_size` up to t = step_size / cone_angle, then growing ones."""
    if cone_angle == 0.0:
        return t / step_size
    bend = step_size / cone_angle
    growing = 1.0 / cone_angle + torch.log(t.clamp_min(bend) / bend) / math.log1p(cone_angle)
    return torch.where(t < bend, t / step_size, growing)


def lattice_point(index: Tensor, step_size: float, cone_angle: float) -> Tensor:
    """t after `index` steps from 0."""
    if cone_angle == 0.0:
        return index * step_size
    bend_index = 1.0 / cone_angle
    growth = math.log1p(cone_angle)
    growing = step_size / cone_angle * torch.exp((index - bend_index).clamp_min(0.0) * growth)
    return torch.where(index < bend_index, index * step_size, growing)


def nested_box(aabbs: Tensor) -> Aabb | None:
    """The first box when every further one is twice as large about the same centre, else None; read back once."""

    def make() -> tuple[Aabb | None]:
        boxes = aabbs.detach().double().cpu()
        center, half = (boxes[:, :3] + boxes[:, 3:]) * 0.5, (boxes[:, 3:] - boxes[:, :3]) * 0.5
        if not bool((half > 0.0).all()) or not bool(torch.isfinite(boxes).all()):
            raise InputError("aabbs", "finite boxes with low < high", str(boxes.tolist()))
        scale = torch.pow(2.0, torch.arange(len(boxes), dtype=torch.float64))[:, None]
        wrong = (center - center[0]).abs() + (half - half[0] * scale).abs()
        if bool((wrong > NESTED_TOLERANCE * half).any()):
            return (None,)
        low, high = boxes[0, :3].tolist(), boxes[0, 3:].tolist()
        return (Aabb((low[0], low[1], low[2]), (high[0], high[1], high[2])),)

    return remembered(aabbs, "nested", make)[0]


def outer_range(origins: Tensor, directions: Tensor, aabbs: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """The stretch of each ray from where it enters the first box to where it leaves the last, within near and far."""
    from .grid import _ray_aabb_intersect

    t_min, t_max, hits = _ray_aabb_intersect(origins, directions, aabbs)
    enter = torch.where(hits, t_min, torch.full_like(t_min, float("inf"))).amin(-1)
    leave = torch.where(hits, t_max, torch.full_like(t_max, -float("inf"))).amax(-1)
    enter = torch.maximum(enter, near)
    return torch.where(hits.any(-1), enter, near), torch.maximum(torch.minimum(leave, far), near)


def is_occupied(grids: Grids, points: Tensor) -> Tensor:
    """(...,) bool for points (..., 3): the first box that holds a point decides; outside all boxes is empty."""
    resolution = torch.tensor(grids.binaries.shape[1:], device=points.device)
    result = torch.zeros(points.shape[:-1], dtype=torch.bool, device=points.device)
    for index in reversed(range(grids.binaries.shape[0])):
        low, high = grids.aabbs[index, :3].to(points.dtype), grids.aabbs[index, 3:].to(points.dtype)
        unit = (points - low) / (high - low)
        cell = torch.minimum((unit.clamp(0.0, 1.0) * resolution).long(), resolution - 1)
        value = grids.binaries[index][cell[..., 0], cell[..., 1], cell[..., 2]].bool()
        result = torch.where(((unit >= 0.0) & (unit <= 1.0)).all(-1), value, result)
    return result


def _pack(starts: list[Tensor], ends: list[Tensor], counts: list[Tensor], like: Tensor) -> PackedSamples:
    offsets = offsets_of_counts(torch.cat(counts) if counts else torch.zeros(0, dtype=torch.long, device=like.device))
    t_starts, t_ends = torch.cat([like.new_zeros(0), *starts]), torch.cat([like.new_zeros(0), *ends])
    return PackedSamples(t_starts, t_ends, indices_of(offsets, t_starts.shape[0]).int(), offsets)


def _chunked(n_rays: int, per_ray: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.arange(n_rays, device=device).split(max(1, TESTED_AT_ONCE // max(per_ray, 1)))


def _lattice_samples(
    origins: Tensor, directions: Tensor, grids: Grids, planes: Planes, enter: Tensor, leave: Tensor
) -> PackedSamples:
    """Test every step of every ray."""
    step, cone = planes.step_size, planes.cone_angle
    begin = lattice_index(planes.near.clamp_min(0.0), step, cone)
    first = begin + (lattice_index(enter.clamp_min(0.0), step, cone) - begin).floor().sub(1).clamp_min(0.0)
    last = lattice_index(leave.clamp_min(0.0), step, cone)
    n_steps = int((last - first).clamp_min(0).max().ceil().item()) + 2 if origins.shape[0] else 0
    order = torch.arange(n_steps, device=origins.device, dtype=origins.dtype)
    starts, ends, counts = [], [], []
    for rays in _chunked(origins.shape[0], n_steps, origins.device) if n_steps else ():
        index = first[rays, None] + order
        t0, t1 = lattice_point(index, step, cone), lattice_point(index + 1.0, step, cone)
        middle = (t0 + t1) * 0.5
        keep = (middle >= enter[rays, None]) & (middle < leave[rays, None])
        keep &= is_occupied(grids, origins[rays, None] + directions[rays, None] * middle[..., None])
        starts.append(t0[keep])
        ends.append(t1[keep])
        counts.append(keep.sum(-1))
    return _pack(starts, ends, counts, origins)


def _cell_stretches(origins: Tensor, directions: Tensor, grids: Grids, enter: Tensor, leave: Tensor) -> PackedSamples:
    """Cut each ray at every face of every cell, and keep the pieces in occupied cells."""
    faces, axes = [], []
    for index in range(grids.binaries.shape[0]):
        for axis, cells in enumerate(grids.binaries.shape[1:]):
            low, high = grids.aabbs[index, axis].to(origins.dtype), grids.aabbs[index, axis + 3].to(origins.dtype)
            faces.append(low + (high - low) * torch.arange(cells + 1, device=origins.device) / cells)
            axes.append(torch.full((cells + 1,), axis, device=origins.device))
    face, axis = torch.cat(faces), torch.cat(axes)
    starts, ends, counts = [], [], []
    for rays in _chunked(origins.shape[0], face.shape[0], origins.device) if origins.shape[0] else ():
        t = (face - origins[rays][:, axis]) / directions[rays][:, axis]
        bounds = torch.stack([enter[rays], leave[rays]], dim=-1)
        t = torch.cat([torch.nan_to_num(t, nan=0.0), bounds], dim=-1)
        t = torch.minimum(torch.maximum(t, bounds[:, :1]), bounds[:, 1:]).sort(-1).values
        t0, t1 = t[:, :-1], t[:, 1:]
        middle = (t0 + t1) * 0.5
        keep = t1 - t0 > 1e-6 * t1.abs().clamp_min(1e-3)
        keep &= is_occupied(grids, origins[rays, None] + directions[rays, None] * middle[..., None])
        starts.append(t0[keep])
        ends.append(t1[keep])
        counts.append(keep.sum(-1))
    return _pack(starts, ends, counts, origins)


class Walk(NamedTuple):
    """A traversal that stops every few samples: all its samples, and how far each ray has come."""

    samples: PackedSamples
    cursor: Tensor  # (n_rays,) the next sample of each ray
    exits: Tensor  # (n_rays,) where each ray leaves the grids
    sources: tuple[tuple[weakref.ref[Tensor], int], ...]  # rays, grids and far planes, and their versions
    step: tuple[float, float]


def start_walk(origins: Tensor, directions: Tensor, grids: Grids, planes: Planes, sources: Sequence[Tensor]) -> Walk:
    samples, exits = traverse(origins, directions, grids, planes)
    seen = tuple((weakref.ref(value), version_of(value)) for value in sources)
    return Walk(samples, samples.offsets[:-1], exits, seen, (planes.step_size, planes.cone_angle))


def goes_on(walk: Walk, planes: Planes, sources: Sequence[Tensor]) -> bool:
    """Whether the walk is one of these rays through these grids, and nothing has been written to since."""
    same = walk.step == (planes.step_size, planes.cone_angle) and len(walk.sources) == len(sources)
    return same and all(
        source() is value and version == version_of(value)
        for (source, version), value in zip(walk.sources, sources, strict=True)
    )


def next_steps(walk: Walk, near: Tensor, mask: Tensor | None, limit: int) -> tuple[PackedSamples, Tensor, Walk]:
    """The next `limit` samples of each ray in the mask, where each ray stops then, and the walk from there on."""
    counts = (walk.samples.offsets[1:] - walk.cursor).clamp_max(limit)
    if mask is not None:
        counts = torch.where(mask, counts, torch.zeros_like(counts))
    offsets = offsets_of_counts(counts)
    total = int(offsets[-1]) if counts.numel() else 0
    rays = indices_of(offsets, total)
    rows = torch.arange(total, device=offsets.device) - offsets[rays] + walk.cursor[rays]
    samples = PackedSamples(walk.samples.t_starts[rows], walk.samples.t_ends[rows], rays.int(), offsets)
    stops = walk.exits if mask is None else torch.where(mask, walk.exits, near)
    if total:
        last = samples.t_ends[(offsets[1:] - 1).clamp_min(0).long()]
        stops = torch.where(counts == limit, last, stops)
    stops = stops.clone()  # a tensor of its own, for the walk to be remembered with
    return samples, stops, walk._replace(cursor=walk.cursor + counts)
