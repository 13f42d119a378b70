"""The panels without a browser: crops, occupied cells, several people, and a camera path from views to a video."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nerfturbo.errors import CheckpointError
from nerfturbo.evaluation.camera_path import read_camera_path
from nerfturbo.evaluation.evaluate import truth_image
from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.export.video import video_writer
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb
from nerfturbo.viewer.page import LivePage
from nerfturbo.viewer.painter import Painter
from nerfturbo.viewer.panel import Client, SceneFacts

from ..tiny import ball_scene, tiny_config
from .looker import Looker, until


@pytest.fixture
def open_page(tmp_path: Path) -> Iterator[Callable[[], LivePage]]:
    train, test, opened = ball_scene(), ball_scene("test", n_views=2), []

    def open_one() -> LivePage:
        video = {"video": lambda file, fps: video_writer(file, fps=fps), "suffix": ".gif"}
        opened.append(LivePage(SceneFacts("ball", train, test, train.aabb, RunFolder(tmp_path), True, **video)))
        return opened[-1]

    yield open_one
    for page in opened:
        page.close()


@pytest.fixture
def page(open_page: Callable[[], LivePage]) -> LivePage:
    return open_page()


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return NerfModel(tiny_config(), SceneBounds.of(ball_scene()))


def camera(x: float, angle: float) -> SimpleNamespace:
    """It looks down, along -z."""
    return SimpleNamespace(wxyz=np.array([0.0, 1.0, 0.0, 0.0]), position=np.array([x, 0.0, 3.0]), fov=angle)


def tick_until(page: LivePage, model: NerfModel, condition: Callable[[], bool], what: str) -> None:
    def ticked() -> bool:
        page.tick(model, 0, training=False)
        return condition()

    with use_backend("reference"):
        until(ticked, what)


def test_a_path_of_views_is_saved_under_a_plain_name_only(page: LivePage, tmp_path: Path) -> None:
    editor, file = page._editor, tmp_path / "camera_paths" / "turn.json"
    assert editor._height.value == 480  # though the images have fewer
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
    editor._name.value, editor._frames.value, editor._height.value = "turn", 7, 32
    editor._save()
    assert f"nerfturbo render {tmp_path} --path {file}" in editor._said.content
    path = read_camera_path(file)
    assert len(path.cameras) == 7 and path.cameras.positions[-1, 0] == pytest.approx(1.0, abs=1e-5)
    assert path.cameras.size[0].tolist() == [32, 32] and path.crop is None
    fov = 2.0 * torch.atan(0.5 * path.cameras.size[0, 1] / path.cameras.focal[0, 1])
    assert float(fov) == pytest.approx(0.7, abs=1e-5)  # the mean of the views'


def test_a_path_becomes_a_video_and_a_stopped_one_leaves_nothing(
    page: LivePage, model: NerfModel, tmp_path: Path
) -> None:
    from PIL import Image

    editor, file = page._editor, tmp_path / "camera_paths" / "path.gif"
    looker = Looker(page)
    looker.client.quality.value = 24
    editor._begin(looker.number)
    assert "two views" in editor._said.content and not editor.advance(model, 0)
    for one in (camera(-0.5, 0.7), camera(0.5, 0.7)):
        editor._add(one)
    editor._frames.value, editor._height.value = 3, 20
    editor._begin(looker.number)
    assert editor._render.label == "Stop the video"
    tick_until(page, model, lambda: editor._said.content == "frame 1 of 3", "a frame")
    editor._begin(looker.number)
    tick_until(page, model, lambda: "stopped" in editor._said.content, "the end")
    assert list(file.parent.iterdir()) == []
    received = looker.n_received
    editor._begin(looker.number)
    tick_until(page, model, lambda: "wrote" in editor._said.content, "the video")
    with Image.open(file) as video:
        assert (video.n_frames, video.size) == (3, (20, 20))
    assert editor._render.label == "Render the video" and not editor.advance(model, 0)
    until(lambda: looker.n_received > received + file.stat().st_size, "the video to be sent to who asked for it")
    looker.close()


def test_a_page_closes_while_a_frame_is_rendered(
    page: LivePage, model: NerfModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor, looker, render = page._editor, Looker(page), Painter.render
    for one in (camera(-0.5, 0.7), camera(0.5, 0.7)):
        editor._add(one)
    editor._height.value = 20
    editor._begin(looker.number)
    monkeypatch.setattr(Painter, "render", lambda *args: (page._editor.close(), render(*args))[1])
    assert editor.advance(model, 0) and "frame 1" in editor._said.content
    looker.close()


def test_what_stands_in_the_way_of_a_video_is_said(page: LivePage, tmp_path: Path) -> None:
    editor = page._editor
    for one in (camera(-0.5, 0.7), camera(0.5, 0.7)):
        editor._add(one)
    (tmp_path / "camera_paths").write_text("a file, where a folder should be")
    looker = Looker(page)
    editor._begin(looker.number)
    looker.close()
    assert "no video" in editor._said.content and editor._film is None
    editor._save()
    assert "could not be saved" in editor._said.content


def test_each_person_has_a_camera_and_a_picture(page: LivePage, model: NerfModel) -> None:
    first, second = Looker(page, (3.0, 0.0, 2.0)), Looker(page, (0.0, 3.0, 2.0))
    first.set(first.client.channel, "depth")
    first.set(first.client.quality, 128)
    until(lambda: first.client.view.channel == "depth" and first.client.quality.value == 128, "the controls")
    second.look_from((0.0, -3.0, 1.0))
    until(lambda: float(second.client.view.camera_to_world[1, 3]) == -3.0, "the second camera")
    assert second.client.view.channel == "color" and second.client.quality.value == 640
    assert float(first.client.view.camera_to_world[0, 3]) == 3.0
    first.client.quality.value, second.client.quality.value = 24, 32  # soon painted
    done = [lambda one=one: not one.client.painter.wants(0) for one in (first, second)]
    tick_until(page, model, lambda: all(is_done() for is_done in done), "both pictures")
    assert [one.client.painter.largest for one in (first, second)] == [24, 32]
    page.panel._crop_on.value = True
    page.panel._crop_changed()
    assert all(one.client.view.crop == page.panel.facts.box for one in (first, second))  # the crop is everyone's
    first.close()
    until(lambda: list(page._clients) == [second.number], "the first to be gone")
    second.close()


def test_quick_ticks_leave_no_frusta_behind(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    looker, seen = Looker(page), []

    def slow_image(*arguments) -> torch.Tensor:
        seen.append(arguments[1])
        time.sleep(0.02 if len(seen) > 4 else 0.2)  # the first tick takes longest
        return truth_image(*arguments)

    monkeypatch.setattr("nerfturbo.viewer.panel.truth_image", slow_image)
    client, n_views = looker.client, len(page.panel.facts.train)
    toggle, names = client.toggles["train"], [f"/cameras/train/{index}" for index in range(n_views)]
    for ticked in (True, False, True, False):
        looker.set(toggle, ticked)
        until(lambda value=ticked: toggle.value is value, "the tick")
    until(lambda: len(seen) >= n_views and not client._frusta, "the last tick")
    time.sleep(0.5)
    assert not client._frusta and all(client.handle.scene.get_handle_by_name(name) is None for name in names)
    looker.set(toggle, True)
    until(lambda: len(client._frusta.get("train", [])) == n_views, "all frusta")
    looker.close()


def test_who_leaves_at_once_is_not_listed(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow_client(handle, panel) -> Client:
        client = Client(handle, panel)
        until(lambda: handle.client_id not in page._server.get_clients(), "the client to leave")
        time.sleep(0.3)  # by now its leaving has been told
        made.append(client)
        return client

    monkeypatch.setattr("nerfturbo.viewer.page.Client", slow_client)
    looker = Looker(page, stays=False)
    until(lambda: len(page._server.get_clients()) == 1, "the server to know the client")
    looker.close()
    until(lambda: len(made) == 1, "the slow client")
    time.sleep(0.3)
    assert not page._clients


def test_a_saved_crop_comes_back_and_can_be_taken_away(
    page: LivePage, open_page: Callable[[], LivePage], tmp_path: Path
) -> None:
    panel, run = page.panel, RunFolder(tmp_path)
    panel._crop_on.value, panel._crop_sliders[2].value = True, (-0.5, 0.25)
    panel._keep_crop()
    box = Aabb((-1.5, -1.5, -0.5), (1.5, 1.5, 0.25))
    assert run.read_crop() == box and "take this box" in panel._crop_said.content
    again = open_page().panel
    assert again.crop() == box
    again._crop_on.value = False
    again._keep_crop()
    assert run.read_crop() is None and not run.crop_file.exists() and "whole scene" in again._crop_said.content
    for corner in ("[0, 0]", "[0, 0, -1" + "0" * 400 + "]", '["x", 0, 0]'):
        run.crop_file.write_text(f'{{"version": 1, "low": {corner}, "high": [1, 1, 1]}}')
        with pytest.raises(CheckpointError, match=r"crop.json: no box; save it again"):
            run.read_crop()
    run.crop_file.write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"crop.json"):
        run.read_crop()


def test_crops_cells_and_numbers(page: LivePage, model: NerfModel) -> None:
    panel, scene = page.panel, page._server.scene
    assert panel.crop() is None
    panel._crop_on.value = True
    for slider in panel._crop_sliders:
        slider.value = (0.25, -0.25)
    panel._crop_changed()
    assert panel.crop() == Aabb.cube(0.25) and scene.get_handle_by_name("/crop").visible
    panel._crop_sliders[1].value = (0.1, 0.1)
    panel._crop_changed()
    assert panel.crop() is None and not scene.get_handle_by_name("/crop").visible
    looker, other = Looker(page), Looker(page)
    looker.set(looker.client.cells_on, True)
    until(lambda: looker.client.cells_on.value, "the check mark")
    record = {"kind": "step", "step": 3, "seconds": 1.0, "psnr": 20.0, "loss": 0.01}
    page._renew(model, 5, [record | {"rays_per_second": 1e4, "occupied_fraction": 0.5}])
    assert "step 5, " in panel._status.content, "a checkpoint that is saved now has this number, not the log's last"
    assert "PSNR 20.00 dB" in panel._status.content and panel._curves["loss"].data[1].tolist() == [0.01]
    assert looker.client.handle.scene.get_handle_by_name("/cells") is not None
    assert other.client.handle.scene.get_handle_by_name("/cells") is None
    looker.set(looker.client.cells_on, False)
    until(lambda: looker.client.handle.scene.get_handle_by_name("/cells") is None, "no cells")
    looker.close()
    other.close()
