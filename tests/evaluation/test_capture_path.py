"""The path of a capture stays where images were taken, whatever way they were taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.evaluation.camera_path import capture_path

CENTER = (0.0, 0.0, 0.0)


def seen_from(eyes: Tensor, targets: Tensor) -> Cameras:
    return Cameras.pinhole(look_at(eyes, targets), width=8, height=6, field_of_view_x=0.9)


def on_circle(degrees: Tensor, *, wide: float = 1.0, height: float = 0.3) -> Tensor:
    angles = torch.deg2rad(degrees)
    return torch.stack([wide * angles.cos(), angles.sin(), torch.full_like(angles, height)], dim=-1)


def to_nearest(path: Cameras, cameras: Cameras) -> float:
    """How far the path strays from the places where images were taken."""
    return float(torch.cdist(path.positions, cameras.positions).min(dim=1).values.max())


def test_a_ring_is_orbited_in_its_own_shape() -> None:
    cameras = seen_from(on_circle(torch.arange(0.0, 360.0, 10.0), wide=2.0), torch.zeros(3))  # an ellipse, 2 to 1
    path, kind = capture_path(cameras, CENTER, 24)
    assert kind == "orbit" and to_nearest(path, cameras) < 0.25  # a circle of the mean distance strays by 0.5
    assert torch.allclose(path.positions[:, 2], torch.tensor(0.3), atol=0.1)


@pytest.mark.parametrize("middle", [0.0, 90.0, 180.0])  # angles begin again at 180 degrees
@pytest.mark.parametrize("half", [5.0, 40.0, 100.0])
def test_a_side_that_nobody_stood_on_is_not_looked_from(middle: float, half: float) -> None:
    cameras = seen_from(on_circle(torch.linspace(middle - half, middle + half, 12)), torch.zeros(3))
    path, kind = capture_path(cameras, CENTER, 24)
    angles = torch.rad2deg(torch.atan2(path.positions[:, 1], path.positions[:, 0]))
    away = (angles - middle + 180.0) % 360.0 - 180.0
    assert kind == "arc" and float(away.abs().max()) < half
    assert float(away.max()) > 0.5 * half and float(away.min()) < -0.5 * half
    assert torch.allclose(path.positions.norm(dim=-1), cameras.positions.norm(dim=-1).mean(), atol=0.05)


@pytest.mark.parametrize("center", [(0.0, 0.0, 0.0), (4.0, 0.0, 0.0)])  # of a file without points, and of one with
def test_parallel_views_are_swayed_before(center: tuple[float, float, float]) -> None:
    eyes = torch.cartesian_prod(torch.zeros(1), torch.linspace(-0.5, 0.5, 5), torch.linspace(-0.3, 0.3, 4))
    cameras = seen_from(eyes, eyes + torch.tensor([5.0, 0.0, 0.0]))
    path, kind = capture_path(cameras, center, 16)
    assert kind == "arc" and bool((path.forward[:, 0] > 0.9).all())
    assert bool((path.positions[:, 1:].abs() <= torch.tensor([0.5, 0.3]) + 1e-3).all())
    assert float(path.positions[:, 1].max() - path.positions[:, 1].min()) > 0.3


def test_a_walk_is_walked_in_its_order() -> None:
    way = torch.linspace(0.0, 10.0, 40)
    eyes = torch.stack([way, torch.sin(way), torch.zeros_like(way)], dim=-1)
    ahead = torch.stack([torch.ones_like(way), torch.cos(way), torch.zeros_like(way)], dim=-1)
    sides = torch.where(torch.arange(40)[:, None] % 20 < 10, ahead, ahead * torch.tensor([-1.0, 1.0, 1.0]))
    cameras = seen_from(eyes, eyes + sides)
    path, kind = capture_path(cameras, CENTER, 30)
    assert kind == "walk" and to_nearest(path, cameras) < 0.7
    assert bool((path.positions[1:, 0] > path.positions[:-1, 0] - 1e-3).all())


@pytest.mark.parametrize("n_views", [1, 2])
def test_one_or_two_images_have_a_path(n_views: int) -> None:
    cameras = seen_from(on_circle(torch.linspace(0.0, 20.0, n_views)), torch.zeros(3))
    path, _ = capture_path(cameras, CENTER, 5)
    assert bool(torch.isfinite(path.camera_to_world).all()) and len(path) == 5
    assert float(path.positions.norm(dim=-1).max()) < 1.2 * math.hypot(1.0, 0.3)
