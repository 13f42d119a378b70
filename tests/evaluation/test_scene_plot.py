"""Drawings of scenes: what is drawn is where it should be, and files are whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.data.formats.colmap import ColmapPoints
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.scene_plot import HEIGHT, WIDTH, _frusta, _panels, plot_scene

from ..data import folders


def test_a_plot_shows_cameras_points_and_box(tmp_path: Path) -> None:
    folder = folders.write_colmap(tmp_path / "scene")
    scenes = [load_scene(folder, "train"), load_scene(folder, "test")]
    place, color = torch.full((1, 3), 0.3).double(), torch.tensor([[255, 0, 0]]).byte()
    red = ColmapPoints(place, color, torch.zeros(1).double(), torch.zeros(1, dtype=torch.int64))
    plot_scene(tmp_path / "with.png", scenes, red, "a scene")
    plot_scene(tmp_path / "without.png", scenes, None, "a scene")
    with Image.open(tmp_path / "with.png") as image:
        drawn = np.asarray(image.convert("RGB")).astype(int)
    bare = np.asarray(Image.open(tmp_path / "without.png").convert("RGB")).astype(int)
    assert drawn.shape == (HEIGHT, WIDTH, 3)
    for panel in _panels(scenes):
        x, y = panel.project(red.positions.numpy())[0][0]
        patch = drawn[int(y) - 3 : int(y) + 4, int(x) - 3 : int(x) + 4]
        assert (patch[..., 0] - patch[..., 1] > 60).any()
        left, top, right, bottom = panel.rectangle
        inner = bare[top:bottom, left:right]
        blue = (inner[..., 2] - inner[..., 0] > 90) & (inner[..., 2] - inner[..., 1] > 60)
        orange = (inner[..., 0] - inner[..., 2] > 90) & (inner[..., 0] - inner[..., 1] > 40)
        assert blue.sum() > 300 and orange.sum() > 20  # training and test cameras
    assert not list(tmp_path.glob(".*"))


def test_frusta_point_where_their_cameras_look(tmp_path: Path) -> None:
    scene = load_scene(folders.write_colmap(tmp_path / "scene"), "train")
    corners = _frusta(scene, 0.1)
    positions = scene.cameras.positions.numpy()
    middle = corners.mean(1) - positions
    cosines = (middle * scene.cameras.forward.numpy()).sum(-1) / np.linalg.norm(middle, axis=-1)
    assert (cosines > 0.999).all()
    up = scene.cameras.camera_to_world[:, :, 1].numpy()
    assert (((corners[:, 0] - corners[:, 3]) * up).sum(-1) > 0.0).all()  # the first two corners are the upper ones


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    scene = load_scene(folders.write_colmap(tmp_path / "scene"))
    for path in (tmp_path / "a.jpg", tmp_path / "missing" / "a.png"):
        with pytest.raises(InputError, match="--plot"):
            plot_scene(path, [scene], None, "a scene")
