"""The panel's controls without a browser: crops, occupied cells, and a camera path from views to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nerfturbo.evaluation.camera_path import read_camera_path
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb
from nerfturbo.viewer.page import LivePage
from nerfturbo.viewer.panel import SceneFacts

from ..tiny import ball_scene, tiny_config


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LivePage]:
    train, test = ball_scene(), ball_scene("test", n_views=2)
    page = LivePage(SceneFacts("ball", train, test, train.aabb, tmp_path / "paths", True))
    yield page
    page.close()


def camera(x: float, angle: float) -> SimpleNamespace:
    return SimpleNamespace(wxyz=np.array([1.0, 0.0, 0.0, 0.0]), position=np.array([x, 0.0, 3.0]), fov=angle)


def test_a_path_of_views_is_saved_under_a_plain_name_only(page: LivePage, tmp_path: Path) -> None:
    editor, file = page._panel._editor, tmp_path / "paths" / "turn.json"
    editor._name.value = "turn"
    editor._add(camera(0.0, 0.8))
    editor._save()
    assert "two views" in editor._said.content and not file.exists()
    for one in (camera(np.nan, 0.6), camera(1.0, 0.6), camera(2.0, 0.1)):
        editor._add(one)
    editor._drop()
    assert editor._said.content == "2 views"
    editor._name.value = "../turn"
    editor._save()
    assert "letters" in editor._said.content and not file.exists()
    editor._name.value, editor._frames.value = "turn", 7
    editor._save()
    assert "nerfturbo render RUN --path" in editor._said.content
    path = read_camera_path(file)
    assert len(path.cameras) == 7 and path.cameras.positions[-1, 0] == pytest.approx(1.0, abs=1e-5)
    fov = 2.0 * torch.atan(0.5 * path.cameras.size[0, 1] / path.cameras.focal[0, 1])
    assert float(fov) == pytest.approx(0.7, abs=1e-5)  # the mean of the views'


def test_crops_cells_and_numbers(page: LivePage) -> None:
    panel, scene = page._panel, page._server.scene
    model = NerfModel(tiny_config(), SceneBounds.of(ball_scene()))
    assert panel.crop() is None
    panel._crop_on.value = True
    for slider in panel._crop_sliders:
        slider.value = (0.25, -0.25)
    panel._crop_changed()
    assert panel.crop() == Aabb.cube(0.25) and scene.get_handle_by_name("/crop").visible
    panel._crop_sliders[1].value = (0.1, 0.1)
    panel._crop_changed()
    assert panel.crop() is None and not scene.get_handle_by_name("/crop").visible
    panel._cells_on.value = True
    record = {"kind": "step", "step": 3, "seconds": 1.0, "psnr": 20.0, "loss": 0.01}
    panel.renew(model, 3, [record | {"rays_per_second": 1e4, "occupied_fraction": 0.5}])
    assert "PSNR 20.00 dB" in panel._status.content and panel._curves["loss"].data[1].tolist() == [0.01]
    assert scene.get_handle_by_name("/cells") is not None
    panel._cells_on.value = False
    assert scene.get_handle_by_name("/cells") is None
