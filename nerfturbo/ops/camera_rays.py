"""The rays of a whole picture, made on the device from sixteen numbers: what a recorded frame is steered by."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from ._checks import check_float, check_shape
from ._dispatch import implementation


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    """Origins and unit directions (height * width, 3) fp32 through the pixel centres of a pinhole camera, row-major.

    `camera` (16,) holds the pose (3, 4), camera to world, looking along -z with y up, then fx, fy, cx, cy in pixels.
    The rows of a picture from r on are the picture of a camera with r subtracted from cy.

    >>> import torch
    >>> camera = torch.cat([torch.eye(3, 4).flatten(), torch.tensor([2.0, 2.0, 0.5, 0.5])])
    >>> camera_rays(camera, width=1, height=1)[1].tolist()
    [[0.0, 0.0, -1.0]]
    """
    check_shape("camera", camera, (16,))
    check_float("camera", camera)
    if width < 0 or height < 0:
        raise InputError("width and height", "at least 0", f"{width} and {height}")
    return implementation("camera_rays", "camera_rays", camera)(camera.detach().float(), width=width, height=height)
