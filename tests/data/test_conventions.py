"""Axes and poses: the laws every loader relies on."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.data.cameras import look_at, opencv_to_opengl, opengl_to_opencv, world_to_camera
from nerfturbo.errors import InputError


def poses() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return look_at(torch.randn(16, 3, generator=generator) * 3.0, torch.zeros(3))


def test_look_at_gives_rotations_that_look_at_the_target() -> None:
    pose = poses()
    rotation, eye = pose[:, :, :3], pose[:, :, 3]
    assert torch.allclose(rotation.transpose(1, 2) @ rotation, torch.eye(3).expand(16, 3, 3), atol=1e-5)
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(16), atol=1e-5)
    forward = -rotation[:, :, 2]
    assert torch.allclose(forward, torch.nn.functional.normalize(-eye, dim=-1), atol=1e-5)
    assert (rotation[:, 2, 1] > 0).all()  # the camera's up leans towards the world's


def test_look_along_up_is_refused() -> None:
    with pytest.raises(InputError, match="up"):
        look_at(torch.tensor([[0.0, 0.0, 2.0]]), torch.zeros(3))


def test_opencv_and_back_is_the_identity() -> None:
    pose = poses()
    assert torch.equal(opencv_to_opengl(opengl_to_opencv(pose)), pose)
    assert torch.equal(opengl_to_opencv(pose)[:, :, 2], -pose[:, :, 2])  # forward instead of backward
    assert torch.equal(opengl_to_opencv(pose)[:, :, 3], pose[:, :, 3])  # the camera stays where it is


def test_opencv_conversion_takes_whole_matrices_too() -> None:
    matrix = torch.cat([poses()[0], torch.tensor([[0.0, 0.0, 0.0, 1.0]])])
    assert torch.equal(opengl_to_opencv(matrix)[3], matrix[3])


def test_world_to_camera_is_the_inverse() -> None:
    pose = poses()
    inverse = world_to_camera(pose)
    points = torch.randn(16, 3)
    there = (pose[:, :, :3] @ points[..., None])[..., 0] + pose[:, :, 3]
    back = (inverse[:, :, :3] @ there[..., None])[..., 0] + inverse[:, :, 3]
    assert torch.allclose(back, points, atol=1e-5)
