"""Laws of the orbit: it keeps height and distance, looks at the centre, and closes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.images import ImagePool
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import around_object, orbit_path
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb

from ..tiny import ball_scene, tiny_config

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


class Table(nn.Module):
    """A flat disc below the middle, solid; analytic, so that what a frame must show is known."""

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        flat = (positions[:, 2] > -0.95) & (positions[:, 2] < -0.7)
        return 1000.0 * (flat & (positions[:, :2].norm(dim=-1) < 1.25)).float()

    def forward(self, positions: Tensor, directions: Tensor, times=None, camera_indices=None) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(positions), self.density(positions, times)


def test_frames_show_the_whole_of_an_object_that_training_views_cut() -> None:
    scene = ball_scene(size=32)
    scene = replace(scene, cameras=replace(scene.cameras, focal=scene.cameras.focal * 0.9))
    model = NerfModel(tiny_config(), SceneBounds.of(replace(scene, aabb=Aabb.cube(1.5))))
    model.field = Table()
    around = torch.arange(64) * (2.0 * torch.pi / 64)
    rim = torch.cat(
        [torch.stack([1.25 * around.cos(), 1.25 * around.sin(), around * 0.0 + z], -1) for z in (-0.95, -0.7)]
    )

    def shown(path: Cameras) -> list[bool]:
        pixels = [path.project(torch.full((len(rim),), index), rim)[0] for index in range(len(path))]
        return [bool(((found > 0.0) & (found < 32.0)).all()) for found in pixels]

    path = orbit_path(scene.cameras, (0.0, 0.0, 0.0), 9)
    whole = around_object(path, model, scene)
    assert not any(shown(path)) and all(shown(whole))
    assert torch.equal(whole.positions, path.positions)
    assert float(whole.focal[0, 0]) > 0.8 * float(path.focal[0, 0])  # the tilt does the most of it
    assert around_object(whole, model, scene) is whole
    photographed = replace(scene, images=ImagePool.from_images(torch.zeros(4, 32, 32, 3, dtype=torch.uint8)))
    assert around_object(path, model, photographed) is path
    model.grid.set_occupied(torch.zeros(1, 8, 8, 8, dtype=torch.bool))
    assert around_object(path, model, scene) is path  # nothing there
