"""Blender folders: real data, the way back, and every bad file by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.data.formats.transforms import load_blender, write_blender
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from .test_scene import make_scene


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_blender([make_scene(3), make_scene(2, split="test")], tmp_path / "scene")


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "transforms_train.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_real_lego(scene_dir: Callable[[str], Path]) -> None:
    scene = load_scene(scene_dir("blender/lego"), "test", downscale=8)
    assert scene.name == "lego" and scene.has_alpha and scene.images.channels == 4
    assert len(scene) >= 10 and (scene.images.sizes == 100).all()
    assert torch.allclose(scene.cameras.focal, torch.tensor(50.0 / math.tan(0.5 * 0.6911112)), rtol=1e-5)
    distances = scene.cameras.positions.norm(dim=-1)
    assert ((distances > 3.9) & (distances < 4.2)).all()
    towards = -(scene.cameras.forward * scene.cameras.positions).sum(-1) / distances
    assert (towards > 0.99).all()  # every camera looks at the middle
    coverage = torch.stack([scene.images.image(i)[..., 3].mean() for i in range(len(scene))])
    assert ((coverage > 0.1) & (coverage < 0.6)).all()


def test_lego_stands_in_the_box(scene_dir: Callable[[str], Path]) -> None:
    """The visible pixels' rays all meet the box: poses, pixel order and axes fit together."""
    from nerfturbo.ops.positions import ray_aabb

    scene = load_scene(scene_dir("blender/lego"), "test", downscale=8)
    for index in (0, len(scene) // 2):
        rays = scene.cameras.image_rays(index)
        visible = scene.images.image(index)[..., 3].reshape(-1) > 0.5
        t_near, t_far = ray_aabb(rays.origins, rays.directions, scene.aabb)
        assert (t_far > t_near)[visible].all()
        assert float(t_far[visible].max()) <= scene.far


@pytest.mark.parametrize("channels", [3, 4])
def test_write_and_read_back(tmp_path: Path, channels: int) -> None:
    scenes = [make_scene(4, channels=channels), make_scene(2, channels=channels, split="test")]
    folder = write_blender(scenes, tmp_path / "deep" / "scene")
    for scene in scenes:
        again = load_scene(folder, scene.split)  # type: ignore[arg-type]
        assert torch.equal(again.images.pixels, scene.images.pixels)
        assert torch.equal(again.cameras.camera_to_world, scene.cameras.camera_to_world)
        assert torch.allclose(again.cameras.focal, scene.cameras.focal, rtol=1e-6)
        assert torch.equal(again.cameras.center, scene.cameras.center)
        assert again.aabb == scene.aabb and again.has_alpha == (channels == 4)
        assert again.to_original is not None and torch.equal(again.to_original, torch.eye(4, dtype=torch.float64))
    assert [path.name for path in folder.parent.iterdir()] == ["scene"]  # nothing half-written beside it


def test_times_go_both_ways(tmp_path: Path) -> None:
    scene = make_scene(3)
    scene = replace(scene, cameras=replace(scene.cameras, times=torch.tensor([0.0, 0.25, 1.0])))
    again = load_blender(write_blender([scene], tmp_path / "scene"))
    assert again.cameras.times is not None and again.cameras.times.tolist() == [0.0, 0.25, 1.0]


def test_times_in_another_unit_become_those_of_all_splits(tmp_path: Path) -> None:
    train, test = make_scene(3), replace(make_scene(2), split="test")
    train = replace(train, cameras=replace(train.cameras, times=torch.tensor([0.0, 0.5, 1.0])))
    test = replace(test, cameras=replace(test.cameras, times=torch.tensor([2.0, 10.0])))
    folder = write_blender([train, test], tmp_path / "scene")
    scenes = [load_blender(folder, "train"), load_blender(folder, "test")]
    times = [scene.cameras.times.tolist() for scene in scenes if scene.cameras.times is not None]
    assert times == [pytest.approx([0.0, 0.05, 0.1]), pytest.approx([0.2, 1.0])]
    assert all("times from 0 to 10 are told as 0 to 1" in scene.notes for scene in scenes)


def test_a_time_is_in_every_frame_or_in_none(folder: Path) -> None:
    edit(folder, _frame("time", 0.5))
    with pytest.raises(InputError, match="a time in every frame or in none, got 1 of 5"):
        load_scene(folder)


def test_file_names_with_extension_and_backslashes(folder: Path) -> None:
    before = load_blender(folder)
    edit(folder, lambda d: [f.update(file_path=f["file_path"].replace("/", "\\") + ".png") for f in d["frames"]])
    assert torch.equal(load_blender(folder).images.pixels, before.images.pixels)


def test_scale_in_a_pose_is_divided_out(folder: Path) -> None:
    before = load_blender(folder)

    def scale(document: dict) -> None:
        for frame in document["frames"]:
            for row in frame["transform_matrix"][:3]:
                row[:3] = [2.5 * value for value in row[:3]]

    edit(folder, scale)
    assert torch.allclose(load_blender(folder).cameras.camera_to_world, before.cameras.camera_to_world, atol=1e-6)


def _set(key: str, value: object) -> Callable[[dict], object]:
    return lambda document: document.update({key: value})


def _frame(key: str, value: object) -> Callable[[dict], object]:
    return lambda document: document["frames"][1].update({key: value})


def _entry(value: object) -> Callable[[dict], object]:
    return lambda document: document["frames"][1]["transform_matrix"][0].__setitem__(0, value)


ZEROS = [[0.0] * 4] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_entry(float("nan")), "frame 1: transform_matrix: expected a finite number, got nan"),
        (_entry("1.0"), "frame 1: transform_matrix: expected a finite number"),
        (_entry(None), "frame 1: transform_matrix"),
        (_frame("transform_matrix", ZEROS), "frame 1: transform_matrix: expected a rotation"),
        (_frame("transform_matrix", [[1, 2], [3, 4]]), "frame 1: transform_matrix: expected a 4x4 matrix"),
        (_frame("transform_matrix", None), "frame 1: transform_matrix: expected a 4x4 matrix, got nothing"),
        (_entry(10**400), "frame 1: transform_matrix: expected a finite number"),
        (_entry(True), "frame 1: transform_matrix: expected a finite number, got True"),
        (_frame("file_path", "x" * 5000), "frame 1: file_path"),
        (_frame("file_path", 3), "frame 1: file_path: expected a path"),
        (_frame("file_path", ""), "frame 1: file_path"),
        (_frame("file_path", "a\0b"), "frame 1: file_path"),
        (_frame("file_path", "../outside"), "inside the scene's folder"),
        (_frame("file_path", "train/../../outside"), "inside the scene's folder"),
        (_frame("file_path", "/etc/passwd"), "inside the scene's folder"),
        (_frame("file_path", "C:\\windows\\a.png"), "inside the scene's folder"),
        (_set("camera_angle_x", 0.0), "camera_angle_x: expected an angle"),
        (_set("camera_angle_x", 4.0), "camera_angle_x"),
        (_set("camera_angle_x", None), "frame 0: expected fl_x or camera_angle_x, .* got neither"),
        (_set("camera_angle_x", float("inf")), "camera_angle_x"),
        (_set("frames", []), "frames: expected a list of at least one frame, got none"),
        (_set("frames", {"a": 1}), "frames: expected a list"),
        (_set("frames", [1, 2]), "frame 0"),
    ],
)
def test_bad_documents_are_named(folder: Path, change: Callable[[dict], object], words: str) -> None:
    edit(folder, change)
    with pytest.raises(InputError, match=words) as caught:
        load_scene(folder)
    assert "transforms_train.json" in str(caught.value)
    str(caught.value).encode()  # whatever the file holds, the message can be printed


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b"[" * 100_000, b'"text"'])
def test_bad_json_is_named(folder: Path, content: bytes) -> None:
    (folder / "transforms_train.json").write_bytes(content)
    with pytest.raises(InputError, match=r"transforms_train\.json: expected (valid JSON|a JSON object)"):
        load_scene(folder)


def test_missing_split_says_what_is_there(folder: Path) -> None:
    with pytest.raises(InputError, match=r"found here: transforms_test\.json, transforms_train\.json"):
        load_scene(folder, "val")


def test_broken_picture_is_named(folder: Path) -> None:
    (folder / "train" / "r_1.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(InputError, match=r"r_1\.png: expected an image that decodes"):
        load_scene(folder)


def test_writing_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    scene = make_scene(3)
    shifted = replace(scene, cameras=replace(scene.cameras, center=scene.cameras.center + 1.0))
    with pytest.raises(InputError, match="centred pinhole"):
        write_blender([shifted], tmp_path / "scene")
    with pytest.raises(InputError, match="one scene per split"):
        write_blender([scene, scene], tmp_path / "scene")
    with pytest.raises(InputError, match="one scene per split"):
        write_blender([], tmp_path / "scene")
    assert not any(tmp_path.iterdir())


def test_writing_never_overwrites(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match="a new or empty folder"):
        write_blender([make_scene(3)], folder)
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(InputError, match="a new or empty folder"):
        write_blender([make_scene(3)], folder / "transforms_train.json")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "scene").mkdir()
    assert len(load_blender(write_blender([make_scene(3)], tmp_path / "scene"))) == 3


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="a place that can be written"):
        write_blender([make_scene(3)], tmp_path / "file" / "scene")


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        write_blender([make_scene(3)], tmp_path / "scene")
    assert not any(tmp_path.iterdir())
