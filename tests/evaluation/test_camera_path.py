"""Camera paths as files, poses between poses, and paths through cameras."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import (
    CameraPath,
    interpolate_poses,
    interpolated_path,
    orbit_path,
    pose_distances,
    quaternions,
    read_camera_path,
    rotations,
    spiral_path,
    with_times,
    write_camera_path,
)
from nerfturbo.types import Aabb

from ..tiny import ball_scene


def similarity() -> torch.Tensor:
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
    turn = turn * torch.sign(torch.linalg.det(turn))
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3], matrix[:3, 3] = 2.5 * turn, torch.tensor([1.0, -2.0, 3.0])
    return matrix


@pytest.mark.parametrize("to_original", [None, similarity()], ids=["own", "moved"])
def test_a_path_comes_back_with_its_crop(tmp_path: Path, to_original: torch.Tensor | None) -> None:
    cameras = with_times(orbit_path(ball_scene().cameras, (0.0, 0.0, 0.0), 5), None)
    box = Aabb((-0.5, -1.0, 0.25), (0.5, 1.0, 1.25))
    write_camera_path(tmp_path / "a.json", CameraPath(cameras, 30.0, box), to_original, keyframes=cameras)
    back = read_camera_path(tmp_path / "a.json", to_original)
    assert torch.allclose(back.cameras.camera_to_world, cameras.camera_to_world, atol=1e-5)
    assert torch.allclose(back.cameras.focal, cameras.focal, rtol=1e-5) and torch.equal(back.cameras.size, cameras.size)
    assert back.cameras.times is not None and back.cameras.times.tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert back.fps == 30.0 and back.crop is not None
    assert back.crop.low == pytest.approx(box.low) and back.crop.high == pytest.approx(box.high)


def test_a_file_as_nerfstudio_writes_it(tmp_path: Path) -> None:
    matrix = [1, 0, 0, 0.5, 0, 1, 0, 0, 0, 0, 1, 4, 0, 0, 0, 1]
    document = {
        "keyframes": [],
        "camera_type": "perspective",
        "render_height": 90,
        "render_width": 160,
        "fps": 24,
        "seconds": 2,
        "is_cycle": False,
        "smoothness_value": 0,
        "camera_path": [{"camera_to_world": matrix, "fov": 60.0, "aspect": 16 / 9}],
        "crop": None,
    }
    (tmp_path / "path.json").write_text(json.dumps(document))
    path = read_camera_path(tmp_path / "path.json")
    assert path.cameras.positions.tolist() == [[0.5, 0.0, 4.0]] and path.cameras.size.tolist() == [[160, 90]]
    assert path.cameras.focal[0].tolist() == pytest.approx([45.0 / math.tan(math.radians(30.0))] * 2)
    middle = path.cameras.rays(torch.tensor([0]), torch.tensor([80.0]), torch.tensor([45.0])).directions
    assert middle[0].tolist() == pytest.approx([0.0, 0.0, -1.0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"camera_type": "equirectangular"}, "camera_type: expected perspective"),
        ({"render_width": 0}, "render_width: expected a whole number"),
        ({"camera_path": []}, "camera_path: expected a list"),
        ({"camera_path": [{"camera_to_world": [1, 2], "fov": 50}]}, r"camera_path\[0\]: camera_to_world"),
        ({"camera_path": [{"camera_to_world": [0.0] * 16, "fov": 50}]}, "a rotation"),
        ({"camera_path": [{"camera_to_world": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0], "fov": 200}]}, "fov: expected deg"),
        ({"crop": {"crop_center": [0, 0, 0], "crop_scale": [1, 1]}}, "crop_scale: expected three numbers"),
        ({"crop": {"crop_center": [0, 0, 0], "crop_scale": [1, 1, 1], "crop_rot": [0, 0, 0.5]}}, "--crop"),
        ({"fps": -1}, "fps"),
    ],
)
def test_faults_name_their_place(tmp_path: Path, change: dict, says: str) -> None:
    file = tmp_path / "a.json"
    write_camera_path(file, CameraPath(ball_scene().cameras))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=says) as error:
        read_camera_path(file)
    assert str(file) in str(error.value)


def test_rotations_and_quaternions_are_inverse_even_at_half_turns() -> None:
    matrices = torch.linalg.qr(torch.randn(50, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[
        0
    ]
    matrices = matrices * torch.linalg.det(matrices).sign()[:, None, None]
    half = torch.diag_embed(torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0], [1.0, 1.0, 1.0]]))
    for given in (matrices, half.double()):
        assert torch.allclose(rotations(quaternions(given)), given, atol=1e-9)


def test_a_flight_passes_through_its_keys_at_an_even_pace() -> None:
    keys = ball_scene(n_views=6).cameras.camera_to_world
    flight = interpolate_poses(keys, 51, 3.0)
    assert torch.allclose(flight[0], keys[0], atol=1e-5) and torch.allclose(flight[-1], keys[-1], atol=1e-5)
    assert torch.allclose(flight[10], keys[1], atol=1e-4)  # six keys at even distances
    gaps = pose_distances(flight[1:], flight[:-1], 3.0)
    assert float(gaps.max() / gaps.min()) < 1.6
    eye = torch.eye(3)
    assert torch.allclose(flight[:, :, :3].transpose(1, 2) @ flight[:, :, :3], eye.expand(51, 3, 3), atol=1e-5)


def test_shuffled_cameras_are_visited_in_a_walk() -> None:
    cameras = ball_scene(n_views=12).cameras
    shuffled = cameras[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    steps = pose_distances(
        interpolated_path(shuffled, 60).camera_to_world[1:], interpolated_path(shuffled, 60).camera_to_world[:-1], 3.0
    )
    ordered = interpolated_path(cameras, 60).camera_to_world
    assert float(steps.sum()) < 1.7 * float(pose_distances(ordered[1:], ordered[:-1], 3.0).sum())
    with pytest.raises(InputError, match="at least 2"):
        interpolated_path(cameras[0], 5)


def test_a_spiral_rises_about_an_object_and_sways_before_a_wall() -> None:
    heights = torch.tensor([0.5, 1.0, 2.0, 3.0])
    angles = torch.arange(4) * 1.5
    eyes = torch.stack([3 * angles.cos(), 3 * angles.sin(), heights], dim=-1)
    around = Cameras.pinhole(look_at(eyes, torch.zeros(3)), width=8, height=8, field_of_view_x=0.8)
    path = spiral_path(around, (0.0, 0.0, 0.0), 40)
    assert bool((path.positions[1:, 2] > path.positions[:-1, 2]).all())
    assert torch.allclose(-path.positions / path.positions.norm(dim=-1, keepdim=True), path.forward, atol=1e-5)

    wall = torch.tensor([[x, -4.0, z] for x in (-0.5, 0.0, 0.5) for z in (-0.3, 0.3)])
    facing = Cameras.pinhole(
        look_at(wall, wall + torch.tensor([0.0, 1.0, 0.0])), width=8, height=8, field_of_view_x=0.8
    )
    path = spiral_path(facing, (0.0, 0.0, 0.0), 30)
    assert float((path.positions - wall.mean(0)).norm(dim=-1).max()) < 0.6
    assert float(path.forward[:, 1].min()) > 0.95
