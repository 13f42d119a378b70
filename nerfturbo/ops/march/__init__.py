"""Marching rays through a multi-level occupancy grid into packed samples.

A ray's samples lie on a lattice that starts at the near plane: sample k is [t(k + j), t(k + 1 + j)] with the ray's
jitter j in [0, 1) and

    t(u) = near + u * step_size                        while that is below t_c = max(near, step_size / cone_angle)
    t(u) = t_c * (1 + cone_angle)^(u - u_c)            beyond, so that steps grow with distance (never for angle 0).

A sample is kept when its midpoint lies inside the outermost box, between the limits, and in an occupied cell. Level l
of the grid covers the box scaled by 2^l about its centre; a point belongs to the finest level that contains it.

The occupancy grid's own arithmetic: running maximum, threshold, bit packing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import Aabb, PackedSamples
from .._checks import check_device, check_positive, check_shape, check_tensor, refuse
from .._dispatch import implementation


@dataclass(frozen=True)
class OccupancyBits:
    """One bit per cell, 32 to a word: cell (level, x, y, z) is bit i & 31 of word i >> 5 with
    i = ((level * resolution + x) * resolution + y) * resolution + z."""

    bits: Tensor  # (levels * resolution^3 / 32,) int32
    aabb: Aabb  # of level 0
    resolution: int
    levels: int = 1

    def __post_init__(self) -> None:
        side = self.resolution
        refuse(side < 4 or side % 4 != 0, "resolution", "a multiple of 4, at least 4", side)
        refuse(not 1 <= self.levels <= 16, "levels", "1 to 16", self.levels)
        check_tensor("bits", self.bits, (self.levels * self.resolution**3 // 32,), torch.int32)


@dataclass(frozen=True)
class StepRule:
    """Where samples may lie along a ray; see the module's formula."""

    step_size: float
    near: float = 0.0
    far: float = float("inf")
    cone_angle: float = 0.0

    def __post_init__(self) -> None:
        check_positive("step_size", self.step_size)
        check_positive("near", self.near, zero=True)
        check_positive("cone_angle", self.cone_angle, zero=True)
        refuse(not self.far > self.near, "far", f"more than near = {self.near}", self.far)

    @property
    def bend(self) -> tuple[float, float]:
        """t_c and u_c, where steps begin to grow; they mean something for a cone angle only."""
        t_c = max(self.near, self.step_size / self.cone_angle) if self.cone_angle else self.near
        return t_c, (t_c - self.near) / self.step_size


def march(
    origins: Tensor,
    directions: Tensor,
    grid: OccupancyBits,
    rule: StepRule,
    *,
    jitter: Tensor | None = None,
    limits: Tensor | None = None,
    capacity: int | None = None,
    n_active: Tensor | None = None,
) -> PackedSamples:
    """The samples of each ray in occupied cells, in ray order. Not differentiable.

    Args:
        origins, directions: (n_rays, 3), directions of unit length.
        jitter: (n_rays,) in [0, 1), shifts each ray's lattice; None is 0.
        limits: (n_rays, 2), a smallest and a largest t per ray, within near and far.
        capacity: fixed length of the result, filled with whole rays from the first on, read back by nobody; None
            gives exact-length arrays at the cost of one read-back.
        n_active: () int32 on the device; rays from this index on get no samples.

    >>> full = OccupancyBits(torch.full((2,), -1, dtype=torch.int32), Aabb.cube(1.0), resolution=4)
    >>> origins, directions = torch.tensor([[0.0, 0.0, -2.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    >>> march(origins, directions, full, StepRule(0.5), jitter=torch.tensor([0.5])).t_starts.tolist()
    [0.75, 1.25, 1.75, 2.25]
    """
    n_rays = origins.shape[0]
    check_tensor("origins", origins, ("n_rays", 3))
    check_shape("directions", directions, (n_rays, 3))
    if jitter is not None:
        check_shape("jitter", jitter, (n_rays,))
    if limits is not None:
        check_shape("limits", limits, (n_rays, 2))
    refuse(capacity is not None and capacity < 1, "capacity", "at least 1", capacity)
    own = {"jitter": jitter, "limits": limits, "n_active": n_active}
    check_device(origins=origins, directions=directions, bits=grid.bits, **own)
    options = {"jitter": jitter, "limits": limits, "capacity": capacity, "n_active": n_active}
    return implementation("march", "march", origins)(origins, directions, grid, rule, **options)


def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    """In place: density[c] = max(density[c] * decay, fresh) for the given cells; others keep their value. `density`
    (n_cells,) fp32; `cells` (n,) int64, repeats allowed (the largest fresh value wins, one decay); `fresh` (n,):
    non-finite values are ignored. Negative density marks cells no camera sees: they stay as they are."""
    check_shape("density", density, ("n_cells",))
    check_tensor("cells", cells, ("n",), torch.int64)
    check_tensor("fresh", fresh, (cells.shape[0],))
    check_device(density=density, cells=cells, fresh=fresh)
    implementation("march", "decay_and_max", density)(density, cells, fresh, decay)


def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    """Write bits[i >> 5] of the cells with density > min(threshold, mean of density over cells >= 0). Returns that
    mean, a () tensor, without reading it back. `bits` (n_cells / 32,) int32 is written in place."""
    check_shape("density", density, ("n_cells",))
    check_tensor("bits", bits, (density.shape[0] // 32,), torch.int32)
    check_device(density=density, bits=bits)
    return implementation("march", "threshold_bits", density)(density, bits, threshold)


def pack_bits(occupied: Tensor) -> Tensor:
    """(n_cells,) bool -> (n_cells / 32,) int32, cell i at bit i & 31 of word i >> 5."""
    check_shape("occupied", occupied, ("n_cells",))
    shifts = torch.arange(32, dtype=torch.int32, device=occupied.device)
    return (occupied.view(-1, 32).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def unpack_bits(bits: Tensor) -> Tensor:
    """(n_cells / 32,) int32 -> (n_cells,) bool, the inverse of `pack_bits`."""
    return ((bits[:, None] >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1).bool().flatten()
