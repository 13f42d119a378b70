"""Camera paths for videos: about the scene, through it, or from one photograph to the next."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.conventions import WORLD_UP, look_at
from ..errors import InputError
from .poses import interpolate_poses, pose_distances, shortest_tour

FACING = 0.8  # the mean of unit viewing directions is longer than this where all cameras look one way
SPIRAL_TURNS = 2
SPIRAL_REACH = 0.5  # of the cameras' own spread: a spiral stays where the pictures were taken


def orbit_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> Cameras:
    """One turn about the vertical axis through `center`, at the mean height and distance of `cameras`.

    Size and field of view are those of the first camera. The path closes: frame n would be frame 0 again.
    """
    _check_frames(n_frames)
    target = torch.tensor(center, dtype=torch.float32)
    offsets = cameras.positions.cpu() - target  # (n, 3)
    up = torch.tensor(WORLD_UP)
    heights = offsets @ up
    height = float(heights.mean())
    distance = float(offsets.norm(dim=-1).mean())
    # A mean height near the mean distance would look straight down: stay below 75 degrees.
    height = max(-0.966 * distance, min(0.966 * distance, height))
    radius = math.sqrt(max(distance * distance - height * height, 1e-12))
    angles = torch.arange(n_frames) * (2.0 * math.pi / n_frames) + _start_angle(offsets)
    eyes = torch.stack([radius * angles.cos(), radius * angles.sin(), torch.full_like(angles, height)], dim=-1) + target
    return _pinholes(cameras, look_at(eyes, target))


def spiral_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> Cameras:
    """Where all cameras look one way, circles before the scene, swaying in and out, as is usual for such captures;
    else two turns about `center` that rise from the lowest camera to the highest.

    Size and field of view are those of the first camera.
    """
    _check_frames(n_frames)
    share = torch.arange(n_frames) / n_frames
    forward = cameras.forward.cpu().mean(0)
    positions = cameras.positions.cpu()
    if float(forward.norm()) > FACING:
        return _pinholes(cameras, _swaying(positions, forward, center, share))
    target = torch.tensor(center, dtype=torch.float32)
    offsets = positions - target
    distance = float(offsets.norm(dim=-1).mean())
    sines = (offsets[:, 2] / offsets.norm(dim=-1).clamp_min(1e-6)).clamp(-0.966, 0.966)
    elevation = torch.lerp(sines.min().asin(), sines.max().asin(), share)
    angles = share * (2.0 * math.pi * SPIRAL_TURNS) + _start_angle(offsets)
    flat = elevation.cos() * distance
    eyes = torch.stack([flat * angles.cos(), flat * angles.sin(), elevation.sin() * distance], dim=-1) + target
    return _pinholes(cameras, look_at(eyes, target))


def _swaying(positions: Tensor, forward: Tensor, center: tuple[float, float, float], share: Tensor) -> Tensor:
    middle = positions.mean(0)
    backward = -forward / forward.norm()
    axes = look_at(middle[None], (middle - backward)[None])[0, :, :3]  # right, up, backward of the mean camera
    spread = ((positions - middle) @ axes).abs().quantile(0.9, dim=0).clamp_min(1e-6) * SPIRAL_REACH
    angles = share * (2.0 * math.pi * SPIRAL_TURNS)
    local = torch.stack([angles.cos(), angles.sin(), (0.5 * angles).sin()], dim=-1) * spread
    ahead = (torch.tensor(center) - middle) @ forward / forward.norm()
    target = middle - backward * max(float(ahead), 10.0 * float(spread.max()))
    return look_at(middle + local @ axes.T, target)


def interpolated_path(cameras: Cameras, n_frames: int) -> Cameras:
    """A smooth flight through all cameras: in their order where that is a walk (a video, a row of photographs), else
    from each to its nearest neighbour. Size and field of view are those of the first camera."""
    _check_frames(n_frames)
    poses = cameras.camera_to_world.cpu()
    if poses.shape[0] < 2:
        raise InputError("cameras", "at least 2, to fly from one to another", str(poses.shape[0]))
    scale = float((cameras.positions.cpu() - cameras.positions.cpu().mean(0)).norm(dim=-1).mean()) or 1.0
    tour = shortest_tour(poses, scale)
    ordered = pose_distances(poses[:-1], poses[1:], scale).sum()
    toured = pose_distances(poses[tour[:-1]], poses[tour[1:]], scale).sum()
    keys = poses if float(ordered) < 1.5 * float(toured) else poses[tour]
    return _pinholes(cameras, interpolate_poses(keys, n_frames, scale))


def still_path(cameras: Cameras, index: int, n_frames: int) -> Cameras:
    """One camera again and again, for scenes that move by themselves; its lens included."""
    _check_frames(n_frames)
    return replace(cameras[torch.full((n_frames,), index)], times=None)


def with_times(path: Cameras, time: float | None) -> Cameras:
    """The path through a scene that moves: at one time, or sweeping over all of it."""
    n = len(path)
    times = torch.linspace(0.0, 1.0, n) if time is None else torch.full((n,), time)
    return replace(path, times=times)


def _check_frames(n_frames: int) -> None:
    if n_frames < 1:
        raise InputError("n_frames", "at least 1", str(n_frames))


def _pinholes(cameras: Cameras, poses: Tensor) -> Cameras:
    """The first camera's size and field of view, at other poses."""
    width, rows = (int(side) for side in cameras.size[0])
    view = 2.0 * math.atan(0.5 * width / float(cameras.focal[0, 0]))
    return replace(Cameras.pinhole(poses, width=width, height=rows, field_of_view_x=view), ndc=cameras.ndc)


def _start_angle(offsets: Tensor) -> float:
    """Begin where the first camera stands, so that the video opens on a view the pictures show."""
    return math.atan2(float(offsets[0, 1]), float(offsets[0, 0]))
