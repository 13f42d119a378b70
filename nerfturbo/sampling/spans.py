"""The part of a ray that is sampled, and how places along it, numbers in [0, 1], become distances."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.intervals import PlacedIntervals, Space, Spacing, Warp, place_intervals, spread
from ..ops.positions import ray_aabb
from ..types import Aabb, Rays


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
            shape = (len(rays), 1)
            return rays.origins.new_full(shape, self.near), rays.origins.new_full(shape, self.far)
        near, far = ray_aabb(rays.origins, rays.directions, self.aabb, near=self.near, far=self.far)
        return near[:, None], far[:, None]

    def distances(self, places: Tensor, rays: Rays, limits: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Distances (n_rays, n) of places (n_rays, n) in [0, 1] along the rays. Not differentiable."""
        near, far = limits or self.limits(rays)
        return spread(places, near / self.unit, far / self.unit, kind=self.warp) * self.unit

    def intervals(
        self,
        places: Tensor,
        rays: Rays,
        limits: tuple[Tensor, Tensor],
        space: Space = Space(),  # noqa: B008 - frozen
    ) -> PlacedIntervals:
        """Those distances, and the positions between them, in world coordinates or in a space. Not differentiable."""
        near, far = limits
        spacing = Spacing(self.warp, self.unit)
        return place_intervals(places, rays.origins, rays.directions, near=near, far=far, spacing=spacing, space=space)
