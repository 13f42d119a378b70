"""Folders as they come out of zip files, phones, Windows and other people's scripts."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.data.images import decode_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from . import folders

NAME = "Küche mit Äpfeln — 苹果 (1) 'x' & $y"


@pytest.mark.parametrize("write", [folders.write_transforms, folders.write_colmap, folders.write_llff])
def test_names_with_spaces_and_letters_of_all_kinds(tmp_path: Path, write: object) -> None:
    folder = write(tmp_path / NAME)  # type: ignore[operator]
    assert len(load_scene(folder)) == 14
    assert len(load_scene(os.path.relpath(folder))) == 14


@pytest.mark.parametrize("text", [False, True])
def test_picture_names_with_spaces_in_subfolders(tmp_path: Path, text: bool) -> None:
    folder = folders.write_colmap(tmp_path / "scene", text=text)
    file = folder / "sparse" / "0" / ("images.txt" if text else "images.bin")
    (folder / "images" / "left eye").mkdir()
    shutil.move(folder / "images" / "view_03.png", folder / "images" / "left eye" / "ä 3.png")
    content = file.read_bytes().replace(b"view_03.png", "left eye/ä 3.png".encode())
    file.write_bytes(content)
    assert len(load_scene(folder)) + len(load_scene(folder, "test")) == 16


def test_files_written_on_windows(tmp_path: Path) -> None:
    """A mark before the text, line ends of two characters, backslashes in paths, endings in capitals."""
    folder = folders.write_transforms(tmp_path / "a")
    for path in sorted((folder / "images").iterdir()):
        path.rename(path.with_suffix(".PNG"))
    text = (folder / "transforms.json").read_text().replace("images/", "images\\\\").replace(".png", ".PNG")
    (folder / "transforms.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert len(load_scene(folder)) == 14
    folder = folders.write_colmap(tmp_path / "b", text=True)
    for file in (folder / "sparse" / "0").iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert len(load_scene(folder)) == 14


def test_paths_from_where_the_exporter_was_called(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    text = (folder / "transforms.json").read_text()
    (folder / "transforms.json").write_text(text.replace('"images/', '"data/nerf/scene/images/'))
    assert len(load_scene(folder)) == 14
    outside = {
        "../../x/images/": 14,
        "/media/ana/fox/images/": 14,
        "C:\\\\data\\\\fox\\\\images\\\\": 14,
        "../other/": 14,
    }
    for start, count in outside.items():
        (folder / "transforms.json").write_text(text.replace('"images/', f'"{start}'))
        scene = load_scene(folder)
        assert len(scene) == count and any("found by the end of the path" in note for note in scene.notes)
        assert any("--allow-outside" in note for note in scene.notes)
    shutil.move(folder / "images", tmp_path / "images")
    (folder / "transforms.json").write_text(text.replace('"images/', '"../images/'))
    with pytest.raises(InputError, match=r"a path inside the scene's folder.*--allow-outside"):
        load_scene(folder)
    assert len(load_scene(folder, options=LoadOptions(allow_outside=True))) == 14


def test_what_is_missing_is_no_reason_to_refuse_the_rest(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    text = (folder / "transforms.json").read_text()
    (folder / "transforms.json").write_text(text.replace('"images/', '"/media/ana/images/'))
    (folder / "images" / "view_03.png").unlink()
    scene = load_scene(folder)
    assert len(scene) == 14 and any("skipped 1 frame:" in note for note in scene.notes)
    document = json.loads(text)  # two frames must not share one image because a folder is gone
    document["frames"][1]["file_path"], document["frames"][2]["file_path"] = "left/view_01.png", "right/view_01.png"
    (folder / "transforms.json").write_text(json.dumps(document))
    scene = load_scene(folder)
    assert any("skipped 3 frames" in note for note in scene.notes) and len(set(scene.files)) == len(scene)
    for frame in document["frames"]:  # nor where all folders are gone
        frame["file_path"] = frame["file_path"].replace("images/", "left/")
    (folder / "transforms.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"frame 2: file_path: expected an image of its own"):
        load_scene(folder)


@pytest.mark.parametrize("write", [folders.write_transforms, folders.write_colmap])
@pytest.mark.parametrize("place", ["input", "rgb", "images_4", "."])
def test_images_lie_elsewhere_under_other_endings(tmp_path: Path, write: Callable[..., Path], place: str) -> None:
    folder = write(tmp_path / "scene")
    if write is folders.write_transforms:  # a file without sizes: the smaller copies must not change the focal length
        text = (folder / "transforms.json").read_text()
        (folder / "transforms.json").write_text(text.replace(f'"w": {folders.WIDTH}, "h": {folders.HEIGHT}, ', ""))
    before = load_scene(folder).cameras
    paths = sorted((folder / "images").iterdir())
    (folder / place).mkdir(exist_ok=True)
    for path in paths:
        image = Image.open(path)
        image = image.resize((image.width // 4, image.height // 4)) if place == "images_4" else image
        image.save(folder / place / path.with_suffix(".JPG").name.upper(), "JPEG")
        path.unlink()
    (folder / "images").rmdir()
    after = load_scene(folder).cameras
    shrunk = 0.25 if place == "images_4" else 1.0
    assert len(after) == len(before) == 14 and torch.equal(after.camera_to_world, before.camera_to_world)
    assert torch.allclose(after.focal, before.focal * shrunk) and torch.allclose(after.center, before.center * shrunk)


@pytest.mark.parametrize("place", ["colmap_sparse/0", "colmap/sparse/0", "dense/0/sparse"])
def test_workspaces_of_colmap(tmp_path: Path, place: str) -> None:
    folder = folders.write_colmap(tmp_path / "scene")
    shutil.move(folder / "images", folder / "dense" / "0" / "images")
    if place == "dense/0/sparse":  # the model of the undistorted images, not the other
        other = folders.write_colmap(tmp_path / "other", parameters=[40.0, 41.0, 12.0, 8.0])
        shutil.move(other / "sparse" / "0", folder / place)
        assert load_scene(folder).cameras.focal[0].tolist() == [40.0, 41.0]
    else:
        (folder / place).parent.mkdir(parents=True)
        shutil.move(folder / "sparse" / "0", folder / place)
        assert len(load_scene(folder)) == 14


@pytest.mark.parametrize("write", [folders.write_transforms, folders.write_colmap, folders.write_llff])
def test_numbers_in_names_are_sorted_as_numbers(tmp_path: Path, write: Callable[..., Path]) -> None:
    """frame2 before frame10: which views are held out, and whether a walk jumps, depends on it."""
    folder = write(tmp_path / "scene")
    paths = sorted((folder / "images").iterdir())
    for index, path in enumerate(paths):
        path.rename(path.with_name(f"frame{index}.png"))
        for file in (folder / "transforms.json", folder / "sparse" / "0" / "images.bin"):
            if file.is_file():
                file.write_bytes(file.read_bytes().replace(path.name.encode(), f"frame{index}.png".encode()))
    assert [Path(file).stem for file in load_scene(folder, "test").files] == ["frame0", "frame8"]
    assert [Path(file).stem for file in load_scene(folder).files][:3] == ["frame1", "frame2", "frame3"]


def test_pictures_that_were_sorted_out_of_a_reconstruction(tmp_path: Path) -> None:
    folder = folders.write_colmap(tmp_path / "scene")
    for name in ("view_00.png", "view_05.png"):  # the first too, by which the folder was found
        (folder / "images" / name).unlink()
    scene = load_scene(folder)
    assert len(scene) == 13 and any("skipped 2 images" in note for note in scene.notes)
    shutil.rmtree(folder / "images")
    with pytest.raises(InputError, match=r"expected the images it names in .*images.* no such file"):
        load_scene(folder)


@pytest.mark.parametrize("orientation", [3, 6])
def test_posed_pictures_stay_as_they_are_stored(tmp_path: Path, orientation: int) -> None:
    """COLMAP, instant-ngp and nerfstudio do not look at the tag: poses belong to the rows and columns in the file."""
    folder = folders.write_colmap(tmp_path / "scene")
    exif = Image.Exif()
    exif[0x0112] = orientation
    marked = np.zeros((folders.HEIGHT, folders.WIDTH, 3), np.uint8)
    marked[0, 0] = 255
    for path in sorted((folder / "images").iterdir()):
        Image.fromarray(marked).save(path, exif=exif)
    scene = load_scene(folder)
    assert scene.images.sizes[0].tolist() == [folders.WIDTH, folders.HEIGHT]
    assert scene.images.image_bytes(0)[0, 0].tolist() == [255, 255, 255]
    upright = decode_image(folder / "images" / "view_01.png")  # photos without poses are turned
    assert upright.shape[:2] == ((16, 24) if orientation == 3 else (24, 16)) and int(upright[0, 0, 0]) == 0


def test_a_camera_that_belongs_to_the_turned_picture(tmp_path: Path) -> None:
    """Exporters that turn pictures first write cameras of the upright ones, and leave the tag in."""
    values = {"w": folders.HEIGHT, "h": folders.WIDTH, "cx": 8.0, "cy": 12.0}
    folder = folders.write_transforms(tmp_path / "scene", **values)
    exif = Image.Exif()
    exif[0x0112] = 6
    for path in sorted((folder / "images").iterdir()):
        Image.open(path).save(path, exif=exif)
    assert load_scene(folder).images.sizes[0].tolist() == [folders.HEIGHT, folders.WIDTH]


def test_alpha_that_hides_nothing_makes_no_object(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene", mode="RGBA")
    assert load_scene(folder).grid_levels == 1
    for path in sorted((folder / "images").iterdir()):
        Image.new("RGBA", (folders.WIDTH, folders.HEIGHT), (9, 9, 9, 255)).save(path)
    scene = load_scene(folder)
    assert scene.grid_levels > 1 and scene.has_alpha  # a room, however its pictures were saved


def test_pictures_of_every_kind_in_one_folder(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene", w=None, h=None, cx=None, cy=None)
    document = json.loads((folder / "transforms.json").read_text())
    modes = {"CMYK": ".jpg", "L": ".JPG", "I;16": ".png", "P": ".png", "1": ".png", "LA": ".png", "RGB": ".webp"}
    size = (folders.WIDTH, folders.HEIGHT)
    for frame, (mode, ending) in zip(document["frames"], modes.items(), strict=False):
        name = Path(frame["file_path"]).with_suffix(ending)
        (folder / frame["file_path"]).unlink()
        grey = Image.new("L", size, 128)
        image = Image.fromarray(np.full(size[::-1], 128 << 8, np.uint16)) if mode == "I;16" else grey.convert(mode)
        image.save(folder / name)
        frame["file_path"] = str(name)
    for frame, side in zip(document["frames"][8:10], (2, 3), strict=True):  # of other sizes
        Image.new("RGB", (size[0] * side, size[1] * side), (128, 128, 128)).save(folder / frame["file_path"])
    (folder / "transforms.json").write_text(json.dumps(document))
    scene = load_scene(folder)
    assert len(scene) == 14 and {tuple(size) for size in scene.images.sizes.tolist()} == {(24, 16), (72, 48)}
    for index in range(6):
        middle = scene.images.image_bytes(index)[8, 12, :3].float()
        assert float((middle - 128.0).abs().max()) <= 2.0 or set(middle.tolist()) <= {0.0, 255.0}  # black and white


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")
def test_links_are_followed_and_broken_ones_are_named(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    shutil.move(folder / "images", folder / "elsewhere")
    (folder / "images").symlink_to("elsewhere")
    (tmp_path / "other name").symlink_to(folder)
    assert len(load_scene(folder)) == len(load_scene(tmp_path / "other name")) == 14
    (folder / "elsewhere" / "view_03.png").unlink()
    (folder / "elsewhere" / "view_03.png").symlink_to("view_03.png")  # to itself
    (folder / "elsewhere" / "view_99.png").symlink_to(tmp_path / "nothing")
    assert len(load_scene(folder)) == 14 and torch.isfinite(load_scene(folder).cameras.focal).all()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")
@pytest.mark.parametrize("linked", ["images", "images/view_03.png", "sparse/0/points3D.bin", "masks"])
def test_links_to_what_lies_outside_are_refused(tmp_path: Path, linked: str) -> None:
    folder = folders.write_colmap(tmp_path / "scene")
    (folder / linked).rename(tmp_path / "away") if linked != "masks" else (tmp_path / "away").mkdir()
    (folder / linked).symlink_to(tmp_path / "away")
    with pytest.raises(InputError, match=rf"{linked}: expected a file inside.* a link to .*--allow-outside"):
        load_scene(folder)
    assert len(load_scene(folder, options=LoadOptions(allow_outside=True))) == 14


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")
def test_photos_that_are_links_are_refused_before_their_poses_are_sought(tmp_path: Path) -> None:
    from nerfturbo.cli.main import main

    folder = folders.write_transforms(tmp_path / "scene")
    (folder / "transforms.json").unlink()
    shutil.move(folder / "images" / "view_03.png", tmp_path)
    (folder / "images" / "view_03.png").symlink_to(tmp_path / "view_03.png")
    for words in (["process", str(folder), str(tmp_path / "out")], ["train", str(folder)]):
        with redirect_stderr(io.StringIO()) as said:
            assert main(words) == 2 and "view_03.png: expected a file inside" in said.getvalue()
    assert not (tmp_path / "out").exists()


def test_folders_and_empty_files_under_the_names_of_pictures(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    (folder / "images" / "view_03.png").unlink()
    (folder / "images" / "view_03.png").mkdir()
    assert len(load_scene(folder)) == 14
    (folder / "images" / "view_04.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"view_04\.png: expected an image that decodes"):
        load_scene(folder)
