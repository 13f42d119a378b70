"""Folders as programs and people leave them: the right files are taken, and what is not known is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nerfturbo.cli.main import main
from nerfturbo.data.cameras import look_at
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Decision, Scene, load_scene
from nerfturbo.errors import InputError

from . import captures, exporters, folders

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


def decision(scene: Scene, what: str) -> Decision:
    return next(note for note in scene.notes if isinstance(note, Decision) and note.what == what)


@pytest.mark.parametrize(
    ("write", "why"),
    [(exporters.write_nsvf, "the box of bbox.txt"), (exporters.write_neus, "the unit sphere of scale_mat_0")],
)
def test_boxes_of_files_are_told_as_theirs(
    tmp_path: Path, write: Callable[[Path], Path], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "scene")
    scene = load_scene(folder)
    assert decision(scene, "bounds").why == f"{why}; one box of {scene.aabb.size[0]:.3g}"
    assert main(["scene", "info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(one["why"].startswith(why) for one in found["decisions"]) and "as asked" not in str(found)
    assert "as asked" in decision(load_scene(folder, options=LoadOptions(bounds="unbounded")), "bounds")


def test_what_can_be_seen_through_is_bounded_whatever_aabb_scale_says(tmp_path: Path) -> None:
    scene = load_scene(folders.write_transforms(tmp_path / "alpha", "RGBA", aabb_scale=16))
    assert scene.grid_levels == 1 and "can be seen through" in decision(scene, "bounds")
    scene = load_scene(tmp_path / "alpha", options=LoadOptions(bounds="unbounded"))
    assert scene.grid_levels == 5 and "aabb_scale 16" in decision(scene, "bounds")
    assert load_scene(folders.write_transforms(tmp_path / "rgb", aabb_scale=16)).grid_levels == 5


def straight_down() -> torch.Tensor:
    """(24, 3, 4): a flight in lanes, every second one in the other direction."""
    grid = [(x / 2.5 - 1.0, y / 1.5 - 1.0, x % 2 == 1) for x in range(6) for y in range(4)]
    eyes = torch.tensor([[x, y, 3.0 + 0.1 * x * y] for x, y, _ in grid], dtype=torch.float64)
    poses = look_at(eyes, eyes + torch.tensor([0.02, 0.05, -3.0]), torch.tensor([0.0, 1.0, 0.0]).double())
    flip = torch.tensor([-1.0 if back else 1.0 for _, _, back in grid], dtype=torch.float64)
    poses[:, :, :2] *= flip[:, None, None]
    return poses


def test_flights_that_look_straight_down_are_not_on_their_side(tmp_path: Path) -> None:
    scene = load_scene(captures.write_transforms(tmp_path / "flight", straight_down()))
    assert scene.to_original is not None
    up = scene.to_original[:3, 2] / scene.to_original[:3, 2].norm()
    assert float(up[2]) > 0.99 and "down" in decision(scene, "up")
    folder = exporters.write_opensfm(tmp_path / "opensfm")
    file = folder / "reconstruction.json"
    document = json.loads(file.read_text())
    document[1]["reference_lla"] = {"latitude": 48.1, "longitude": 11.5, "altitude": 0.0}
    file.write_text(json.dumps(document))
    for scene in (load_scene(folder), load_scene(exporters.write_rc_csv(tmp_path / "rc"))):
        assert "up is 0.00 0.00 1.00 of the file: " in decision(scene, "up") and "altitude" in decision(scene, "up")
    scene = load_scene(tmp_path / "rc", options=LoadOptions(up="-y"))
    assert "up is 0.00 -1.00 0.00 of the file: as asked" in decision(scene, "up")
