"""The part of a ray that is sampled, and what "even" means along it.

Places along a ray are numbers s in [0, 1]: g(t) = (1 - s) g(near) + s g(far), with a warp g that decides where even
steps in s fall. Far from the cameras they should grow, as the pixels' footprints do.

    uniform      g(t) = t
    disparity    g(t) = 1 / t
    mixed        g(t) = t / 2 up to t = 1, and 1 - 1 / (2 t) beyond: half of all places for the first unit of length
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.aabb import ray_aabb
from ..types import Aabb, Rays

Warp = Literal["uniform", "disparity", "mixed"]
_LEAST = 1e-4  # of a unit: nearer than this 1 / t is cut off


def warp(t: Tensor, kind: Warp) -> Tensor:
    """g(t); see the module's formulas.

    >>> warp(torch.tensor([0.5, 1.0, 5.0]), "mixed").tolist()
    [0.25, 0.5, 0.8999999761581421]
    """
    if kind == "uniform":
        return t
    if kind == "disparity":
        return 1.0 / t.clamp(min=_LEAST)
    if kind == "mixed":
        return torch.where(t < 1.0, 0.5 * t, 1.0 - 0.5 / t.clamp(min=1.0))
    raise InputError("spacing", '"uniform", "disparity" or "mixed"', repr(kind))


def unwarp(g: Tensor, kind: Warp) -> Tensor:
    """The inverse of `warp`."""
    if kind == "uniform":
        return g
    if kind == "disparity":
        return 1.0 / g
    return torch.where(g < 0.5, 2.0 * g, 0.5 / (1.0 - g).clamp(min=1e-7))


def spread(places: Tensor, near: Tensor, far: Tensor, *, kind: Warp = "uniform") -> Tensor:
    """Distances t of places s in [0, 1] between near and far, which are broadcast against them.

    >>> spread(torch.tensor([0.0, 0.5, 1.0]), torch.tensor(1.0), torch.tensor(4.0), kind="disparity").tolist()
    [1.0, 1.600000023841858, 4.0]
    """
    low, high = warp(near, kind), warp(far, kind)
    return unwarp(low + (high - low) * places, kind)


@dataclass(frozen=True)
class RaySpan:
    """From `near` to `far`, inside the box where there is one; lengths are measured in `unit`s for the warp.

    >>> span = RaySpan(near=0.0, far=4.0)
    >>> rays = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]))
    >>> span.distances(torch.tensor([[0.0, 0.5, 1.0]]), rays).tolist()
    [[0.0, 2.0, 4.0]]
    """

    near: float = 0.0
    far: float = float("inf")
    warp: Warp = "uniform"
    unit: float = 1.0
    aabb: Aabb | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.near < self.far or self.unit <= 0.0:
            got = f"{self.near}, {self.far} and {self.unit}"
            raise InputError("near, far and unit", "0 <= near < far, and a positive unit", got)
        if self.far == float("inf") and self.aabb is None:
            raise InputError("far", "a finite distance, or a box", "neither", "far=1000.0 serves a contracted scene")

    def inside(self, box: Aabb) -> RaySpan:
        """The part in a box, besides the box that there is already."""
        shared = box if self.aabb is None else self.aabb.intersection(box)
        if shared is None:
            raise InputError("box", "one that holds a part of the scene", f"{box.low} to {box.high}")
        return replace(self, aabb=shared)

    @torch.no_grad()
    def limits(self, rays: Rays) -> tuple[Tensor, Tensor]:
        """(n_rays, 1) where each ray begins and ends; both the same for one that misses the box."""
        if self.aabb is None:
            ones = torch.ones_like(rays.origins[:, :1])
            return ones * self.near, ones * self.far
        near, far = ray_aabb(rays.origins, rays.directions, self.aabb, near=self.near, far=self.far)
        return near[:, None], far[:, None]

    def distances(self, places: Tensor, rays: Rays, limits: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Distances (n_rays, n) of places (n_rays, n) in [0, 1] along the rays. Not differentiable."""
        near, far = limits or self.limits(rays)
        return spread(places, near / self.unit, far / self.unit, kind=self.warp) * self.unit
