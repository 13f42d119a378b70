"""Step functions along rays: places, the intervals between them, their weights, and new places where the weight is.

A place along a ray is a number s in [0, 1]: g(t) = (1 - s) g(near) + s g(far), with a spacing g that decides where even
steps in s fall. Far from the cameras they should grow, as the pixels' footprints do.

    uniform      g(t) = t
    disparity    g(t) = 1 / t
    mixed        g(t) = t / 2 up to t = 1, and 1 - 1 / (2 t) beyond: half of all places for the first unit of length

    t_j = unit g^-1((1 - s_j) g(near / unit) + s_j g(far / unit))       distance of place s_j
    x_i = origin + (t_i + t_{i+1}) / 2 direction                        middle of interval i, mapped as asked
    w_i = T_i (1 - exp(-density_i (t_{i+1} - t_i))),    T_i = exp(-sum_{j < i} density_j (t_{j+1} - t_j))

Every ray has the same number of intervals, so that no offsets are needed: what proposals are made of.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...types import Aabb
from .._checks import check_device, check_positive, check_shape, check_tensor, refuse
from .._dispatch import implementation
from ..positions import Contraction

Spacing = Literal["uniform", "disparity", "mixed"]
SPACINGS: tuple[Spacing, ...] = ("uniform", "disparity", "mixed")
LEAST = 1e-4  # of a unit: nearer than this 1 / t is cut off
LEAST_REST = 1e-7  # of 1 - g: farther than this t ends


def warp(t: Tensor, kind: Spacing) -> Tensor:
    """g(t); see the module's formulas.

    >>> warp(torch.tensor([0.5, 1.0, 5.0]), "mixed").tolist()
    [0.25, 0.5, 0.8999999761581421]
    """
    if kind == "uniform":
        return t
    if kind == "disparity":
        return 1.0 / t.clamp(min=LEAST)
    if kind == "mixed":
        return torch.where(t < 1.0, 0.5 * t, 1.0 - 0.5 / t.clamp(min=1.0))
    raise InputError("spacing", '"uniform", "disparity" or "mixed"', repr(kind))


def unwarp(g: Tensor, kind: Spacing) -> Tensor:
    """The inverse of `warp`."""
    if kind == "uniform":
        return g
    if kind == "disparity":
        return 1.0 / g
    return torch.where(g < 0.5, 2.0 * g, 0.5 / (1.0 - g).clamp(min=LEAST_REST))


def spread(places: Tensor, near: Tensor, far: Tensor, *, kind: Spacing = "uniform") -> Tensor:
    """Distances t of places s in [0, 1] between near and far, which are broadcast against them.

    >>> spread(torch.tensor([0.0, 0.5, 1.0]), torch.tensor(1.0), torch.tensor(4.0), kind="disparity").tolist()
    [1.0, 1.600000023841858, 4.0]
    """
    low, high = warp(near, kind), warp(far, kind)
    return unwarp(low + (high - low) * places, kind)


class PlacedIntervals(NamedTuple):
    """Result of `place_intervals`; fp32 (float64 for float64 input)."""

    distances: Tensor  # (n_rays, n + 1)
    positions: Tensor  # (n_rays * n, 3), ray after ray


class Space(NamedTuple):
    """What positions are mapped to: the box to [0, 1]^3, with a contraction all of space; without a box not at all."""

    aabb: Aabb | None = None
    contraction: Contraction = "none"


WORLD = Space()


def place_intervals(
    places: Tensor,
    origins: Tensor,
    directions: Tensor,
    *,
    near: Tensor,
    far: Tensor,
    spacing: Spacing = "uniform",
    unit: float = 1.0,
    space: Space = WORLD,
) -> PlacedIntervals:
    """Distances of `places` (n_rays, n + 1) in [0, 1] along rays (n_rays, 3), and the middles between them. `near` and
    `far` (n_rays, 1) are where each ray begins and ends, `unit` the length that counts as one. Not differentiable.

    >>> places, ray, one = torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 1)
    >>> found = place_intervals(places, torch.zeros(1, 3), ray, near=one, far=5.0 * one)
    >>> found.distances.tolist(), found.positions[:, 2].tolist()
    ([[1.0, 3.0, 5.0]], [2.0, 4.0])
    """
    n_rays = places.shape[0]
    check_tensor("places", places, ("n_rays", "n + 1"))
    refuse(places.shape[1] < 2, "places", "at least one interval", tuple(places.shape))
    check_tensor("origins", origins, (n_rays, 3))
    check_tensor("directions", directions, (n_rays, 3))
    check_shape("near", near, (n_rays, 1))
    check_shape("far", far, (n_rays, 1))
    check_positive("unit", unit)
    refuse(spacing not in SPACINGS, "spacing", '"uniform", "disparity" or "mixed"', repr(spacing))
    refuse(space.aabb is None and space.contraction != "none", "space", "a box to contract space about", "none")
    check_device(places=places, origins=origins, directions=directions, near=near, far=far)
    place = implementation("intervals", "place_intervals", places)
    options = {"near": near, "far": far, "spacing": spacing, "unit": unit, "space": space}
    with torch.no_grad():
        return PlacedIntervals(*place(places, origins, directions, **options))


def interval_weights(density: Tensor, distances: Tensor) -> Tensor:
    """(n_rays, n) the weights of densities (n_rays, n) >= 0 between distances (n_rays, n + 1). Runs in fp32 whatever
    comes in. Differentiable to the density.

    >>> interval_weights(torch.tensor([[0.0, 100.0]]), torch.tensor([[0.0, 1.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """
    check_tensor("density", density, ("n_rays", "n"))
    check_tensor("distances", distances, (density.shape[0], density.shape[1] + 1))
    check_device(density=density, distances=distances)
    return implementation("intervals", "interval_weights", density)(density, distances.detach())


def importance_sample(
    edges: Tensor,
    weights: Tensor,
    n_samples: int,
    *,
    jitter: Tensor | None = None,
    padding: float = 0.0,
    blur: bool = False,
) -> Tensor:
    """(n_rays, n_samples + 1) sorted edges of new intervals, drawn from the histogram (edges, weights).

    The cumulative weight, linear inside each bin, is inverted at u_i = (i + jitter) / (n_samples + 1). A ray whose
    weights sum to nothing is sampled evenly over its length. Not differentiable.

    Args:
        edges: (n_rays, n_bins + 1), non-decreasing along a ray.
        weights: (n_rays, n_bins), >= 0.
        jitter: (n_rays, 1) or (n_rays, n_samples + 1) in [0, 1); None is 0.5.
        padding: added to every weight, so that no bin is given up.
        blur: first replace each weight by the mean of its maxima with either neighbour (Mip-NeRF), which draws around
            what the bins just miss: (max(w_{i-1}, w_i) + max(w_i, w_{i+1})) / 2.

    >>> import torch
    >>> importance_sample(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), 1).tolist()
    [[1.25, 1.75]]
    """
    check_tensor("edges", edges, ("n_rays", "n_bins + 1"))
    check_tensor("weights", weights, (edges.shape[0], edges.shape[1] - 1))
    check_device(edges=edges, weights=weights, jitter=jitter)
    refuse(n_samples < 1, "n_samples", "at least 1", n_samples)
    refuse(edges.shape[1] < 2, "edges", "at least one bin", tuple(edges.shape))
    if jitter is not None and tuple(jitter.shape) not in ((edges.shape[0], 1), (edges.shape[0], n_samples + 1)):
        raise InputError("jitter", f"shape (n_rays, 1) or (n_rays, {n_samples + 1})", str(tuple(jitter.shape)))
    check_positive("padding", padding, zero=True)
    sample = implementation("intervals", "importance_sample", edges)
    return sample(edges, weights, n_samples, jitter=jitter, padding=float(padding), blur=blur)
