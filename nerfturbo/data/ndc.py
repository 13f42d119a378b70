"""Normalised device coordinates (NDC) for captures whose cameras all look one way, as the NeRF paper has them.

Seen from the mean camera (x right, y up, -z forward), with the near plane at distance n and focal lengths a and b in
halves of the picture, space in front of that plane is bent into a box:

    x' = -a x / z,    y' = -b y / z,    z' = 1 + 2 n / z        (z = -n is z' = -1, infinitely far is z' = 1)

Straight lines stay straight, so that rays are bent once, when they leave their camera, and everything behind works as
in any bounded box. Cameras, paths and the way back to the file stay in plain space.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Rays

NEAR_SHARE = 0.75  # of the distance of the nearest things: where the near plane stands, as for the published scenes
WIDEST = 4.0  # half of the box, at most: beyond, some camera looks far aside
_FORWARD = 1e-3  # a unit direction looks forward by at least this, else nothing in front of the plane is on its ray
_WANTED: ContextVar[bool] = ContextVar("nerfturbo_ndc", default=False)


@contextlib.contextmanager
def in_ndc(wanted: bool) -> Iterator[None]:
    """Whether scenes that are opened inside the block are bent."""
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def wants_ndc() -> bool:
    """The choice in force here."""
    return _WANTED.get()


def require_plain(ndc: Ndc | None, what: str) -> None:
    """Refuse what works in plain space alone; `what` is what was asked for."""
    if ndc is not None:
        raise InputError(what, "a scene in plain space", "one in normalised device coordinates", "train without --ndc")


@dataclass(frozen=True)
class Ndc:
    """From plain space to the box and back."""

    to_mean: Tensor  # (3, 4): from the scene's coordinates to the mean camera's, in units of the near plane's distance
    scale: Tensor  # (2,): a and b

    def to(self, device: torch.device | str) -> Ndc:
        return Ndc(self.to_mean.to(device), self.scale.to(device))

    def bend(self, points: Tensor) -> Tensor:
        """Points (m, 3) in front of the near plane into the box."""
        local = self._local(points)
        depth = -local[:, 2:]
        return torch.cat([local[:, :2] / depth * self.scale, 1.0 - 2.0 / depth], dim=-1)

    def unbend(self, points: Tensor) -> Tensor:
        """Points (m, 3) of the box back to plain space; z' = 1 is kept just before infinity."""
        depth = 2.0 / (1.0 - points[:, 2:]).clamp_min(1e-6)
        local = torch.cat([points[:, :2] * depth / self.scale, -depth], dim=-1)
        rotation = self.to_mean[:, :3]
        size2 = rotation.square().sum() / 3.0  # a rotation times a scale: its inverse is its transpose over scale^2
        return (local - self.to_mean[:, 3]) @ rotation / size2

    def bend_rays(self, rays: Rays) -> Rays:
        """Rays from the near plane on, with unit directions in the box. `pixel_radii` are those of a cone as wide at
        its end as the pixel, whose width does not grow with distance here."""
        starts, ends = self.ends(rays)
        way = ends - starts
        lengths = torch.linalg.vector_norm(way, dim=-1)
        radii = None
        if rays.pixel_radii is not None:
            radii = rays.pixel_radii * self.scale.prod().sqrt() / lengths
        return replace(rays, origins=starts, directions=way / lengths[:, None], pixel_radii=radii)

    def ends(self, rays: Rays) -> tuple[Tensor, Tensor]:
        """(m, 3) each: where rays meet the near plane, and where they go to infinity."""
        rotation = self.to_mean[:, :3]
        local, along = self._local(rays.origins), rays.directions @ rotation.T
        along = torch.nn.functional.normalize(along, dim=-1)
        down = along[:, 2:].clamp(max=-_FORWARD)
        at_plane = local[:, :2] - along[:, :2] * ((1.0 + local[:, 2:]) / down)
        one = torch.ones_like(down)
        starts = torch.cat([at_plane * self.scale, -one], dim=-1)
        return starts, torch.cat([-along[:, :2] / down * self.scale, one], dim=-1)

    def _local(self, points: Tensor) -> Tensor:
        return points @ self.to_mean[:, :3].T + self.to_mean[:, 3]


def mean_camera(poses: Tensor, near: float, scale: tuple[float, float]) -> Ndc:
    """The box before the mean of placed poses (n, 3, 4), with the near plane at a distance in their unit."""
    poses = poses.double()
    backward = poses[:, :, 2].mean(0)
    if poses.shape[0] < 2 or float((poses[:, :, 2] @ torch.nn.functional.normalize(backward, dim=0)).min()) < 0.5:
        hint = "leave it out: scenes seen from around are placed without it"
        raise InputError("ndc", "cameras that look one way, within 60 degrees of their mean", "others", hint)
    backward = torch.nn.functional.normalize(backward, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(poses[:, :, 1].mean(0), backward), dim=0)
    axes = torch.stack([right, torch.linalg.cross(backward, right), backward])  # (3, 3): world to camera
    middle = poses[:, :, 3].mean(0)
    to_mean = torch.cat([axes, -(axes @ middle)[:, None]], dim=1) / near
    return Ndc(to_mean.float(), torch.tensor(scale))
