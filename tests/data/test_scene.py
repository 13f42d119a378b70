"""Scenes: what is recognised, what is refused and how, holding out views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import BUILTIN_SCENES
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.images import ImagePool
from nerfturbo.data.scene import Scene, farthest_distance, hold_out, load_scene
from nerfturbo.errors import InputError
from nerfturbo.types import Aabb


def make_scene(n: int = 7, *, channels: int = 4, split: str = "train") -> Scene:
    """Tiny pictures, each of one colour that tells which one it is."""
    k = torch.arange(n, dtype=torch.float32)
    eyes = 4.0 * torch.stack([k.cos() * 0.9, k.sin() * 0.9, torch.full_like(k, 0.436)], -1)
    pictures = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 6, 8, channels).contiguous()
    cameras = Cameras.pinhole(look_at(eyes, torch.zeros(3)), width=8, height=6, field_of_view_x=0.7)
    return Scene(
        name="tiny",
        cameras=cameras,
        images=ImagePool.from_images(pictures),
        aabb=Aabb.cube(1.5),
        near=0.0,
        far=7.0,
        split=split,
        source="memory",
    )


def test_holding_out_splits_views_and_pictures_together() -> None:
    scene = make_scene(7)
    kept, held = hold_out(scene, 3)
    assert len(kept) == 4 and len(held) == 3
    assert [int(held.images.image_bytes(i)[0, 0, 0]) for i in range(3)] == [0, 3, 6]
    assert torch.equal(held.cameras.camera_to_world, scene.cameras.camera_to_world[::3])
    assert [int(kept.images.image_bytes(i)[0, 0, 0]) for i in range(4)] == [1, 2, 4, 5]
    for bad in (0, 1, -2):
        with pytest.raises(InputError, match="every"):
            hold_out(scene, bad)


def test_farthest_distance_is_to_the_far_corner() -> None:
    assert farthest_distance(torch.tensor([[0.0, 0.0, 0.0]]), Aabb.cube(1.0)) == pytest.approx(3**0.5)
    assert farthest_distance(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), Aabb.cube(1.0)) == pytest.approx(18**0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cameras": make_scene(6).cameras}, "images: expected 6"),
        ({"near": 2.0, "far": 1.0}, "near"),
        ({"near": float("nan")}, "near"),
        ({"far": float("inf")}, "near"),
        ({"cameras": make_scene(7).cameras.scaled(2.0)}, "sizes"),
    ],
)
def test_scenes_that_do_not_fit_together(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(make_scene(7), **change)


def test_missing_folder_names_the_built_in_scenes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder") as caught:
        load_scene(tmp_path / "nowhere")
    assert all(name in str(caught.value) for name in BUILTIN_SCENES)


def test_empty_folder_file_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an empty folder"):
        load_scene(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"looked for Blender: transforms_train\.json"):
        load_scene(tmp_path)
    with pytest.raises(InputError, match="got a file"):
        load_scene(tmp_path / "notes.txt")


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="split"):
        load_scene("toybox", "training")  # type: ignore[arg-type]
    for downscale in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="downscale"):
            load_scene("toybox", downscale=downscale)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="built-in scenes"):
        load_scene("builtin:nothing")


def test_a_folder_wins_over_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toybox").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="an empty folder"):
        load_scene("toybox")
