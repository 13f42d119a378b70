"""Where a real scene is put: upright, about the origin, with its cameras at distance 1 or less, in a box that fits.

Up is what the cameras' right axes stand upright on, and what they look at is the middle. The images say whether
anything stands behind, and points of a reconstruction, where there are some, how far that reaches: `grid_levels` nested
boxes, each twice as large as the one before, cover them. The way back to the file's own coordinates is kept exactly.

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

from ..errors import InputError, refuse
from ..types import Aabb, Rays
from .cameras import Cameras, similarity_scale, transform_poses, turn_between
from .images import OBJECT_BORDER, Backdrop
from .options import DEFAULTS, LoadOptions, Up
from .scene import Decision, Extent, farthest_distance

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
        local, along = self._local(rays.origins), rays.directions @ self.to_mean[:, :3].T
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
_MOSTLY, _PARTLY = 0.75, 0.5  # shares of the images' borders that are flat: rather an object, perhaps one
_PAST = 0.1  # share of the rays along the borders that the ground does not stop between the cameras
_LEVEL, _STEEP = 0.17, 0.35  # right axes off the horizontal (root mean square), up axes along up at least
_ONE_WAY = 0.9  # mean of the cameras' viewing directions
_PITCH = 0.02  # over the cameras: how much they count as looking level, which decides where they do not turn
# Up axes that turn this much, and so much more than the right ones (little, where they are leveller) lie on their side.
_TURNS, _MORE, _LITTLE_MORE = 0.05, 8.0, 1.5
UP_FLAG = "--up x|y|z|-x|-y|-z"


@dataclass(frozen=True)
class Placement:
    """Bounds of a placed scene and the way back."""

    to_original: Tensor  # (4, 4) float64: original = to_original @ placed
    extent: Extent
    notes: tuple[str, ...]
    ndc: Ndc | None = None
    other: Extent | None = None  # where bounds are in doubt


def place(
    cameras: Cameras,
    poses: Tensor,
    points: Tensor | None = None,
    *,
    options: LoadOptions = DEFAULTS,
    backdrop: Backdrop | None = None,
    shown: Tensor | None = None,
) -> Placement:
    """Choose a place for all cameras of a scene; `placed_poses` then moves them. `poses` (n, 3, 4) are float64, and
    `points` (m, 3) lie on surfaces. `shown` are the poses of the images as a person looks at them."""
    backdrop = backdrop or Backdrop()
    by_points = options.up == "mean" and not backdrop.transparent  # as runs of version 1 were placed
    backdrop = Backdrop() if by_points else backdrop
    upright, up_note = _upright(poses if shown is None else shown, options.up)
    if points is not None and points.shape[0] < _ENOUGH_POINTS:
        points = None
    nearest = None if points is None else _nearest_depth(cameras, points)
    center, center_note = _center(poses, nearest)
    distances = (poses[:, :, 3] - center).norm(dim=-1)
    scale = 1.0 / max(float(distances.max()), 1e-9)
    if float(distances.max()) < 1e-6:  # one camera, or all in one place: what they see gives the unit
        scale = 1.0 if points is None else 1.0 / max(float((points - center).norm(dim=-1).median()), 1e-9)
    to_original = torch.eye(4, dtype=torch.float64)
    to_original[:3] = torch.cat([upright.T / scale, center[:, None]], dim=1)
    moved = replace(cameras, camera_to_world=transform_poses(poses, torch.linalg.inv(to_original)).float())
    cloud = None if points is None else (points.double() - center) @ upright.T * scale
    bounded, why, doubt = options.bounds == "bounded", "as asked", False
    if options.bounds == "auto":
        bounded, why, doubt = _verdict(moved, cloud, backdrop)
    found = _extents(moved, cloud, None if nearest is None else nearest * scale, backdrop)
    if by_points and options.bounds == "auto" and cloud is not None:
        around = torch.nn.functional.normalize(moved.positions[:, :2], dim=-1)
        bounded, doubt = levels_for(_reach(cloud)) == 1 and float(around.mean(0).norm()) <= _ONE_SIDE, False
        found[0] = found[1]._replace(far=farthest_distance(moved.positions, found[1].aabb), grid_levels=1)
    extent, other = found if bounded else found[::-1]
    reach = f"one box of {extent.aabb.size[0]:.3g}" if bounded else f"{extent.grid_levels} grid levels"
    why = f"{why}, in doubt: `train` tries both; {reach}" if doubt else f"{why}; {reach}"
    notes = (up_note, center_note, f"scaled by {scale:.4g}: the farthest camera is 1 away from the centre")
    notes += (Decision.of("bounds", extent.kind, why, f"--bounds {other.kind}"),)
    return Placement(to_original, extent, notes, other=other if doubt else None)


def _verdict(cameras: Cameras, points: Tensor | None, backdrop: Backdrop) -> tuple[bool, str, bool]:
    """Whether a placed scene is bounded, why, and whether that is in doubt."""
    if backdrop.transparent:
        return True, "the images can be seen through", False
    reach = 0.0 if points is None else _reach(points)
    if backdrop.flat >= (_PARTLY if reach <= 1.0 else OBJECT_BORDER):
        why = f"{backdrop.flat:.0%} of the images' borders are of one colour or masked"
        return backdrop.flat >= _MOSTLY, why, backdrop.flat < OBJECT_BORDER or reach > 1.0  # a black rim, perhaps
    if points is None:
        return False, "the images have a background, no points measure it", False
    why, past = f"99% of {points.shape[0]} points within {reach:.3g}", _past(cameras, points)
    if reach > 1.0:
        return False, why, False
    return False, f"{why}, and {past:.0%} of the images' borders look past what is between the cameras", past < _PAST


def _past(cameras: Cameras, points: Tensor) -> float:
    """Share of the rays along the images' borders that no ground stops between the cameras."""
    steps = (0.0, 0.5, 1.0)
    rays = cameras.rays_through([(x, y) for x in steps for y in steps if (x, y) != (0.5, 0.5)])
    ground = float(torch.quantile(_sample(points)[:, 2], 0.02))
    down = rays.directions[:, 2].clamp(max=-1e-6)
    hit = rays.origins + rays.directions * ((ground - rays.origins[:, 2]) / down)[:, None]
    return 1.0 - float(((rays.directions[:, 2] < 0.0) & (hit[:, :2].abs().amax(-1) <= 1.0)).float().mean())


def _extents(cameras: Cameras, points: Tensor | None, nearest: float | None, backdrop: Backdrop) -> list[Extent]:
    """Bounded: one box, of the points or, of an object alone, of what the views hold about the centre. Unbounded: boxes
    about that of the cameras, as many as the points need."""
    reach, near = 0.0 if points is None else _reach(points), _NEAR if nearest is None else 0.5 * nearest
    levels = LEVELS_WITHOUT_POINTS if points is None else max(levels_for(reach), 2)
    half, first = max(1e-3, reach), near
    if points is None or backdrop.transparent or backdrop.flat >= _PARTLY:
        held = 0.5 * cameras.size.amax(-1) / cameras.focal.amin(-1) * cameras.positions.norm(dim=-1)
        half, first = float(held.max().clamp(1e-3, 1.0)), 0.0
    boxes = ((half, first, 1), (1.0, max(0.005, min(0.5, near)), levels))
    far = [farthest_distance(cameras.positions, Aabb.cube(box * 2.0 ** (count - 1))) for box, _, count in boxes]
    return [Extent(Aabb.cube(box), start, end, count) for (box, start, count), end in zip(boxes, far, strict=True)]


def place_in_ndc(cameras: Cameras, poses: Tensor, points: Tensor | None, options: LoadOptions = DEFAULTS) -> Placement:
    """As `place`, but rays are bent into the box of normalised device coordinates before the mean camera."""
    plain = place(cameras, poses, points, options=replace(options, bounds="unbounded"))
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
    expected = f"images that show at most {WIDEST:g} times what the mean camera does"
    refuse(half > WIDEST, "ndc", expected, f"{half:.3g}", "leave it out: some cameras look too far aside")
    side = 2.0 * max(1.0, half)
    why = f"the near plane is {near:.3g} ahead of the mean camera, and a box of {side:.3g} holds it all"
    notes = (*plain.notes[:3], Decision.of("bounds", "NDC", why, "--bounds unbounded"))
    return replace(plain, extent=Extent(Aabb.cube(0.5 * side), 0.0, side * 3.0**0.5, 1), notes=notes, ndc=ndc)


def given_place(
    poses: Tensor, to_original: Tensor, options: LoadOptions, *, half: float, levels: int, near: float, why: str
) -> Placement:
    """A file that says where its box is, a cube about the origin that `to_original` (4, 4) leads back from, and how far
    it reaches, and `why`; but what was asked for wins."""
    kinds = ("bounded", "unbounded") if levels == 1 else ("unbounded", "bounded")
    if options.bounds == kinds[1]:
        kinds, levels, why = kinds[::-1], LEVELS_WITHOUT_POINTS if levels == 1 else 1, "as asked"
    up, whose = "z", "the format's axes"
    if options.up not in ("auto", "mean"):
        up, whose, turn = options.up, "as asked", torch.eye(4, dtype=torch.float64)
        turn[:3, :3] = turn_between(to_original[:3, :3].T @ _axis(up) / similarity_scale(to_original), _axis("z"))
        to_original = to_original @ turn.T
    placed = transform_poses(poses, torch.linalg.inv(to_original)).float()
    far = farthest_distance(placed[:, :, 3], Aabb.cube(half).scaled(2.0 ** (levels - 1)))
    notes = (Decision.of("up", f"up is {up} of the file", whose, UP_FLAG),)
    notes += (Decision.of("bounds", kinds[0], f"{why}; grid levels: {levels}", f"--bounds {kinds[1]}"),)
    return Placement(to_original, Extent(Aabb.cube(half), near, far, levels), notes)


def placed_poses(poses: Tensor, placement: Placement) -> Tensor:
    """(n, 3, 4) float32: the float64 poses (n, 3, 4) at their new place, rotations still rotations."""
    return transform_poses(poses, torch.linalg.inv(placement.to_original)).float()


def levels_for(reach: float) -> int:
    """Levels of boxes about the unit cube that hold what is `reach` away.

    >>> [levels_for(reach) for reach in (0.5, 1.0, 1.1, 4.0, 1e9)]
    [1, 1, 2, 3, 6]
    """
    return min(MAX_LEVELS, 1 + max(0, math.ceil(math.log2(max(reach, 1e-9)) - 1e-9)))


def _upright(poses: Tensor, wanted: Up) -> tuple[Tensor, str]:
    """The rotation (3, 3) that turns up to +z, the smallest one."""
    up, why = (None, "") if wanted in ("auto", "mean") else (_axis(wanted), "as asked")
    if wanted == "auto":
        up, why = _gravity(poses)
    if up is None:
        mean = poses[:, :, 1].mean(0)
        if float(mean.norm()) < 0.1:
            return torch.eye(3, dtype=torch.float64), Decision.of("up", "up is the file's z", "no common up", UP_FLAG)
        up, why = mean / mean.norm(), "the mean of the images' up axes"
    shown = " ".join(f"{value + 0.0:.2f}" for value in up.tolist())
    return turn_between(up, _axis("z")), Decision.of("up", f"up is {shown} of the file", why, UP_FLAG)


def _axis(name: str) -> Tensor:
    return torch.eye(3, dtype=torch.float64)["xyz".index(name[-1])] * (-1.0 if name[0] == "-" else 1.0)


def _gravity(poses: Tensor) -> tuple[Tensor | None, str]:
    """Up (3,) by what is level: the images' right axes or, of images that lie on their side, their up axes; else the
    plane that the cameras stand in. Where cameras hardly turn, that they look level decides between what is left."""
    right, upward, backward, positions = poses.double().unbind(-1)
    count, found, above = poses.shape[0], [], backward.mean(0)
    if float(above.norm()) > _ONE_WAY and float(upward.mean(0).norm()) < 0.5:
        return above / above.norm(), "the cameras look one way, their images turned all ways: down"
    for level, steep in ((right, upward), (upward, right)):
        moments = (level.T @ level + _PITCH / count * backward.T @ backward) / count
        values, vectors = torch.linalg.eigh(moments)
        up = vectors[:, 0]
        off = float((level @ up).square().mean().sqrt())
        fits = off < _LEVEL and abs(float(steep.mean(0) @ up)) > _STEEP
        found.append((fits, float(values[1]), up, math.degrees(math.asin(min(1.0, off)))))
    (upright, turns, up, off), (sideways, turns_of_up, other, off_of_up) = found
    looks_down = -above
    more = turns * (_LITTLE_MORE if off_of_up < 0.7 * off else _MORE)
    if sideways and (not upright or turns_of_up > max(_TURNS, more)):
        down = float(looks_down @ other)
        sign = -down if abs(down) > 0.05 else -float(right.mean(0) @ other)  # else as phones are held
        why = f"the images lie on their side: their up axes are level within {off_of_up:.1f} degrees"
        return other * (1.0 if sign >= 0.0 else -1.0), why
    why = f"the cameras' right axes are level within {off:.1f} degrees"
    if not upright:
        _, sizes, axes = torch.linalg.svd(positions - positions.mean(0), full_matrices=False)
        ring = count > 3 and float(sizes[2]) < 0.15 * float(sizes[1]) and float(sizes[1]) > 0.3 * float(sizes[0])
        if not ring or float(above.norm()) > _ONE_WAY:
            return None, ""
        up, why = axes[2], "the cameras stand in a plane"
    sign = float(upward.mean(0) @ up)
    if abs(sign) < 0.1:  # half of them hang upside down: they look down, then
        sign = -float(looks_down @ up)
    return up * (1.0 if sign >= 0.0 else -1.0), why


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
        pixels, depths = cameras.project(torch.full((points.shape[0],), index), points)
        inside = (depths > 0.0) & (pixels >= 0.0).all(-1) & (pixels <= cameras.size[index]).all(-1)
        if int(inside.sum()) >= _ENOUGH_POINTS:
            nearest.append(float(torch.quantile(depths[inside].double(), 0.01)))
    return min(nearest) if nearest else None


def _sample(points: Tensor, most: int = 20_000) -> Tensor:
    return points[:: max(1, points.shape[0] // most)]
