"""Rays of a picture: those of the camera classes, on every backend; a part of it is a camera with another centre."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import camera_rays

from .cases import Target, assert_close, require


def make_camera(width: int, height: int) -> tuple[Cameras, torch.Tensor]:
    poses = look_at(torch.tensor([[1.0, -3.0, 2.0]]), torch.tensor([0.1, 0.2, 0.3]))
    cameras = Cameras.pinhole(poses, width=width, height=height, field_of_view_x=0.8)
    return cameras, torch.cat([poses.flatten(), cameras.focal[0], cameras.center[0]])


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 5), (0, 4), (33, 21)])
def test_matches_the_cameras(target: Target, width: int, height: int):
    require(target)
    cameras, camera = make_camera(max(width, 1), max(height, 1))
    want = cameras.image_rays(0)
    with use_backend(target.backend):  # type: ignore[arg-type]
        origins, directions = camera_rays(camera.to(target.device), width=width, height=height)
    assert origins.shape == directions.shape == (width * height, 3)
    if width * height:
        assert_close("origins", origins.cpu(), want.origins, 1e-6)
        assert_close("directions", directions.cpu(), want.directions, 1e-6)
        assert math.isclose(float(directions.norm(dim=-1).max()), 1.0, abs_tol=1e-6)


def test_a_part_is_a_camera_with_another_centre(target: Target):
    require(target)
    _, camera = make_camera(9, 12)
    shifted = camera - torch.eye(16)[15] * 5.0
    with use_backend(target.backend):  # type: ignore[arg-type]
        whole = camera_rays(camera.to(target.device), width=9, height=12)[1]
        part = camera_rays(shifted.to(target.device), width=9, height=7)[1]
    assert_close("rows from 5 on", part, whole[45:], 1e-6)


def test_wrong_arguments_are_named(target: Target):
    with pytest.raises(InputError, match=r"camera: expected shape \(16,\), got \(3, 4\)"):
        camera_rays(torch.zeros(3, 4), width=1, height=1)
    with pytest.raises(InputError, match="width and height: expected at least 0, got -1 and 3"):
        camera_rays(torch.zeros(16), width=-1, height=3)
