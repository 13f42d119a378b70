"""Folders as programs and people leave them: the right files are taken, and what is not known is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from . import folders

BENT = [folders.FOCAL, folders.WIDTH / 2, folders.HEIGHT / 2, -0.2]  # of SIMPLE_RADIAL


def moved(folder: Path, *ways: tuple[str, str]) -> Path:
    for old, new in ways:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / old, folder / new)
    return folder


def test_undistorted_images_belong_to_the_model_beside_them(tmp_path: Path) -> None:
    folder = moved(folders.write_colmap(tmp_path / "scene"), ("images", "dense/images"), ("sparse/0", "dense/sparse"))
    assert load_scene(folder).cameras.model == "pinhole"  # dense/ alone
    folders.write_colmap(tmp_path / "bent", model=2, parameters=BENT)
    shutil.rmtree(folder / "sparse")
    shutil.move(tmp_path / "bent" / "sparse", folder / "sparse")
    scene = load_scene(folder)
    assert scene.cameras.model == "pinhole" and all("dense/images" in file for file in scene.files)
    shutil.move(tmp_path / "bent" / "images", folder / "input")  # the photos as they were, but their model comes second
    assert all("dense/images" in file for file in load_scene(folder).files)


@pytest.mark.parametrize("place", ["distorted/sparse/0", "colmap_text", "colmap/0"])
def test_models_are_found_where_other_programs_leave_them(tmp_path: Path, place: str) -> None:
    folder = moved(folders.write_colmap(tmp_path / "scene", text="text" in place), ("sparse/0", place))
    moved(folder, ("images", "input"))
    if place.startswith("distorted"):
        folders.write_pictures(folder / "images")  # undistorted, without their model
    scene = load_scene(folder)
    assert any(f"{place}/*" in note for note in scene.notes) and all("/input/" in file for file in scene.files)


@pytest.mark.parametrize("place", ["model", "sparse/geo", "a/b/c"])
def test_models_elsewhere_are_named(tmp_path: Path, place: str) -> None:
    folder = moved(folders.write_colmap(tmp_path / "scene"), ("sparse/0", place))
    with pytest.raises(InputError, match=rf"{place}: expected COLMAP's model in .*sparse/0, got one elsewhere"):
        load_scene(folder)
    made = folder / place.split("/")[0] / "process.json"
    made.write_text("{}")  # what `nerfturbo process` left in a folder of photos
    with pytest.raises(InputError, match="expected pictures with poses"):
        load_scene(folder)


def test_the_larger_of_a_model_and_the_one_above_it_is_taken(tmp_path: Path) -> None:
    folder = folders.write_colmap(tmp_path / "scene", text=True)
    for file in list((folder / "sparse" / "0").iterdir()):
        shutil.copy(file, folder / "sparse")
    images = folder / "sparse" / "0" / "images.txt"
    lines = images.read_text().splitlines()
    images.write_text("\n".join(["# Number of images: 4", *lines[1:9]]) + "\n")
    scene = load_scene(folder)
    assert len(scene) + len(load_scene(folder, "test").files) == folders.N_VIEWS
    assert any("the most; left out: sparse/0 (4)" in note for note in scene.notes)
