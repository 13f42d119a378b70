"""Where a real scene is put: upright, about the origin, with its cameras at distance 1 or less, in a box that fits.

The cameras' mean up axis is up, and what they look at is the middle. Points of a reconstruction, where there are some,
say how far the surroundings reach: `grid_levels` nested boxes, each twice as large as the one before, cover them. The
way back to the file's own coordinates is kept exactly.

Normalised device coordinates (NDC), for captures whose cameras all look one way, as the NeRF paper has them: seen from
the mean camera (x right, y up, -z forward), with the near plane at distance n and focal lengths a and b in halves of
the image, space in front of that plane is bent into a box:

    x' = -a x / z,    y' = -b y / z,    z' = 1 + 2 n / z        (z = -n is z' = -1, infinitely far is z' = 1)

Straight lines stay straight: rays are bent once, as they leave their camera. Cameras and paths stay in plain space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Aabb, Rays
from .cameras import Cameras, similarity_scale, transform_poses, turn_between
from .options import Bounds
from .scene import farthest_distance

NEAR_SHARE = 0.75  # of the distance of the nearest things: where the near plane stands, as for the published scenes
WIDEST = 4.0  # half of the box, at most: beyond, some camera looks far aside
_FORWARD = 1e-3  # a unit direction looks forward by at least this, else nothing in front of the plane is on its ray


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
        radii = None if rays.pixel_radii is None else rays.pixel_radii * self.scale.prod().sqrt() / lengths
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


def _mean_camera(poses: Tensor) -> Tensor:
    """(3, 4) float64: from the world to the mean of poses (n, 3, 4), which must look one way."""
    poses = poses.double()
    backward = torch.nn.functional.normalize(poses[:, :, 2].mean(0), dim=0)
    if poses.shape[0] < 2 or float((poses[:, :, 2] @ backward).min()) < 0.5:
        hint = "leave it out: scenes seen from around are placed without it"
        raise InputError("ndc", "cameras that look one way, within 60 degrees of their mean", "others", hint)
    right = torch.nn.functional.normalize(torch.linalg.cross(poses[:, :, 1].mean(0), backward), dim=0)
    axes = torch.stack([right, torch.linalg.cross(backward, right), backward])
    return torch.cat([axes, -(axes @ poses[:, :, 3].mean(0))[:, None]], dim=1)


MAX_LEVELS = 6
LEVELS_WITHOUT_POINTS = 5  # a box 16 times as large as the cameras' surroundings
_NEAR = 0.05  # of the cameras' distance, where no points say how close things come
_ENOUGH_POINTS = 16
_ONE_SIDE = 0.5  # mean of the cameras' horizontal directions from the centre: 0 all around, 1 in one place


def bounded_levels(levels: int, wanted: Bounds) -> tuple[int, str]:
    """The grid levels of a file that says how far it reaches, or what was asked for, with the words that say so."""
    if wanted == "bounded" and levels > 1:
        return 1, "bounded, as asked: one box"
    if wanted == "unbounded" and levels == 1:
        return LEVELS_WITHOUT_POINTS, f"unbounded, as asked: {2 ** (LEVELS_WITHOUT_POINTS - 1)} times the box"
    return levels, ""


@dataclass(frozen=True)
class Placement:
    """Bounds of a placed scene and the way back."""

    to_original: Tensor  # (4, 4) float64: original = to_original @ placed
    aabb: Aabb
    near: float
    far: float
    grid_levels: int
    notes: tuple[str, ...]
    ndc: Ndc | None = None


def place(
    cameras: Cameras, poses: Tensor, points: Tensor | None = None, *, is_object: bool = False, bounds: Bounds = "auto"
) -> Placement:
    """Choose a place for all cameras of a scene; `placed_poses` then moves them. `poses` (n, 3, 4) are float64, and
    `points` (m, 3) lie on surfaces. `is_object`: the pictures show one thing on nothing, so that one box holds it."""
    upright, up_note = _upright(poses)
    if points is not None and points.shape[0] < _ENOUGH_POINTS:
        points = None
    nearest = None if points is None else _nearest_depth(cameras, points)
    center, center_note = _center(poses, nearest)
    distances = (poses[:, :, 3] - center).norm(dim=-1)
    scale = 1.0 / max(float(distances.max()), 1e-9)
    if float(distances.max()) < 1e-6:  # one camera, or all in one place: what they see gives the unit
        scale = 1.0 if points is None else 1.0 / max(float((points - center).norm(dim=-1).median()), 1e-9)

    def placed(points: Tensor) -> Tensor:
        return (points.double() - center) @ upright.T * scale

    to_original = torch.eye(4, dtype=torch.float64)
    to_original[:3] = torch.cat([upright.T / scale, center[:, None]], dim=1)
    notes = (up_note, center_note, f"scaled by {scale:.4g}: the farthest camera is 1 away from the centre")
    positions = placed(poses[:, :, 3])
    if bounds == "bounded" or (bounds == "auto" and is_object):
        half = (
            0.5 * cameras.size.double().amax(-1) / cameras.focal.double().amin(-1)
        )  # what views hold about the centre
        aabb = Aabb.cube(float((positions.norm(dim=-1) * half).max().clamp(1e-3, 1.0)))
        levels, near, why = 1, 0.0, "because the pictures can be seen through" if is_object else "as asked"
        if points is not None and not is_object:
            aabb = Aabb.cube(max(1e-3, _reach(placed(points))))
            near = _NEAR if nearest is None else 0.5 * nearest * scale
        notes += (f"bounded, {why}: one box of {2.0 * aabb.high[0]:.3g}",)
    elif points is None:
        aabb, levels, near = Aabb.cube(1.0), LEVELS_WITHOUT_POINTS, _NEAR
        notes += (f"unbounded, without points to measure: {levels} grid levels, {2 ** (levels - 1)} times the box",)
    else:
        near = _NEAR if nearest is None else max(0.005, min(0.5, 0.5 * nearest * scale))
        reach = _reach(placed(points))
        around = torch.nn.functional.normalize(positions[:, :2], dim=-1)
        aabb, one_sided = Aabb.cube(1.0), float(around.mean(0).norm()) > _ONE_SIDE  # no camera looks back at the others
        levels = max(levels_for(reach), 2 if bounds == "unbounded" or one_sided else 1)
        kind = "bounded" if levels == 1 else "unbounded"
        notes += (f"{kind}: 99% of {points.shape[0]} points within {reach:.3g}, so {levels} grid levels",)
        if levels_for(reach) == 1 and one_sided:
            notes += ("at least 2: all cameras stand on one side, and what lies behind may have no points (a sky)",)
    far = farthest_distance(positions.float(), aabb.scaled(2.0 ** (levels - 1)))
    return Placement(to_original, aabb, near, far, levels, notes)


def place_in_ndc(cameras: Cameras, poses: Tensor, points: Tensor | None) -> Placement:
    """As `place`, but rays are bent into the box of normalised device coordinates before the mean camera."""
    plain = place(cameras, poses, points)
    nearest = None if points is None else _nearest_depth(cameras, points)
    if nearest is None:
        hint = "leave it out, or give a reconstruction with points, or LLFF's bounds"
        raise InputError("ndc", "depths that say where the nearest things are", "none", hint)
    near = NEAR_SHARE * nearest / similarity_scale(plain.to_original)
    halves = (2.0 * cameras.focal.double() / cameras.size.double()).mean(0)
    placed = placed_poses(poses, plain)
    ndc = Ndc((_mean_camera(placed) / near).float(), halves.float())
    rays = replace(cameras, camera_to_world=placed).rays_through([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
    half = max(float(end[:, :2].abs().max()) for end in ndc.ends(rays)) * 1.001
    if half > WIDEST:
        expected = f"pictures that show at most {WIDEST:g} times what the mean camera does"
        raise InputError("ndc", expected, f"{half:.3g}", "leave it out: some cameras look too far aside")
    aabb = Aabb.cube(max(1.0, half))
    side = 2.0 * aabb.high[0]
    note = f"NDC: the near plane is {near:.3g} ahead of the mean camera, and a box of {side:.3g} holds it all"
    notes = (*plain.notes[:3], note)
    return replace(plain, aabb=aabb, near=0.0, far=side * 3.0**0.5, grid_levels=1, notes=notes, ndc=ndc)


def given_place(poses: Tensor, to_original: Tensor, *, levels: int, near: float, notes: tuple[str, ...]) -> Placement:
    """A file that says where its box is: the unit cube about the origin, which `to_original` (4, 4) leads back from."""
    aabb = Aabb.cube(0.5)
    placed = Placement(to_original, aabb, near, 0.0, levels, notes)
    far = farthest_distance(placed_poses(poses, placed)[:, :, 3], aabb.scaled(2.0 ** (levels - 1)))
    return replace(placed, far=far)


def placed_poses(poses: Tensor, placement: Placement) -> Tensor:
    """(n, 3, 4) float32: the float64 poses (n, 3, 4) at their new place, rotations still rotations."""
    return transform_poses(poses, torch.linalg.inv(placement.to_original)).float()


def levels_for(reach: float) -> int:
    """Levels of boxes about the unit cube that hold what is `reach` away.

    >>> [levels_for(reach) for reach in (0.5, 1.0, 1.1, 4.0, 1e9)]
    [1, 1, 2, 3, 6]
    """
    return min(MAX_LEVELS, 1 + max(0, math.ceil(math.log2(max(reach, 1e-9)) - 1e-9)))


def _upright(poses: Tensor) -> tuple[Tensor, str]:
    """The smallest rotation (3, 3) that turns the mean up axis of the cameras to +z."""
    up = poses[:, :, 1].mean(0)
    length = float(up.norm())
    if length < 0.1:
        return torch.eye(3, dtype=torch.float64), "kept the file's axes: the cameras have no common up"
    up = up / length
    target = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    degrees = math.degrees(math.acos(max(-1.0, min(1.0, float(up @ target)))))
    return turn_between(up, target), f"turned by {degrees:.1f} degrees: the cameras' mean up is +z"


def _center(poses: Tensor, nearest: float | None) -> tuple[Tensor, str]:
    """What the cameras look at, where they look inwards; else twice as far ahead as the nearest things they see, where
    they look the same way; else the middle of the cameras."""
    positions, forward = poses[:, :, 3], -poses[:, :, 2]
    middle = positions.mean(0)
    across = torch.eye(3, dtype=torch.float64) - forward[:, :, None] * forward[:, None, :]  # (n, 3, 3) projectors
    system = across.sum(0)
    if poses.shape[0] > 2 and float(torch.linalg.cond(system)) < 1e3:
        focus = torch.linalg.solve(system, (across @ positions[:, :, None]).sum(0)).squeeze(-1)
        ahead = ((focus - positions) * forward).sum(-1)
        spread = float((positions - middle).norm(dim=-1).max())
        if float((ahead > 0.0).double().mean()) > 0.9 and float(ahead.median()) < 3.0 * spread:
            return focus, "centred on the point the cameras look at"
    ahead = forward.mean(0)
    if nearest is not None and float(ahead.norm()) > 0.8:
        return middle + ahead / ahead.norm() * (2.0 * nearest), "centred ahead of the cameras, which look the same way"
    return middle, "centred on the cameras, which look at no common point nearby"


def _reach(points: Tensor) -> float:
    return float(torch.quantile(_sample(points).abs().amax(-1), 0.99))


def _nearest_depth(cameras: Cameras, points: Tensor) -> float | None:
    """Where the nearest hundredth of the points begins that a camera sees; None where no camera sees enough."""
    points, nearest = _sample(points).float(), []
    for index in range(0, len(cameras), max(1, len(cameras) // 32)):
        where = torch.full((points.shape[0],), index)
        pixels, depths = cameras.project(where, points)
        inside = (depths > 0.0) & (pixels >= 0.0).all(-1) & (pixels <= cameras.size[index]).all(-1)
        if int(inside.sum()) >= _ENOUGH_POINTS:
            nearest.append(float(torch.quantile(depths[inside].double(), 0.01)))
    return min(nearest) if nearest else None


def _sample(points: Tensor, most: int = 20_000) -> Tensor:
    return points[:: max(1, points.shape[0] // most)]
