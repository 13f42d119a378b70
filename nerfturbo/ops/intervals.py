"""Intervals between places along rays: where they lie in space, and how much of the ray's light ends in each.

    t_j = unit g^-1((1 - s_j) g(near / unit) + s_j g(far / unit))       distance of place s_j; g as in `spacing`
    x_i = origin + (t_i + t_{i+1}) / 2 direction                        middle of interval i, mapped as asked
    w_i = T_i (1 - exp(-density_i (t_{i+1} - t_i))),    T_i = exp(-sum_{j < i} density_j (t_{j+1} - t_j))

Every ray has the same number of intervals, so that no offsets are needed: what proposals are made of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Aabb
from ._checks import check_device, check_float, check_positive, check_shape
from ._dispatch import implementation
from .contraction import Contraction
from .spacing import WARPS, Warp


class PlacedIntervals(NamedTuple):
    """Result of `place_intervals`; fp32 (float64 for float64 input)."""

    distances: Tensor  # (n_rays, n + 1)
    positions: Tensor  # (n_rays * n, 3), ray after ray


class Spacing(NamedTuple):
    """How places become distances: the warp, and the length that counts as one."""

    warp: Warp = "uniform"
    unit: float = 1.0


class Space(NamedTuple):
    """What positions are mapped to: the box to [0, 1]^3, with a contraction all of space; without a box not at all."""

    aabb: Aabb | None = None
    contraction: Contraction = "none"


def place_intervals(
    places: Tensor,
    origins: Tensor,
    directions: Tensor,
    *,
    near: Tensor,
    far: Tensor,
    spacing: Spacing = Spacing(),  # noqa: B008 - frozen
    space: Space = Space(),  # noqa: B008
) -> PlacedIntervals:
    """Distances of `places` (n_rays, n + 1) in [0, 1] along rays (n_rays, 3), and the middles between them.

    `near` and `far` (n_rays, 1) are where each ray begins and ends. Not differentiable.

    >>> places, ray, one = torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 1)
    >>> found = place_intervals(places, torch.zeros(1, 3), ray, near=one, far=5.0 * one)
    >>> found.distances.tolist(), found.positions[:, 2].tolist()
    ([[1.0, 3.0, 5.0]], [2.0, 4.0])
    """
    n_rays = places.shape[0]
    check_shape("places", places, ("n_rays", "n + 1"))
    if places.shape[1] < 2:
        raise InputError("places", "at least one interval", str(tuple(places.shape)))
    for name, value in (("origins", origins), ("directions", directions)):
        check_shape(name, value, (n_rays, 3))
        check_float(name, value)
    for name, value in (("near", near), ("far", far)):
        check_shape(name, value, (n_rays, 1))
    check_float("places", places)
    check_positive("unit", spacing.unit)
    if spacing.warp not in WARPS:
        raise InputError("spacing", '"uniform", "disparity" or "mixed"', repr(spacing.warp))
    if space.aabb is None and space.contraction != "none":
        raise InputError("space", "a box to contract space about", "none")
    check_device(places=places, origins=origins, directions=directions, near=near, far=far)
    place = implementation("intervals", "place_intervals", places)
    with torch.no_grad():
        return PlacedIntervals(*place(places, origins, directions, near=near, far=far, spacing=spacing, space=space))


def interval_weights(density: Tensor, distances: Tensor) -> Tensor:
    """(n_rays, n) the weights of densities (n_rays, n) >= 0 between distances (n_rays, n + 1). Runs in fp32 whatever
    comes in. Differentiable to the density.

    >>> interval_weights(torch.tensor([[0.0, 100.0]]), torch.tensor([[0.0, 1.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """
    check_shape("density", density, ("n_rays", "n"))
    check_shape("distances", distances, (density.shape[0], density.shape[1] + 1))
    check_float("density", density)
    check_float("distances", distances)
    check_device(density=density, distances=distances)
    return implementation("intervals", "interval_weights", density)(density, distances.detach())
