"""Marching by testing every step of the lattice: slow, and plainly right. Occupancy arithmetic without a read-back."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...types import PackedSamples
from ..packed.reference import fit_offsets, scatter_to_capacity
from ..positions.reference import ray_aabb
from . import OccupancyBits, StepRule, pack_bits

TESTED_AT_ONCE = 1 << 22  # points held in memory at a time
Pieces = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def lattice(rule: StepRule, u: Tensor) -> Tensor:
    """t(u) of the step rule."""
    linear = rule.near + u * rule.step_size
    if rule.cone_angle == 0.0:
        return linear
    t_c, u_c = rule.bend
    geometric = t_c * torch.exp((u - u_c).clamp(min=0.0) * math.log1p(rule.cone_angle))
    return torch.where(u < u_c, linear, geometric)


def inverse_lattice(rule: StepRule, t: Tensor) -> Tensor:
    """u(t), the inverse of `lattice`."""
    linear = (t - rule.near) / rule.step_size
    if rule.cone_angle == 0.0:
        return linear
    t_c, u_c = rule.bend
    geometric = u_c + torch.log(t.clamp(min=t_c) / t_c) / math.log1p(rule.cone_angle)
    return torch.where(t < t_c, linear, geometric)


def is_occupied(grid: OccupancyBits, positions: Tensor) -> Tensor:
    """(...,) bool for positions (..., 3); points outside the outermost box clamp to its border cells."""
    low, high = grid.aabb.tensor(positions.device, positions.dtype)
    unit = (positions - (low + high) * 0.5) / ((high - low) * 0.5)
    largest = unit.abs().amax(-1)
    level = torch.zeros_like(largest, dtype=torch.int64)
    for i in range(grid.levels - 1):
        level = level + (largest > 2.0**i)
    scale = torch.pow(2.0, -level.to(positions.dtype))
    cell = ((unit * scale[..., None] + 1.0) * (0.5 * grid.resolution)).floor().long().clamp(0, grid.resolution - 1)
    r = grid.resolution
    index = ((level * r + cell[..., 0]) * r + cell[..., 1]) * r + cell[..., 2]
    return ((grid.bits[index >> 5] >> (index & 31).to(torch.int32)) & 1).bool()


def collect(like: Tensor, per_ray: int, pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (n_rays,) int32, starts and ends (n,) of what is kept; pieces(rays) gives starts, ends and which to keep,
    (rays, per_ray) each, of some of the rays like (n_rays,) at a time."""
    counts, starts, ends = [like.new_zeros(0, dtype=torch.int32)], [like[:0]], [like[:0]]
    for rays in torch.arange(like.shape[0], device=like.device).split(max(1, TESTED_AT_ONCE // max(per_ray, 1))):
        t0, t1, keep = pieces(rays)
        counts.append(keep.sum(-1, dtype=torch.int32))
        starts.append(t0[keep])
        ends.append(t1[keep])
    return torch.cat(counts), torch.cat(starts), torch.cat(ends)


@torch.no_grad()
def march(origins, directions, grid, rule, *, jitter, limits, capacity, n_active) -> PackedSamples:
    n_rays, device = origins.shape[0], origins.device
    outer = grid.aabb.scaled(2.0 ** (grid.levels - 1))
    t_min, t_max = ray_aabb(origins, directions, outer, near=rule.near, far=rule.far)
    if limits is not None:
        t_min, t_max = torch.maximum(t_min, limits[:, 0]), torch.minimum(t_max, limits[:, 1])
    if n_active is not None:
        t_max = torch.where(torch.arange(n_rays, device=device) < n_active, t_max, t_min)
    offset = torch.zeros_like(t_min) if jitter is None else jitter.to(t_min.dtype)

    first = (inverse_lattice(rule, t_min) - offset).floor().sub(1).clamp(min=0.0)
    last = (inverse_lattice(rule, t_max) - offset).ceil().add(1)
    n_steps = int((last - first).clamp(min=0).max().item()) if n_rays else 0
    steps = torch.arange(n_steps, device=device, dtype=t_min.dtype)

    def pieces(rays: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = first[rays, None] + steps + offset[rays, None]  # (rays, steps)
        t0, t1 = lattice(rule, u), lattice(rule, u + 1.0)
        middle = (t0 + t1) * 0.5
        keep = (middle >= t_min[rays, None]) & (middle < t_max[rays, None])
        positions = origins[rays, None, :] + directions[rays, None, :] * middle[..., None]
        return t0, t1, keep & is_occupied(grid, torch.nan_to_num(positions))

    counts, starts, ends = collect(t_min, n_steps, pieces)
    offsets, kept = fit_offsets(counts, capacity)
    return scatter_to_capacity(starts, ends, offsets, capacity=capacity, n_rays_kept=kept)


@torch.no_grad()
def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    old = density[cells]
    fresh = torch.nan_to_num(fresh.to(density.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    seen = old >= 0.0
    # First the decayed value (repeats write the same number), then the maximum over repeats.
    density.index_put_((cells,), torch.where(seen, old * decay, old))
    density.scatter_reduce_(0, cells, torch.where(seen, fresh, old), reduce="amax")


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    seen = density >= 0.0
    mean = density.clamp(min=0.0).sum() / seen.sum().clamp(min=1)
    bits.copy_(pack_bits(density > mean.clamp(max=threshold)))
    return mean
