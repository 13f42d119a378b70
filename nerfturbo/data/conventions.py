"""The one place for axes, pixel centres, pose layout and colour space. `docs/conventions.md` is its prose twin.

World      right-handed, +z up (as in Blender files); `placement.py` turns captures that have another up.
Camera     OpenGL axes, as in Blender files: +x right, +y up, -z forward.
Pose       camera_to_world, (3, 4): columns are the camera's right, up, backward axes in the world, then its position.
Pixels     (x, y) with x to the right and y down; pixel (column, row) covers [column, column + 1) x [row, row + 1),
           so that its centre is at (column + 0.5, row + 0.5) and a principal point in the middle is (w / 2, h / 2).
           Halving a picture halves focal length, principal point and size: no half-pixel shifts anywhere.
Colour     sRGB values as stored in the file, mapped to [0, 1]; never linearised for training or for scores.
Alpha      straight (not premultiplied), coverage in [0, 1]; `composite_over` puts a picture on a background.
Time       in [0, 1] over a recording.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError

PIXEL_CENTER = 0.5
WORLD_UP = (0.0, 0.0, 1.0)


def opengl_to_opencv(camera_to_world: Tensor) -> Tensor:
    """Poses (..., 3 or 4, 4) with OpenGL camera axes to OpenCV ones (+x right, +y down, +z forward)."""
    flip = camera_to_world.new_tensor([1.0, -1.0, -1.0, 1.0])
    return camera_to_world * flip


def opencv_to_opengl(camera_to_world: Tensor) -> Tensor:
    """The inverse of `opengl_to_opencv`, which is its own inverse; two names so that callers say what they mean."""
    return opengl_to_opencv(camera_to_world)


def look_at(eye: Tensor, target: Tensor, up: Tensor | None = None) -> Tensor:
    """Poses (n, 3, 4) of cameras at `eye` (n, 3) that look at `target` (n, 3) or (3,), with `up` towards the top.

    >>> look_at(torch.tensor([[0.0, -4.0, 0.0]]), torch.zeros(3))[0, :, 2]  # backward = from target to eye
    tensor([ 0., -1.,  0.])
    """
    up = eye.new_tensor(WORLD_UP) if up is None else up
    backward = torch.nn.functional.normalize(eye - target, dim=-1)
    right = torch.linalg.cross(up.expand_as(backward), backward)
    length = right.norm(dim=-1, keepdim=True)
    if bool((length < 1e-6).any()):
        raise InputError("eye", "a view not along the up axis", "one that is", "move the eye or give another `up`")
    right = right / length
    return torch.stack([right, torch.linalg.cross(backward, right), backward, eye], dim=-1)


def world_to_camera(camera_to_world: Tensor) -> Tensor:
    """The inverse of rigid poses (n, 3, 4)."""
    rotation = camera_to_world[..., :3].transpose(-1, -2)
    return torch.cat([rotation, -rotation @ camera_to_world[..., 3:]], dim=-1)
