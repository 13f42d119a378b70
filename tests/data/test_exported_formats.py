"""Folders of other programs: the ring of cameras that `exporters` writes, opened, and compared: poses, focal lengths,
principal points and rays, up to where the scene was placed; and world points land in the pixels that the format's own
formula says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.cli.main import main
from nerfturbo.data.capture.process import MissingPosesError
from nerfturbo.data.formats.posed import read_ply
from nerfturbo.data.keypoints import load_keypoints
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene, load_scene, recognise
from nerfturbo.errors import InputError
from nerfturbo.export.cameras import write_cameras

from . import folders
from .exporters import (
    CX,
    CY,
    FX,
    FY,
    HEIGHT,
    POINTS,
    RING,
    WIDTH,
    N,
    camera_to_world,
    write_bundler,
    write_images,
    write_metashape,
    write_neus,
    write_nsvf,
    write_opensfm,
    write_polycam,
    write_rc_csv,
    write_rc_xmp,
    write_record3d,
)

BROWN = (-0.1, 0.02, 0.003, -0.002, 0.01)  # k1 k2 p1 p2 k3
AGISOFT = (-0.1, 0.02, -0.002, 0.003, 0.01)  # its p1 is our p2
FULL, ONE = (FX, FY, CX, CY), (FX, FX, CX, CY)
MIDDLE = (FX, FX, WIDTH / 2, HEIGHT / 2)


class Case(NamedTuple):
    write: Callable[[Path], Path]
    name: str
    lens: tuple[float, ...]
    bent: tuple[float, ...] = ()
    fisheye: bool = False


CASES = {
    "opensfm": Case(write_opensfm, "OpenSfM", FULL, BROWN),
    "opensfm perspective": Case(lambda f: write_opensfm(f, "perspective"), "OpenSfM", MIDDLE, (-0.1, 0.02, 0, 0, 0)),
    "opensfm fisheye": Case(
        lambda f: write_opensfm(f, "fisheye"), "OpenSfM", MIDDLE, (-0.1, 0.02, 0, 0, 0), fisheye=True
    ),
    "metashape": Case(write_metashape, "Metashape", FULL, AGISOFT),
    "metashape chunk": Case(lambda f: write_metashape(f, place="chunk"), "Metashape", FULL, AGISOFT),
    "metashape fisheye": Case(lambda f: write_metashape(f, kind="fisheye"), "Metashape", FULL, AGISOFT, fisheye=True),
    "realitycapture csv": Case(write_rc_csv, "RealityCapture", ONE, BROWN),
    "realityscan csv": Case(
        lambda f: write_rc_csv(f, "#name,x,y,alt,heading,pitch,roll,f_35mm,px_norm,py_norm,k1,k2,k3,k4,t1,t2"),
        "RealityCapture",
        ONE,
        BROWN,
    ),
    "realitycapture xmp": Case(write_rc_xmp, "RealityCapture", FULL, BROWN),
    "bundler": Case(write_bundler, "Bundler", MIDDLE, (-0.1, 0.02, 0, 0, 0)),
    "nsvf": Case(write_nsvf, "NSVF", FULL),
    "nsvf one focal": Case(lambda f: write_nsvf(f, single=True), "NSVF", ONE),
    "neus": Case(write_neus, "NeuS / IDR", FULL),
    "polycam": Case(write_polycam, "Polycam", FULL),
    "polycam raw": Case(lambda f: write_polycam(f, corrected=False), "Polycam", FULL),
    "record3d": Case(write_record3d, "Record3D", FULL),
    "record3d each": Case(lambda f: write_record3d(f, each=True), "Record3D", FULL),
}


def project(index: int, points: np.ndarray, case: Case) -> np.ndarray:
    """(n, 2): pixels by Brown's formula, on the plane at depth 1 or on angles."""
    local = points @ RING.rotations[index].T + RING.shifts[index]
    x, y = (local[:, :2] / local[:, 2:]).T
    if case.fisheye:
        r = np.hypot(x, y)
        x, y = (value * np.arctan(r) / r for value in (x, y))
    if case.bent:
        (k1, k2, p1, p2, k3), r2 = case.bent, x * x + y * y
        scale = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
        x, y = (
            x * scale + 2 * p1 * x * y + p2 * (r2 + 2 * x * x),
            y * scale + 2 * p2 * x * y + p1 * (r2 + 2 * y * y),
        )
    fx, fy, cx, cy = case.lens
    return np.stack([fx * x + cx, fy * y + cy], -1)


def all_views(folder: Path, options: LoadOptions | None = None) -> list[tuple[int, Scene, int]]:
    """(number of the camera in the ring, scene, number of the view) of every split."""
    found = []
    for split in ("train", "val", "test"):
        try:
            scene = load_scene(folder, split, options=options or LoadOptions())
        except InputError:
            continue
        found += [(round(int(scene.images.image_bytes(view)[0, 0, 0]) / 12), scene, view) for view in range(len(scene))]
    return found


@pytest.mark.parametrize("name", CASES)
def test_cameras_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = case.write(tmp_path / "scene")
    found = recognise(folder)
    assert found is not None and found.name == case.name
    views = all_views(folder)
    assert sorted(index for index, _, _ in views) == list(range(N))
    truth = camera_to_world(opengl=True)
    for index, scene, view in views:
        cameras, back = scene.cameras, scene.to_original
        assert back is not None
        rotation = back[:3, :3] / torch.linalg.det(back[:3, :3]) ** (1.0 / 3.0)
        pose = cameras.camera_to_world[view].double()
        assert torch.allclose(rotation @ pose[:, :3], torch.from_numpy(truth[index, :3, :3]), atol=1e-5)
        position = back[:3, :3] @ pose[:, 3] + back[:3, 3]
        assert torch.allclose(position, torch.from_numpy(truth[index, :3, 3]), atol=1e-4)
        lens = (*cameras.focal[view].tolist(), *cameras.center[view].tolist())
        assert lens == pytest.approx(case.lens, abs=1e-3)
        placed = torch.cat([torch.from_numpy(POINTS), torch.ones(len(POINTS), 1)], 1) @ torch.linalg.inv(back).T
        expected = torch.from_numpy(project(index, POINTS, case)).float()
        views_of = torch.full((len(POINTS),), view)
        pixels, depths = cameras.project(views_of, placed[:, :3].float())
        assert bool((depths > 0).all()) and torch.allclose(pixels, expected, atol=2e-3)
        rays = cameras.rays(views_of, *expected.unbind(-1))  # and back: through these pixels to these points
        towards = torch.nn.functional.normalize(placed[:, :3].float() - rays.origins, dim=-1)
        assert torch.allclose(rays.directions, towards, atol=1e-4)


@pytest.mark.parametrize("low", ["nan", "-inf", "7"])
def test_a_box_of_nsvf_that_is_none_is_named(tmp_path: Path, low: str) -> None:
    folder = write_nsvf(tmp_path / "nsvf")
    box = folder / "bbox.txt"
    box.write_text(" ".join([low, *box.read_text().split()[1:]]))
    with pytest.raises(InputError, match=r"bbox\.txt: expected low < high"):
        load_scene(folder)


def test_splits_notes_and_masks_of_formats(tmp_path: Path) -> None:
    nsvf = write_nsvf(tmp_path / "nsvf")
    assert [len(load_scene(nsvf, split)) for split in ("train", "val", "test")] == [10, 4, 4]
    scene = load_scene(nsvf)
    assert scene.grid_levels == 1 and any("the box of bbox.txt" in note for note in scene.notes)
    back = scene.to_original
    corners = (
        torch.tensor([[-1.0, -1.1, -0.9, 1.0], [1.0, 0.9, 1.2, 1.0]], dtype=torch.float64) @ torch.linalg.inv(back).T
    )
    assert float(corners[:, :3].abs().max()) <= scene.aabb.high[0] * 1.01
    assert load_scene(nsvf, options=LoadOptions(bounds="unbounded")).grid_levels > 1
    neus = load_scene(write_neus(tmp_path / "neus"))
    assert neus.grid_levels == 1 and neus.images.mask is not None and any("--bounds" in note for note in neus.notes)
    used = neus.images.image_mask(0)
    assert used is not None and not bool(used[4, 20]) and bool(used[6, 20])
    bare = load_scene(write_neus(tmp_path / "bare", masks=False))
    assert bare.grid_levels > 1 and bare.images.mask is None
    said = {
        name: load_scene(CASES[name].write(tmp_path / name)).notes
        for name in ("bundler", "metashape", "polycam raw", "opensfm")
    }
    assert any("one focal length" in note for note in said["bundler"]) and any(
        "1 image without" in note for note in said["bundler"]
    )
    assert {"left out 1 camera that Metashape did not align", "left out 1 camera marked as disabled"} <= set(
        said["metashape"]
    )
    assert any("not corrected" in note for note in said["polycam raw"]) and any(
        "largest of 2" in note for note in said["opensfm"]
    )


def rewrite(folder: Path, change: Callable[[dict], object]) -> Path:
    document = json.loads((folder / "transforms.json").read_text())
    change(document)
    (folder / "transforms.json").write_text(json.dumps(document))
    return folder


MATRIX = [[31.0, 0.0, 11.0], [0.0, 29.0, 7.5], [0.0, 0.0, 1.0]]
LENSES: dict[str, tuple[dict, dict]] = {  # of the file, of each frame: all say the same
    "frame K": ({}, {"K": MATRIX}),
    "file intrinsics": ({"intrinsics": [*(row + [0.0] for row in MATRIX), [0.0, 0.0, 0.0, 1.0]]}, {}),
    "flat": ({"K": [value for row in MATRIX for value in row]}, {}),
    "by columns": ({}, {"K": [31.0, 0.0, 0.0, 0.0, 29.0, 0.0, 11.0, 7.5, 1.0]}),
    "four": ({}, {"intrinsics": [31.0, 29.0, 11.0, 7.5]}),
    "short names": (
        {"width": folders.WIDTH, "height": folders.HEIGHT},
        {"fx": 31.0, "fy": 29.0, "cx": 11.0, "cy": 7.5},
    ),
    "file short names": ({"fx": 31.0, "fy": 29.0, "cx": 11.0, "cy": 7.5}, {}),
}


@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize("split", [False, True])
def test_every_way_to_write_a_camera_matrix(tmp_path: Path, name: str, split: bool) -> None:
    folder = folders.write_transforms(tmp_path / "scene")

    def change(document: dict) -> None:
        for key in ("fl_x", "fl_y", "cx", "cy", "w", "h"):
            del document[key]
        document |= LENSES[name][0]
        for frame in document["frames"]:
            frame |= LENSES[name][1]

    rewrite(folder, change)
    if split:
        (folder / "transforms.json").rename(folder / "transforms_train.json")
    cameras = load_scene(folder).cameras
    assert set(map(tuple, cameras.focal.tolist())) == {(31.0, 29.0)} and set(map(tuple, cameras.center.tolist())) == {
        (11.0, 7.5)
    }
    assert cameras.size[0].tolist() == [folders.WIDTH, folders.HEIGHT]


def test_a_matrix_that_is_none(tmp_path: Path) -> None:
    folder = rewrite(
        folders.write_transforms(tmp_path / "scene"), lambda document: document["frames"][2].update(K=[1.0, 2.0])
    )
    with pytest.raises(InputError, match=r"frame 2: K: expected a 3x3 matrix, or fx, fy, cx and cy, got 2 numbers"):
        load_scene(folder)


def test_fisheye_and_pinhole_in_one_file(tmp_path: Path) -> None:
    """Each view looks where it does in a file of its kind alone, both ways; a wrong kind is off by many pixels."""
    values = {"k1": 0.05, "k2": -0.02}
    kinds = {
        "fisheye": {"camera_model": "OPENCV_FISHEYE"},
        "plain": {"camera_model": "PINHOLE"},
        "bent": {"camera_model": "OPENCV"},
    }
    alone = {
        name: load_scene(folders.write_transforms(tmp_path / name, **kind, **values)).cameras
        for name, kind in kinds.items()
    }

    def mix(document: dict) -> None:
        for index, frame in enumerate(document["frames"]):
            frame |= list(kinds.values())[index % 3]

    scene = load_scene(rewrite(folders.write_transforms(tmp_path / "mixed", **values), mix))
    cameras = scene.cameras
    assert cameras.model == "mixed" and len(cameras) == 14
    for view, file in enumerate(scene.files):
        kind = alone[list(kinds)[int(Path(file).stem[-2:]) % 3]]
        index, x, y = (
            torch.tensor([view] * 5),
            torch.tensor([0.5, 6.0, 12.0, 20.0, 23.5]),
            torch.tensor([0.5, 3.0, 8.0, 9.0, 15.5]),
        )
        rays, expected = cameras.rays(index, x, y), kind.rays(index, x, y)
        assert torch.allclose(rays.directions, expected.directions, atol=1e-5)
        assert torch.equal(cameras.is_valid(index, x, y), kind.is_valid(index, x, y))
        pixels, _ = cameras.project(index, rays.origins + 2.0 * rays.directions)
        assert torch.allclose(pixels, torch.stack([x, y], -1), atol=1e-3)
    written = tmp_path / "again" / "transforms.json"
    assert write_cameras(written, [scene]) == 14
    models = [frame["camera_model"] for frame in json.loads(written.read_text())["frames"]]
    assert models.count("OPENCV_FISHEYE") == sum(int(Path(file).stem[-2:]) % 3 == 0 for file in scene.files)
    other = rewrite(
        folders.write_transforms(tmp_path / "panorama"), lambda d: d["frames"][0].update(camera_model="EQUIRECTANGULAR")
    )
    rewrite(other, lambda document: document["frames"][1].update(camera_model="OPENCV_FISHEYE"))
    with pytest.raises(InputError, match="one kind of lens, or fisheye beside pinhole and opencv"):
        load_scene(other)


def write_ply(path: Path, kind: str) -> Path:
    if kind != "big endian":
        trimesh = pytest.importorskip("trimesh")
        cloud = trimesh.PointCloud(POINTS, colors=np.full((len(POINTS), 4), 200, np.uint8))
        path.write_bytes(cloud.export(file_type="ply", encoding=kind))
        return path
    head = "ply\nformat binary_big_endian 1.0\ncomment x\nelement vertex 200\nproperty uchar red\n"
    head += (
        "".join(f"property double {axis}\n" for axis in "zxy")
        + "element face 0\nproperty list uchar int i\nend_header\n"
    )
    rows = np.zeros(200, [("red", "u1"), ("z", ">f8"), ("x", ">f8"), ("y", ">f8")])
    for index, axis in enumerate("xyz"):
        rows[axis] = POINTS[:, index]
    path.write_bytes(head.encode() + rows.tobytes())
    return path


@pytest.mark.parametrize("kind", ["ascii", "binary", "big endian"])
def test_points_of_ply_files_place_the_scene(tmp_path: Path, kind: str) -> None:
    folder = folders.write_transforms(tmp_path / "scene", ply_file_path="sparse_pc.ply")
    without = load_scene(folder)
    assert any("warning: no 'sparse_pc.ply'" in note for note in without.notes)
    path = write_ply(folder / "sparse_pc.ply", kind)
    assert np.allclose(read_ply(path).numpy(), POINTS, atol=1e-6)
    scene = load_scene(folder)
    assert any("200 points in 'sparse_pc.ply'" in note for note in scene.notes)
    assert scene.grid_levels < without.grid_levels
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b"vertex 200", b"vertex 99999999999"), b"ply\n", b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"sparse_pc\.ply: expected (what a PLY exporter writes|a PLY file)"):
            load_scene(folder)


def write_depths(folder: Path, kind: str, unit: float = 1e-3, **values: object) -> Path:
    """A ball of radius 0.5 about the middle, seen by the ring of `folders`, at half the images' size; 0 beside it."""
    folders.write_transforms(folder, **values)
    center, w, h = np.array([0.2, -0.1, 0.3]), folders.WIDTH // 2, folders.HEIGHT // 2
    (folder / "depth").mkdir()

    def change(document: dict) -> None:
        for index, frame in enumerate(document["frames"]):
            pose = np.array(frame["transform_matrix"])
            x, y = np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)
            local = np.stack([(x - w / 2) / 15.0, -(y - h / 2) / 15.0, -np.ones_like(x)], -1)
            along = local @ pose[:3, :3].T  # of length 1 along the axis: what is solved for is the depth
            a, b = (along**2).sum(-1), along @ (pose[:3, 3] - center)
            inside = b * b - a * (((pose[:3, 3] - center) ** 2).sum() - 0.25)
            depth = np.where(inside > 0.0, (-b - np.sqrt(np.maximum(inside, 0.0))) / a, 0.0) / unit
            path = folder / "depth" / f"{index}{'.npy' if kind == 'npy' else '.png'}"
            np.save(path, depth) if kind == "npy" else Image.fromarray(depth.round().astype(np.uint16)).save(path)
            frame["depth_file_path"] = f"depth/{path.name}"

    return rewrite(folder, change)


@pytest.mark.parametrize(
    ("kind", "unit", "values"),
    [
        ("png", 1e-3, {}),
        ("npy", 1.0, {"depth_unit_scale_factor": 1.0}),
        ("png", 1e-3, {"applied_scale": 2.0, "applied_transform": np.eye(4)[:3].tolist()}),
    ],
)
def test_depth_maps_meet_the_surface(tmp_path: Path, kind: str, unit: float, values: dict) -> None:
    folder = write_depths(tmp_path / "scene", kind, unit, **values)
    scene = load_scene(folder)
    assert any("depth maps of 16 of 16 frames are there: --loss.depth" in note for note in scene.notes)
    known = load_keypoints(scene)
    ends = known.rays.origins + known.rays.directions * known.distances[:, None]
    back = scene.to_original / values.get("applied_scale", 1.0) ** 0  # to the exporter's own coordinates
    points = ends.double() @ back[:3, :3].T + back[:3, 3]
    middle, radius = (
        torch.tensor([0.2, -0.1, 0.3]).double() / values.get("applied_scale", 1.0),
        0.5 / values.get("applied_scale", 1.0),
    )
    assert len(known) > 200 and torch.allclose((points - middle).norm(dim=-1), torch.tensor(radius).double(), atol=4e-3)
    assert set(known.rays.camera_indices.tolist()) == set(range(len(scene)))
    assert len(load_keypoints(scene.select([3]))) < len(known) / 8
    (folder / "depth" / scene.depths[0][0].rpartition("/")[2]).write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"depth/1\.(png|npy): expected"):
        load_keypoints(scene)


def test_polycams_depths_are_found(tmp_path: Path) -> None:
    folder = write_polycam(tmp_path / "scene", corrected=False)
    (folder / "keyframes" / "depth").mkdir()
    for path in (folder / "keyframes" / "cameras").iterdir():
        Image.fromarray(np.full((8, 8), 1500, np.uint16)).save(folder / "keyframes" / "depth" / f"{path.stem}.png")
    scene = load_scene(folder)
    known = load_keypoints(scene)
    depths = known.distances * (known.rays.directions * scene.cameras.forward[known.rays.camera_indices]).sum(-1)
    scale = torch.linalg.det(scene.to_original[:3, :3]) ** (1.0 / 3.0)
    assert torch.allclose(depths * scale.float(), torch.tensor(1.5), atol=1e-4)


@pytest.mark.parametrize("place", ["masks", "images_mask", "mask"])
def test_masks_in_folders_of_other_names(tmp_path: Path, place: str) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    (folder / place).mkdir()
    for path in (folder / "images").iterdir():
        Image.new("L", (folders.WIDTH, folders.HEIGHT // 2), 255).resize((folders.WIDTH, folders.HEIGHT)).save(
            folder / place / path.name
        )
    assert any("masks for 14 of 14 images" in note for note in load_scene(folder).notes)


MATRIX = "1 0 0 5\n0 1 0 6\n0 0 1 7\n0.0e+00 0 0 1.0\n"
FOREIGN = {
    "sfm_data.json": '{"sfm_data_version": "0.3", "extrinsics": [{"key": 0, "value": {"rotation": [[1, 0, 0]]}}]}',
    "cameras.sfm": '{"views": [], "poses": [{"poseId": "1", "pose": {}}]}',
    "model.nvm": "NVM_V3\n\n16\n",
    "poses.npy": "anything",
    "blocks.xml": "<BlocksExchange><Block><Photogroups><Photogroup/></Photogroups></Block></BlocksExchange>",
    "trajectory.txt": "0 1 0 0 0 1 0 0 0 1 0 0\n",
    "cams/00000000_cam.txt": "extrinsic\n1 0 0 0\n",
    "odometry.csv": "timestamp, frame, x, y, z, qx, qy, qz, qw\n",
    "cameras.xml": "<document><ch",
    "frame_00001.json": '{"intrinsics": [1, 0], "cameraPoseARFrame": [1, 0, 0, 0]}',
    "arkit.json": '{"frames": [{"cameraTransform": [[1, 0, 0, 0]]}]}',
    "frames.json": '[{"name": "frame1.png", "transform": [1, 0, 0, 0]}]',
    "images/frame-000000.pose.txt": MATRIX,
    "Barn.log": f"0 0 0\n{MATRIX}",
    "KeyFrameTrajectory.txt": "".join(f"{n}.5 1 2 3 0.6 0.0 0.8 0.0\n" for n in range(3)),
    "pmatrix.txt": "".join(f"a b {n}.jpg {' 1.5' * 12}\n" for n in range(3)),
    "external.txt": "imageName X Y Z Omega Phi Kappa\na.jpg 1 2 3 4 5 6\n",
    "semicolon.csv": "#name;x;y;alt;heading;pitch;roll;f;px;py\n",
    "Ori-Abs/Orientation-a.xml": "<ExportAPERO><OrientationConique><Externe/></OrientationConique></ExportAPERO>",
    "odm_report/shots.geojson": '{"features": [{"properties": {"translation": [1, 2, 3]}}]}',
    "openmvg.json": '{"sfm_data_version": "0.3", "views": []}',
    "camera/000001.json": '{"orientation": [[1, 0, 0]]}',
    **{f"images/project{ending}": "anything" for ending in (".camera", ".abc", ".psx", ".psz", ".p4d", ".theia")},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_poses_that_no_format_knows_are_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scene"
    write_images(folder / "images")
    with pytest.raises(MissingPosesError):
        load_scene(folder)
    (folder / "notes.txt").write_text("frame1: the camera was turned, a rotation of 90 degrees")  # of a person
    (folder / "metadata.json").write_text('{"camera": "X-T3", "position": "kitchen"}')
    with pytest.raises(MissingPosesError):
        load_scene(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(FOREIGN[name])
    with pytest.raises(InputError, match=rf"{Path(name).name}: expected poses in a known format.* nerfturbo process"):
        load_scene(folder)
    assert main(["scene", "info", str(folder)]) == 2
    assert Path(name).name in capsys.readouterr().err


DAMAGE: dict[str, tuple[str, str, str, str]] = {  # of a format: file, what is replaced, by what, and what is said
    "opensfm": (
        "reconstruction.json",
        '"rotation"',
        '"rotatoin"',
        r"reconstruction\.json: expected what OpenSfM writes, got no 'rotation'",
    ),
    "opensfm fisheye": ("reconstruction.json", '"fisheye"', '"dual"', r"camera_model: expected one of .* got 'dual'"),
    "metashape": ("cameras.xml", 'sensor_id="3"', 'sensor_id="4"', r"cameras\.xml: expected what Metashape writes"),
    "metashape chunk": ("cameras.xml", "<k4>0.0</k4>", "<k4>0.1</k4>", r"k4: expected 0"),
    "realitycapture csv": (
        "export.csv",
        "pitch",
        "tilt",
        r"export\.csv: expected what RealityCapture writes, got .*pitch",
    ),
    "realitycapture xmp": (
        "images/frame3.xmp",
        "brown3t2",
        "division",
        r"frame3\.xmp: expected one of the brown models, got division",
    ),
    "bundler": ("bundle.out", "19 200", "19 201", r"bundle\.out: expected 19 cameras, as in list\.txt, and points"),
    "nsvf": ("pose/0_2.txt", "e", "x", r"0_2\.txt: expected what NSVF writes, got could not convert"),
    "polycam": (
        "keyframes/corrected_cameras/8000017.json",
        "t_12",
        "t_99",
        r"8000017\.json: expected what Polycam writes, got no 't_12'",
    ),
    "record3d": (
        "metadata.json",
        '"poses": [[',
        '"poses": [["x", ',
        r"metadata\.json: expected what Record3D writes",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_with_the_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CASES[name].write(tmp_path / "scene")
    file, old, new, said = DAMAGE[name]
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with pytest.raises(InputError, match=said):
        load_scene(folder)
    assert main(["scene", "info", str(folder)]) == 2
    assert "Traceback" not in capsys.readouterr().err and before == sorted(
        path.relative_to(folder) for path in folder.rglob("*")
    )


def test_info_tells_every_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bundler(tmp_path / "scene")
    shutil.move(folder / "images", folder / "input")
    assert main(["scene", "info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "Bundler" and found["splits"]["test"]["views"] == 3
    for said in ("one focal length", "found by the end of the path", "1 image without a pose"):
        assert any(said in note for note in found["notes"]), said


def test_images_that_are_missing_do_not_shift_poses(tmp_path: Path) -> None:
    truth = camera_to_world(opengl=True)
    for write, gone in ((write_neus, "image/004.png"), (write_record3d, "rgb/0.jpg")):
        folder = write(tmp_path / write.__name__)
        (folder / gone).unlink()
        views = all_views(folder)
        assert len(views) == N - 1
        for index, scene, view in views:
            assert scene.to_original is not None
            pose, back = scene.cameras.camera_to_world[view].double(), scene.to_original
            position = back[:3, :3] @ pose[:, 3] + back[:3, 3]
            assert torch.allclose(position, torch.from_numpy(truth[index, :3, 3]), atol=1e-4)
    folder = write_neus(tmp_path / "named")
    for file in (folder / "image").iterdir():
        file.rename(file.with_name(f"a{file.name}"))
    (folder / "image" / "a004.png").unlink()
    with pytest.raises(InputError, match=r"cameras_sphere\.npz: expected world_mat of 17 images, got 18"):
        load_scene(folder)


def test_masks_of_neus_go_by_their_numbers(tmp_path: Path) -> None:
    folder = write_neus(tmp_path / "scene")
    for file in (folder / "image").iterdir():
        file.rename(file.with_name(f"{int(file.stem):06d}.png"))  # images and masks in two widths, as DTU has them
    assert load_scene(folder).images.mask is not None


def test_boxes_of_files_bound_the_scene(tmp_path: Path) -> None:
    sides = []
    for reach in (1.0, 8.0):
        folder = write_nsvf(tmp_path / f"box{reach}")
        (folder / "bbox.txt").write_text(f"{-reach} {-reach} {-reach} {reach} {reach} {reach} 0.4")
        scene = load_scene(folder)
        assert scene.grid_levels == 1 and scene.to_original is not None
        sides.append(float(scene.aabb.size[0]) * float(torch.linalg.det(scene.to_original[:3, :3])) ** (1 / 3))
    assert sides[1] > 6.0 * sides[0] >= 12.0


def test_rows_of_llff_are_in_the_order_of_text(tmp_path: Path) -> None:
    """LLFF sorts names as text: 10.png before 2.png."""
    folder = folders.write_llff(tmp_path / "scene")
    names = sorted(f"{index}.png" for index in range(folders.N_VIEWS))
    for old, new in zip(sorted((folder / "images").iterdir()), names, strict=True):
        old.rename(old.with_name(new))
    for split in ("train", "test"):
        scene = load_scene(folder, split)
        assert scene.to_original is not None
        for view in range(len(scene)):
            row = int(scene.images.image_bytes(view)[0, 0, 0])  # red is the number of the pose
            position = scene.to_original[:3, :3] @ scene.cameras.positions[view].double() + scene.to_original[:3, 3]
            assert torch.allclose(position, folders.poses()[row, :, 3].double(), atol=1e-4)


def test_what_is_optional_may_be_missing_and_what_was_removed_stays_away(tmp_path: Path) -> None:
    folder = write_depths(tmp_path / "depths", "png")
    next((folder / "depth").iterdir()).unlink()
    scene = load_scene(folder)
    assert any(note.startswith("warning: depth maps of 15 of 16 frames") for note in scene.notes)
    folder = folders.write_transforms(tmp_path / "removed")
    folders.write_pictures(folder / "images_2")
    (folder / "images" / "view_03.png").unlink()
    used = [file for split in ("train", "test") for file in load_scene(folder, split).files]
    assert len(used) == 15 and not any("images_2" in file for file in used)


@pytest.mark.parametrize(
    ("name", "text"),
    [("camera_settings.txt", "ISO 100 f/8"), ("camera.csv", "Canon,R5"), ("notes/todo.txt", "extrinsic")]
    + [("gps.csv", "time,heading,pitch\n1,2,3\n"), ("metadata.json", '{"author": "me"}')]
    + [("exif.csv", "a.jpg,4000,3000,1,0,0,0,100,8\n" * 4), ("track.log", "1.5,48.1,11.5,520,3.2,90,1.1,9\n" * 4)]
    + [("labels/a.txt", "0 0.1 0.2 0.3 0.4\n" * 4), ("notes.log", "Looking for poses: 0 0 0 1\n0 0 0 1\n")],
)
def test_ordinary_files_beside_photos_are_no_poses(tmp_path: Path, name: str, text: str) -> None:
    write_images(tmp_path / "rgb", ["a", "b", "c"])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    found = recognise(tmp_path)
    assert found is not None and found.name == "photos or video"


@pytest.mark.parametrize(("bundle", "listed"), [("bundle.rd.out", "list.rd.txt"), ("scene.out", "list.txt")])
def test_bundles_of_other_names_are_read(tmp_path: Path, bundle: str, listed: str) -> None:
    folder = write_bundler(tmp_path / "scene")
    (folder / "bundle.out").rename(folder / bundle)
    (folder / "list.txt").rename(folder / listed)
    for file in (folder / "images").iterdir():
        file.rename(file.with_name(f"my {file.name}"))  # a space in the name
    (folder / listed).write_text((folder / listed).read_text().replace("images/", "images/my "))
    if listed != "list.txt":
        (folder / "list.txt").write_text("of others.jpg\n")
    found = recognise(folder)
    assert found is not None and found.name == "Bundler" and len(all_views(folder)) == N
