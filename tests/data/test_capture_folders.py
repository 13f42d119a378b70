"""Folders as programs and people leave them: the right files are taken, and what is not known is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
    with pytest.raises(InputError, match="expected images with poses"):
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


def first_view(scene: Scene) -> tuple[int, torch.Tensor]:
    """The number of the first view in the ring, and where it stands in the file's coordinates."""
    assert scene.to_original is not None
    there = scene.to_original[:3, :3] @ scene.cameras.positions[0].double() + scene.to_original[:3, 3]
    return round(int(scene.images.image_bytes(0)[0, 0, 0]) / 12), there


def assert_placed(folder: Path, place: np.ndarray = exporters.RING.positions) -> Scene:
    scene = load_scene(folder)
    number, there = first_view(scene)
    assert torch.allclose(there, torch.from_numpy(place[number]), atol=1e-4)
    return scene


def test_images_of_neus_may_be_numbered_from_one(tmp_path: Path) -> None:
    folder = exporters.write_neus(tmp_path / "scene")
    for place in ("image", "mask"):
        for file in sorted((folder / place).iterdir(), reverse=True):
            file.rename(file.with_name(f"{int(file.stem) + 1:03d}.png"))
    assert assert_placed(folder).images.mask is not None


def test_metashapes_largest_chunk_its_place_and_its_labels(tmp_path: Path) -> None:
    folder = exporters.write_metashape(tmp_path / "scene", place="chunk")
    text = (folder / "cameras.xml").read_text().replace('sensor_id="3"', 'sensor_id="3" component_id="0"')
    text = text.replace("</sensors>", '</sensors><components><component id="0"/></components>')  # without a place
    small = '<chunk id="0" label="old"><sensors/><components/><cameras/></chunk>'
    (folder / "cameras.xml").unlink()
    (folder / "my export.XML").write_text(text.replace('<chunk label="c"', f'{small}<chunk id="0" label="c"'))
    moved(folder, ("images", "DCIM/100"))
    assert any("the largest of 2 chunks" in note for note in assert_placed(folder).notes)
    (folder / "DCIM" / "101").mkdir()
    for file in (folder / "DCIM" / "100").iterdir():
        shutil.copy(file, folder / "DCIM" / "101")  # which of the two is meant is not known
    with pytest.raises(InputError, match=r"my export\.XML: frame1: file_path: expected the path of an image"):
        load_scene(folder)


def test_letters_that_macos_takes_apart_are_the_same(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    file = folder / "transforms.json"
    file.write_text(file.read_text().replace("view_", "B\u00e4ume_"))
    for path in (folder / "images").iterdir():
        path.rename(path.with_name(path.name.replace("view_", "Ba\u0308ume_")))
    assert len(load_scene(folder)) == 14


def test_metashapes_and_realitycaptures_k4_is_refused_everywhere(tmp_path: Path) -> None:
    folder = exporters.write_metashape(tmp_path / "metashape", k4=0.1)
    with pytest.raises(InputError, match=r"cameras\.xml: frame1: k4: expected 0"):
        load_scene(folder)
    folder = exporters.write_rc_csv(tmp_path / "rc")
    text = (folder / "export.csv").read_text()
    (folder / "export.csv").write_text(text.replace(",0,0.003", ",0.1,0.003"))
    with pytest.raises(InputError, match=r"export\.csv: frame1\.jpg: k4: expected 0"):
        load_scene(folder)
    with pytest.raises(InputError, match=r"transforms\.json: k4: expected 0: no lens here has it, got 0\.1"):
        load_scene(folders.write_transforms(tmp_path / "top", camera_model="OPENCV", k4=0.1))
    for lens in ({"camera_model": "FULL_OPENCV"}, {"camera_model": "OPENCV_FISHEYE"}, {"k5": 0.2, "k6": 0.1}):
        load_scene(folders.write_transforms(tmp_path / str(len(list(tmp_path.iterdir()))), k4=0.1, **lens))


WRONG = {
    "opensfm": (exporters.write_opensfm, "reconstruction.json", "[]", "expected at least one reconstruction, got none"),
    "nsvf": (exporters.write_nsvf, "intrinsics.txt", "90.0", "expected a focal length and principal point.* got 90.0"),
    "column": (exporters.write_rc_csv, "export.csv", (",f,", ",focal,"), "got no 'f'"),
    "cell": (exporters.write_rc_csv, "export.csv", ("frame3.jpg,", "frame3.jpg,1,"), "frame3.jpg: expected 16 columns"),
    "xml": (exporters.write_metashape, "cameras.xml", ("<chunk ", "<chunks><chunk "), "cameras.xml: expected what"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_speak_of_files_not_of_python(tmp_path: Path, name: str) -> None:
    write, file, change, said = WRONG[name]
    path = write(tmp_path / "scene") / file
    path.write_text(change if isinstance(change, str) else path.read_text().replace(*change))
    with pytest.raises(InputError, match=said) as caught:
        load_scene(path.parent)
    assert file in str(caught.value)
    assert not re.search(r"\(\)|Error|StopIteration", str(caught.value))


def test_a_ply_file_that_is_none_is_told(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene", ply_file_path="cloud.ply")
    (folder / "cloud.ply").write_text("hello")
    with pytest.raises(InputError, match=r"cloud\.ply: expected a PLY file, got 'hello'"):
        load_scene(folder)


def test_photos_are_told_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    folders.write_pictures(photos)
    (photos / "view_03.png").write_bytes(b"")
    assert main(["scene", "info", str(photos)]) == 0
    assert "16 photos (1 damaged), 24 x 16" in capsys.readouterr().out
    (tmp_path / "one").mkdir()
    shutil.copy(photos / "view_00.png", tmp_path / "one")
    (tmp_path / "film").mkdir()
    (tmp_path / "film" / "a.mp4").write_bytes(b"film")
    scene = exporters.write_record3d(tmp_path / "above" / "EXR_RGBD")
    cases = {tmp_path / "one": "at least 2 photos, to find their poses, got one"}
    cases |= {tmp_path / "film": f"got the video a.mp4; name the file itself: {tmp_path / 'film' / 'a.mp4'}"}
    cases |= {tmp_path / "above": f"got one in EXR_RGBD; name that folder: {scene}"}
    cases |= {scene / "metadata.json": f"got a file; name its folder: {scene}"}
    for folder, said in cases.items():
        assert main(["scene", "info", str(folder)]) == 2
        assert said in capsys.readouterr().err


def test_notes_say_what_is_true(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    file = folder / "transforms.json"
    document = json.loads(file.read_text())
    for path in (folder / "images").iterdir():
        path.rename(path.with_name(path.name.replace("view_", "take1.5_")))
    for frame in document["frames"]:
        frame["file_path"] = frame["file_path"].replace("view_", "TAKE1.5_").removesuffix(".png")
    document["frames"][3]["file_path"] = document["frames"][4]["file_path"]
    file.write_text(json.dumps(document))
    notes = " | ".join(load_scene(folder).notes)
    assert "found by the end of the path" not in notes
    assert "warning: transforms.json: two poses of 1 image, as take1.5_04.png" in notes
    assert "warning: 1 of 16 images have no pose and are left out, as take1.5_03.png" in notes
