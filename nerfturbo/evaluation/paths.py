"""Camera paths for videos."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.conventions import WORLD_UP, look_at
from ..errors import InputError


def orbit_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> Cameras:
    """One turn about the vertical axis through `center`, at the mean height and distance of `cameras`.

    Size and field of view are those of the first camera. The path closes: frame n would be frame 0 again.
    """
    if n_frames < 1:
        raise InputError("n_frames", "at least 1", str(n_frames))
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
    width, rows = (int(side) for side in cameras.size[0])
    view = 2.0 * math.atan(0.5 * width / float(cameras.focal[0, 0]))
    return Cameras.pinhole(look_at(eyes, target), width=width, height=rows, field_of_view_x=view)


def _start_angle(offsets: Tensor) -> float:
    """Begin where the first camera stands, so that the video opens on a view the pictures show."""
    return math.atan2(float(offsets[0, 1]), float(offsets[0, 0]))
