"""transforms.json, COLMAP and LLFF folders: the same cameras from each, splits, lenses, the way back, real scenes."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nerfturbo.data.formats import llff, posed
from nerfturbo.data.formats.colmap import (
    N_PARAMETERS,
    ColmapCamera,
    find_models,
    lens_of,
    load_points,
    read_cloud,
    read_features,
)
from nerfturbo.data.formats.posed import unit_times
from nerfturbo.data.images import decode_image, save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import MissingSplitError, Scene, farthest_distance, load_scene, scene_formats
from nerfturbo.errors import InputError
from nerfturbo.types import Aabb

from . import folders

WRITERS: dict[str, Callable[[Path], Path]] = {
    "transforms": folders.write_transforms,
    "ngp": lambda folder: folders.write_transforms(folder, aabb_scale=4),
    "colmap": folders.write_colmap,
    "colmap text": lambda folder: folders.write_colmap(folder, text=True),
    "llff": folders.write_llff,
}


TRAIN = [index for index in range(folders.N_VIEWS) if index % 8]


def original_poses(scene: Scene) -> torch.Tensor:
    """(n, 3, 4): back in the file's coordinates."""
    back = torch.eye(4, dtype=torch.float64) if scene.to_original is None else scene.to_original
    rotation = back[:3, :3] / torch.linalg.det(back[:3, :3]) ** (1.0 / 3.0)
    poses = scene.cameras.camera_to_world.double()
    positions = poses[:, :, 3] @ back[:3, :3].T + back[:3, 3]
    return torch.cat([rotation @ poses[:, :, :3], positions[:, :, None]], -1)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_cameras_and_pictures(tmp_path: Path, name: str) -> None:
    folder = WRITERS[name](tmp_path / "scene")
    train, test = load_scene(folder, "train"), load_scene(folder, "test")
    assert [int(test.images.image_bytes(i)[0, 0, 0]) for i in range(len(test))] == [0, 8]
    assert [int(train.images.image_bytes(i)[0, 0, 0]) for i in range(len(train))] == TRAIN
    for scene, views in ((train, TRAIN), (test, [0, 8])):
        assert torch.allclose(original_poses(scene), folders.poses()[views], atol=1e-5)
        assert torch.allclose(scene.cameras.focal, torch.tensor(folders.FOCAL)) and scene.cameras.model == "pinhole"
        assert torch.allclose(scene.cameras.center, torch.tensor([12.0, 8.0]))
        assert scene.notes and not scene.has_alpha
    assert (train.aabb, train.near, train.far) == (test.aabb, test.near, test.far)
    with pytest.raises(MissingSplitError, match="val"):
        load_scene(folder, "val")


@pytest.mark.parametrize("name", WRITERS)
def test_smaller_pictures_keep_their_view(tmp_path: Path, name: str) -> None:
    scene = load_scene(WRITERS[name](tmp_path / "scene"), "test", downscale=2)
    assert scene.cameras.size.tolist() == [[12, 8]] * 2
    assert torch.allclose(scene.cameras.focal, torch.tensor(folders.FOCAL / 2))


def test_placed_scenes_are_upright_and_fit(tmp_path: Path) -> None:
    scene = load_scene(folders.write_colmap(tmp_path / "scene"))
    assert scene.cameras.positions.norm(dim=-1).max() <= 1.0 + 1e-5
    assert scene.cameras.camera_to_world[:, 2, 1].mean() > 0.9  # their up axes point to +z
    assert scene.grid_levels == 2 and 0.0 < scene.near < 0.5


def test_ngp_files_stand_in_their_unit_cube(tmp_path: Path) -> None:
    scene = load_scene(folders.write_transforms(tmp_path / "a", aabb_scale=16))
    assert scene.grid_levels == 5 and scene.aabb == Aabb.cube(0.5) and scene.near == 0.1
    moved = load_scene(folders.write_transforms(tmp_path / "b", aabb_scale=1, scale=0.5, offset=[0.5, 0.25, 0.0]))
    assert moved.grid_levels == 1 and moved.to_original is not None
    corners = torch.tensor([[-0.5, -0.5, -0.5, 1.0], [0.5, 0.5, 0.5, 1.0]], dtype=torch.float64) @ moved.to_original.T
    assert corners[:, :3].tolist() == [[-1.0, -0.5, 0.0], [1.0, 1.5, 2.0]]
    assert moved.far == pytest.approx(farthest_distance(moved.cameras.positions, moved.aabb), rel=1e-5)


def test_pictures_with_alpha_show_an_object(tmp_path: Path) -> None:
    scene = load_scene(folders.write_transforms(tmp_path / "scene", mode="RGBA"))
    assert scene.has_alpha and scene.grid_levels == 1 and scene.near == 0.0


def test_lists_choose_the_splits(tmp_path: Path) -> None:
    names = [f"./images/view_{index:02d}.png" for index in range(10)]
    lists = {"train_filenames": names[:6], "val_filenames": names[6:7], "test_filenames": names[7:]}
    folder = folders.write_transforms(tmp_path / "scene", **lists)
    assert [len(load_scene(folder, split)) for split in ("train", "val", "test")] == [6, 1, 3]
    assert "warning: skipped 6 frames: no list names them" in load_scene(folder).notes
    moved = lists | {"train_filenames": [f"../{name}" for name in names[:6]]}
    with pytest.raises(InputError, match=r"train_filenames: expected paths of frames.*'\.\./images/view_00\.png'"):
        load_scene(folders.write_transforms(tmp_path / "moved", **moved), "test")
    del lists["train_filenames"]  # all the others then
    folder = folders.write_transforms(tmp_path / "rest", **lists)
    assert [len(load_scene(folder, split)) for split in ("train", "val", "test")] == [12, 1, 3]


def test_names_in_lists_that_are_no_frames(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene", test_filenames=["images/view_03.png", "images/gone.png"])
    assert len(load_scene(folder, "test")) == 1
    assert any(note.startswith("warning: 1 names in the lists") for note in load_scene(folder).notes)
    folder = folders.write_transforms(tmp_path / "bare", test_filenames=["view_03.png"])
    with pytest.raises(InputError, match=r"test_filenames: expected paths of frames, .* got 'view_03.png'"):
        load_scene(folder)


def test_frames_have_their_own_lenses(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene", k1=0.1, p2=0.01, k3=-0.02, camera_model="OPENCV")
    document = json.loads((folder / "transforms.json").read_text())
    document["frames"][1] |= {"fl_x": 40.0, "k1": 0.3, "cx": 11.0}
    document["frames"][2] |= {"file_path": "images/view_02"}  # without its extension
    (folder / "transforms.json").write_text(json.dumps(document))
    cameras = load_scene(folder).cameras
    assert cameras.model == "opencv" and cameras.distortion is not None
    assert cameras.focal[0].tolist() == [40.0, 30.0] and cameras.center[0].tolist() == [11.0, 8.0]
    assert cameras.distortion[0].tolist() == pytest.approx([0.3, 0, 0, 0.01, -0.02, 0, 0, 0])
    assert cameras.distortion[1].tolist() == pytest.approx([0.1, 0, 0, 0.01, -0.02, 0, 0, 0])


def test_fisheye_by_either_name_and_angles_for_focal_lengths(tmp_path: Path) -> None:
    one = load_scene(folders.write_transforms(tmp_path / "a", camera_model="OPENCV_FISHEYE", k1=0.1, k4=0.02)).cameras
    two = load_scene(folders.write_transforms(tmp_path / "b", is_fisheye=True, k1=0.1, k4=0.02)).cameras
    assert one.model == two.model == "fisheye"
    assert one.distortion[0].tolist() == pytest.approx([0.1, 0, 0, 0.02, 0, 0, 0, 0])
    angle = 2.0 * float(torch.atan(torch.tensor(12.0 / 30.0)))
    values = {"fl_x": None, "fl_y": None, "camera_angle_x": angle, "w": None, "h": None, "cx": None, "cy": None}
    plain = load_scene(folders.write_transforms(tmp_path / "c", **values)).cameras
    assert torch.allclose(plain.focal, torch.tensor(30.0)) and plain.center[0].tolist() == [12.0, 8.0]


def test_the_way_back_undoes_the_exporter_too(tmp_path: Path) -> None:
    applied = [[0.0, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0, 2.0]]
    values = {"applied_transform": applied, "applied_scale": 0.5}
    scene = load_scene(folders.write_transforms(tmp_path / "scene", **values))
    matrix = torch.tensor([*applied, [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    back = scene.to_original[:3, :3] @ scene.cameras.positions.double().T + scene.to_original[:3, 3:]
    again = 0.5 * (matrix[:3, :3] @ back + matrix[:3, 3:])
    assert torch.allclose(again.T, folders.poses()[TRAIN, :, 3], atol=1e-5)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    ("number", "parameters", "model", "distortion"),
    [
        (0, [30, 12, 8], "pinhole", None),
        (2, [30, 12, 8, 0.1], "opencv", [0.1, 0, 0, 0, 0, 0, 0, 0]),
        (3, [30, 12, 8, 0.1, 0.2], "opencv", [0.1, 0.2, 0, 0, 0, 0, 0, 0]),
        (4, [30, 30, 12, 8, 0.1, 0.2, 0.3, 0.4], "opencv", [0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0]),
        (5, [30, 30, 12, 8, 0.1, 0.2, 0.3, 0.4], "fisheye", [0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0]),
        (6, [30, 30, 12, 8, *[0.01 * i for i in range(1, 9)]], "opencv", [0.01 * i for i in range(1, 9)]),
        (9, [30, 12, 8, 0.1, 0.2], "fisheye", [0.1, 0.2, 0, 0, 0, 0, 0, 0]),
        (7, [30, 30, 12, 8, 0.9], "fov", [0.9, 0, 0, 0, 0, 0, 0, 0]),
        (7, [30, 30, 12, 8, 0.0], "pinhole", None),
        (10, [30, 30, 12, 8, 1, 2, 3, 4, 5, 6, 7, 8], "thin_prism", [1, 2, 3, 4, 5, 6, 7, 8]),
        (14, [30, 12, 8], "fisheye", [0] * 8),
        (15, [30, 30, 12, 8], "fisheye", [0] * 8),
        (11, [30, 30, 12, 8, *[0.01 * i for i in range(12)]], "rad_tan_prism", [0.01 * i for i in range(12)]),
        (12, [30, 12, 8, -0.1], "division", [-0.1, 0, 0, 0, 0, 0, 0, 0]),
        (13, [30, 30, 12, 8, 0.0], "pinhole", None),
        (16, [30, 30, 12, 8, 0.6, 1.1], "eucm", [0.6, 1.1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_colmap_models(
    tmp_path: Path, text: bool, number: int, parameters: list[float], model: str, distortion: list[float] | None
) -> None:
    parameters = [float(value) for value in parameters]
    cameras = load_scene(folders.write_colmap(tmp_path / "s", model=number, parameters=parameters, text=text)).cameras
    assert cameras.model == model and cameras.focal[0].tolist() == [30.0, 30.0]
    assert cameras.center[0].tolist() == [12.0, 8.0]
    assert distortion is None or cameras.distortion[0].tolist() == pytest.approx(distortion)


def test_features_that_show_no_point_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "images.txt"
    file.write_text("7 1 0 0 0 0 0 0 1 a.png\n1.5 2.5 3 4 5 -1 nan 6 8 7 inf 9 8.5 9.5 0\n")
    ((number, pixels, points),) = read_features(file)
    assert (number, pixels.tolist(), points.tolist()) == (7, [[1.5, 2.5], [8.5, 9.5]], [3, 0])


def test_points_of_a_model_are_read_and_a_folder_without_one_has_none(tmp_path: Path) -> None:
    cloud = load_points(folders.write_colmap(tmp_path / "s", model=1, parameters=[30.0, 30.0, 12.0, 8.0]))
    assert cloud is not None and len(cloud.positions) > 0
    assert load_points(tmp_path) is None
    (tmp_path / "points3D.txt").write_text("7 1.5 -2.5 3.5 10 20 300 0.25 1 1 2 4\n")
    one = read_cloud(tmp_path / "points3D.txt")
    assert (one.positions.tolist(), one.colors.tolist()) == ([[1.5, -2.5, 3.5]], [[10, 20, 255]])
    assert (one.errors.tolist(), one.numbers.tolist()) == ([0.25], [7])


def test_of_models_side_by_side_the_largest_is_taken(tmp_path: Path) -> None:
    folder = folders.write_colmap(tmp_path / "s", model=1, parameters=[30.0, 30.0, 12.0, 8.0], text=True)
    shutil.copytree(folder / "sparse" / "0", folder / "sparse" / "1")
    lines = (folder / "sparse" / "0" / "images.txt").read_text().splitlines()
    (folder / "sparse" / "0" / "images.txt").write_text("\n".join(lines[1:-4]) + "\n")
    n = len(folders.poses())
    assert find_models(folder) == {folder / "sparse" / "1": n, folder / "sparse" / "0": n - 2}


def test_colmap_spheres(tmp_path: Path) -> None:
    """COLMAP's panoramas have their size as parameters."""
    parameters = [float(folders.WIDTH), float(folders.HEIGHT)]
    for text in (False, True):
        scene = load_scene(folders.write_colmap(tmp_path / str(text), model=17, parameters=parameters, text=text))
        assert scene.cameras.model == "equirectangular"
        assert scene.cameras.focal[0].tolist() == pytest.approx([24 / (2 * math.pi), 16 / math.pi])
        assert int(scene.used_pixels(0) is None)  # every pixel has its ray


def test_every_model_of_colmap_is_read_and_others_are_named(tmp_path: Path) -> None:
    for number, (name, count) in enumerate(N_PARAMETERS.items()):
        values = (24.0, 16.0) if count == 2 else (30.0, 30.0, 12.0, 8.0, 0.1, 0.9, *[1e-3] * 10)[:count]
        assert lens_of(ColmapCamera(name, 24, 16, values), str(number)).width == 24
    folder = folders.write_colmap(tmp_path / "scene", model=17, parameters=[24.0, 16.0])
    file = folder / "sparse" / "0" / "cameras.bin"
    file.write_bytes(file.read_bytes().replace(struct.pack("<ii", 7, 17), struct.pack("<ii", 7, 40)))
    with pytest.raises(InputError, match=r"cameras\.bin: byte \d+: expected a camera model from 0 to 17, got 40"):
        load_scene(folder)
    with pytest.raises(InputError, match="alpha from 0 to 1"):
        lens_of(ColmapCamera("EUCM", 24, 16, (30.0, 30.0, 12.0, 8.0, 1.5, 1.0)), "camera 7")


def test_llff_takes_the_folder_that_fits(tmp_path: Path) -> None:
    folder = folders.write_llff(tmp_path / "scene", "images")
    for path in sorted((folder / "images").iterdir()):
        small = decode_image(path, 4)
        (folder / "images_4").mkdir(exist_ok=True)
        save_image(folder / "images_4" / path.name, torch.zeros_like(small))
    quarter = load_scene(folder, downscale=4)
    assert quarter.images.pixels.max() == 0 and quarter.cameras.size[0].tolist() == [6, 4]
    assert load_scene(folder, downscale=2).images.pixels.max() > 0
    shutil.copytree(folder / "images_4", folder / "images_2")
    assert load_scene(folder, downscale=2).images.pixels.max() == 0
    shutil.rmtree(folder / "images_2")
    (folder / "images").rename(folder / "input")
    assert load_scene(folder, downscale=2).images.pixels.max() > 0
    shutil.rmtree(folder / "input")
    assert load_scene(folder).images.pixels.max() == 0


def test_corners_of_llff_at_both_depths_stand_in_for_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(llff, "load_capture", lambda folder, file, capture, *rest: seen.append(capture.points))
    llff.load_llff(folders.write_llff(tmp_path / "scene"))
    rotation, position = folders.poses()[:, :, :3], folders.poses()[:, None, :, 3]
    local = (seen[0].view(2, -1, 5, 3) - position) @ rotation
    depth, size = -local[..., 2:], torch.tensor([folders.WIDTH, folders.HEIGHT]) / folders.FOCAL
    assert torch.allclose(depth, torch.tensor([1.0, 6.0]).double()[:, None, None, None])
    places = local[..., :2] / depth / size
    assert torch.allclose(places[..., :4, :].abs(), torch.full((), 0.48).double(), atol=1e-6)
    assert places[..., 4, :].abs().max() < 1e-9 and places.sum(2).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fl_x": 0.0, "fl_y": None}, "expected fl_x or camera_angle_x"),
        ({"fl_x": -3.0}, "focal lengths > 0"),
        ({"fl_x": 1e-300}, "frame 0: expected focal lengths > 0"),  # nothing in float32
        ({"k1": "a"}, "k1: expected a finite number"),
        ({"camera_model": "PANORAMA"}, "camera_model: expected one of PINHOLE"),
        ({"w": 0}, "w, h: expected a picture"),
        ({"w": folders.HEIGHT, "h": folders.WIDTH}, "turned by 90 degrees"),
        ({"aabb_scale": 1000}, "aabb_scale"),
        ({"aabb_scale": 4, "offset": [1]}, "offset: expected three numbers"),
        ({"train_filenames": 3}, "train_filenames: expected a list"),
        ({"applied_transform": [[0.0] * 4] * 3}, "applied_transform: expected a transform that can be undone"),
        ({"frames": []}, "frames: expected a list of at least one frame"),
    ],
)
def test_bad_transforms_are_named(tmp_path: Path, values: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_scene(folders.write_transforms(tmp_path / "scene", **values))


@pytest.mark.parametrize("n_views", [2, 11, 15])
def test_of_few_pictures_the_most_central_one_is_held_out(tmp_path: Path, n_views: int) -> None:
    """Eleven photos along a wall: the first would be scored on what no other shows, and two are dear."""
    folder = folders.write_transforms(tmp_path / "scene")
    document = json.loads((folder / "transforms.json").read_text())
    document["frames"] = document["frames"][:n_views]
    for index, frame in enumerate(document["frames"]):
        frame["transform_matrix"] = [[1, 0, 0, 0.5 * index], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    (folder / "transforms.json").write_text(json.dumps(document))
    test, train = load_scene(folder, "test"), load_scene(folder, "train")
    assert len(test) == 1 and len(train) == n_views - 1
    assert int(test.images.image_bytes(0)[0, 0, 0]) == (n_views - 1) // 2
    assert any(f"{n_views} images: only the most central one, view_" in note for note in test.notes)


def write_split_files(folder: Path, **values: object) -> Path:
    """transforms_train.json and transforms_test.json with lenses in them, as some exporters for Blender write them."""
    folders.write_transforms(folder, **values)
    document = json.loads((folder / "transforms.json").read_text())
    (folder / "transforms.json").unlink()
    for split, frames in (("train", document["frames"][:10]), ("test", document["frames"][10:])):
        (folder / f"transforms_{split}.json").write_text(json.dumps(document | {"frames": frames}))
    return folder


def test_split_files_may_have_lenses(tmp_path: Path) -> None:
    folder = write_split_files(tmp_path / "scene", k1=0.1, cx=11.0)
    train, test = load_scene(folder, "train"), load_scene(folder, "test")
    assert (len(train), len(test)) == (10, 6) and train.cameras.model == "opencv"
    assert train.cameras.focal[0].tolist() == [30.0, 30.0] and train.cameras.center[0].tolist() == [11.0, 8.0]
    assert train.aabb == test.aabb and torch.equal(train.to_original, test.to_original)  # one place for both
    assert torch.allclose(original_poses(test), folders.poses()[10:], atol=1e-5)
    with pytest.raises(InputError, match=r"transforms_val\.json: expected .* got no such file"):
        load_scene(folder, "val")
    ngp = write_split_files(tmp_path / "ngp", aabb_scale=4)
    assert load_scene(ngp, "test").grid_levels == 3 and load_scene(ngp).cameras.model == "pinhole"
    for path in sorted((ngp / "images").iterdir())[10:]:
        path.unlink()
    assert len(load_scene(ngp)) == 10  # test pictures that were never copied are no reason not to train
    with pytest.raises(InputError, match=r"transforms_test\.json: frame 0: file_path"):
        load_scene(ngp, "test")


@pytest.mark.parametrize("name", [*WRITERS, "blender", "alpha"])
def test_bounds_may_be_chosen_by_hand(tmp_path: Path, name: str) -> None:
    others = {
        "blender": folders.write_blender_json,
        "alpha": lambda folder: folders.write_transforms(folder, mode="RGBA"),
    }
    folder = (WRITERS | others)[name](tmp_path / "scene")
    bounded, auto, unbounded = (
        load_scene(folder, options=LoadOptions(bounds=bounds)) for bounds in ("bounded", "auto", "unbounded")
    )
    assert bounded.grid_levels == 1 and unbounded.grid_levels > 1
    chosen = bounded if auto.grid_levels == 1 else unbounded
    assert auto.grid_levels == chosen.grid_levels and any(
        "bounded" in note or "grid levels" in note for note in auto.notes
    )
    for scene in (bounded, unbounded):
        low, high = scene.aabb.scaled(2.0 ** (scene.grid_levels - 1)).tensor()
        far = farthest_distance(scene.cameras.positions, Aabb(tuple(low.tolist()), tuple(high.tolist())))
        assert scene.far >= 0.99 * far  # no ray ends before the box does
    with pytest.raises(InputError, match="bounds: expected one of auto, bounded, unbounded"):
        load_scene(folder, options=LoadOptions(bounds="endless"))  # type: ignore[arg-type]


def test_panoramas_of_nerfstudio(tmp_path: Path) -> None:
    cameras = load_scene(folders.write_transforms(tmp_path / "scene", camera_model="EQUIRECTANGULAR")).cameras
    assert cameras.model == "equirectangular" and cameras.focal[0, 1] == pytest.approx(folders.HEIGHT / math.pi)


def test_paths_stay_inside_and_missing_pictures_are_left_out(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    (folder / "images" / "view_03.png").unlink()
    scene = load_scene(folder)
    assert len(scene) == 14 and any("skipped 1 frame:" in note for note in scene.notes)
    document = json.loads((folder / "transforms.json").read_text())
    document["frames"][0]["file_path"] = "../secret.png"
    (folder / "transforms.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="inside the scene's folder"):
        load_scene(folder)


@pytest.mark.parametrize(
    ("name", "format_name", "views", "levels"),
    [
        ("ngp/fox", "instant-ngp / nerfstudio", 50, 3),
        ("ngp/fruit", "instant-ngp / nerfstudio", 81, 6),
        ("colmap/beer", "COLMAP", 71, 3),
        ("llff/fern", "LLFF", 20, 2),
    ],
)
def test_real_scenes(scene_dir: Callable[[str], Path], name: str, format_name: str, views: int, levels: int) -> None:
    folder = scene_dir(name)
    assert next(entry.name for entry in scene_formats() if entry.recognise(folder)) == format_name
    test = load_scene(folder, "test", downscale=16)
    assert len(test) == -(-views // 8) and test.grid_levels == levels
    low, high = test.aabb.scaled(2.0 ** (levels - 1)).tensor()
    positions = test.cameras.positions
    assert ((positions > low) & (positions < high)).all()
    assert test.cameras.camera_to_world[:, 2, 1].mean() > 0.5  # +z is up


def test_real_points_project_into_their_pictures(scene_dir: Callable[[str], Path]) -> None:
    """COLMAP's own observations: a point lands where its image says it was seen, lens and all."""
    from nerfturbo.data.formats.colmap import read_cloud

    folder = scene_dir("colmap/beer")
    points = read_cloud(folder / "sparse" / "0" / "points3D.bin").positions
    scene = load_scene(folder, "test", downscale=8)
    forward = torch.linalg.inv(scene.to_original)
    placed = (points @ forward[:3, :3].T + forward[:3, 3]).float()
    seen = struct.unpack_from("<Q", (folder / "sparse" / "0" / "images.bin").read_bytes())[0]
    assert seen == 71
    inside = 0.0
    for index in range(len(scene)):
        pixels, depths = scene.cameras.project(torch.full((len(placed),), index), placed)
        inside += float(
            ((depths > 0) & (pixels > 0).all(-1) & (pixels < scene.cameras.size[index]).all(-1)).float().mean()
        )
    assert inside / len(scene) > 0.3  # every view shows a good part of what all views together saw


def test_times_of_frames_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    document = json.loads((folder / "transforms.json").read_text())
    for index, frame in enumerate(document["frames"]):
        frame["time"] = index / 15.0
    (folder / "transforms.json").write_text(json.dumps(document))
    times = load_scene(folder, "test").cameras.times
    assert times is not None and times.tolist() == pytest.approx([0.0, 8.0 / 15.0])
    for index, frame in enumerate(document["frames"]):
        frame["time"] = 100.0 + 2.0 * index  # seconds, or the numbers of frames
    (folder / "transforms.json").write_text(json.dumps(document))
    told: list[int] = []
    monkeypatch.setattr(posed, "unit_times", lambda given, of_all: told.append(len(given)) or unit_times(given, of_all))
    scene = load_scene(folder, "test")
    assert scene.cameras.times is not None and scene.cameras.times.tolist() == pytest.approx([0.0, 8.0 / 15.0])
    assert scene.notes.count("times from 100 to 130 are told as 0 to 1") == 1
    assert told == [16]  # once, for all views
    del document["frames"][4]["time"]
    (folder / "transforms.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="a time in every frame or in none, got 15 of 16"):
        load_scene(folder)
