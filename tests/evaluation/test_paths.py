"""Laws of the orbit: it keeps height and distance, looks at the centre, and closes."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import orbit_path

from ..tiny import ball_scene

CENTER = (0.2, -0.1, 0.3)


def test_orbit_keeps_the_mean_height_and_distance() -> None:
    cameras = ball_scene().cameras
    path = orbit_path(cameras, CENTER, 12)
    wanted, found = cameras.positions - torch.tensor(CENTER), path.positions - torch.tensor(CENTER)
    assert torch.allclose(found[:, 2], wanted[:, 2].mean().expand(12), atol=1e-5)
    assert torch.allclose(found.norm(dim=-1), wanted.norm(dim=-1).mean().expand(12), atol=1e-5)


def test_every_frame_looks_at_the_centre() -> None:
    path = orbit_path(ball_scene().cameras, CENTER, 7)
    pixels, depths = path.project(torch.arange(7), torch.tensor(CENTER).expand(7, 3))
    assert torch.allclose(pixels, path.center, atol=1e-3)
    assert bool((depths > 0).all())
    assert torch.equal(path.size, ball_scene().cameras.size[:1].expand(7, 2))


def test_orbit_turns_once_in_equal_steps() -> None:
    path = orbit_path(ball_scene().cameras, CENTER, 8)
    steps = (path.positions - path.positions.roll(1, 0)).norm(dim=-1)
    assert torch.allclose(steps, steps[:1].expand(8), atol=1e-5)
    assert torch.allclose(path.positions.mean(0)[:2], torch.tensor(CENTER)[:2], atol=1e-5)


def test_cameras_straight_above_still_give_an_orbit() -> None:
    eyes = torch.tensor([[0.01, 0.0, 4.0], [-0.01, 0.0, 4.0]])
    cameras = Cameras.pinhole(look_at(eyes, torch.zeros(3)), width=8, height=8, field_of_view_x=0.7)
    assert torch.isfinite(orbit_path(cameras, (0.0, 0.0, 0.0), 5).camera_to_world).all()


def test_no_frames_are_refused() -> None:
    with pytest.raises(InputError, match="n_frames: expected at least 1, got 0"):
        orbit_path(ball_scene().cameras, CENTER, 0)
