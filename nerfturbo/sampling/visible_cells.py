"""Which cells of a grid any camera looks at."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Frusta(NamedTuple):
    """Pinhole cameras: poses that look along -z with y up."""

    camera_to_world: Tensor  # (n, 3, 4)
    focal: Tensor  # (n, 2) pixels
    center: Tensor  # (n, 2) pixels
    size: Tensor  # (n, 2) pixels


def seen_by_any(points: Tensor, radius: Tensor, frusta: Frusta, near: float) -> Tensor:
    """(n,) bool: whether a sphere around each point (n, 3) touches the frustum of a camera beyond `near`."""
    seen = torch.zeros(points.shape[0], dtype=torch.bool, device=points.device)
    for pose, f, c, wh in zip(*frusta, strict=True):
        local = (points - pose[:, 3]) @ pose[:, :3]
        depth = -local[:, 2]
        margin = radius * f.max() * 1.5
        inside = depth + radius > near
        for axis, sign in ((0, 1.0), (1, -1.0)):
            pixel = sign * local[:, axis] * f[axis] + c[axis] * depth
            inside &= (pixel > -margin) & (pixel < wh[axis] * depth + margin)
        seen |= inside
    return seen
