"""`export nerfstudio`, and camera paths of nerfstudio's viewer in `render`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nerfturbo.data.cameras import transform_poses
from nerfturbo.data.images import open_image
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import (
    CameraPath,
    capture_path,
    read_camera_path,
    through_parser,
    write_camera_path,
)
from nerfturbo.export.cameras import write_cameras, write_nerfstudio

from ..evaluation.test_camera_path import similarity
from ..tiny import ball_scene
from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]


def test_the_path_stands_in_the_coordinates_of_the_data_parser(tmp_path: Path) -> None:
    """Those in which the cameras' mean is the origin, their mean up axis is z, and the farthest coordinate is 1."""
    scenes = [replace(ball_scene(split), to_original=similarity()) for split in ("train", "test")]
    path, _ = capture_path(scenes[0].cameras, (0.0, 0.0, 0.0), 7)
    assert write_nerfstudio(tmp_path / "new", scenes, path) == 8
    document = json.loads((tmp_path / "new" / "transforms.json").read_text())
    assert document["val_filenames"] == document["test_filenames"] and len(document["frames"]) == 8
    views = [(scene, index) for scene in scenes for index in range(len(scene))]
    for frame, (scene, index) in zip(document["frames"], views, strict=True):  # no files before, as of built-in scenes
        pixels = torch.from_numpy(np.array(open_image(tmp_path / "new" / frame["file_path"])))
        assert torch.equal(pixels, scene.images.image_bytes(index)) and pixels.shape[:2] == (frame["h"], frame["w"])
    file = tmp_path / "new" / "dataparser_transforms.json"
    poses = torch.tensor([frame["transform_matrix"] for frame in document["frames"]], dtype=torch.float64)[:, :3]
    placed = transform_poses(poses, through_parser(file, None))
    assert float(placed[..., 3].mean(0).abs().max()) < 1e-6 and float(placed[..., 3].abs().max()) == pytest.approx(1.0)
    assert torch.nn.functional.normalize(placed[..., 1].mean(0), dim=0).tolist() == pytest.approx([0, 0, 1], abs=1e-6)
    own = through_parser(file, similarity())
    read = read_camera_path(tmp_path / "new" / "camera_path.json", own)
    assert torch.allclose(read.cameras.camera_to_world, path.camera_to_world, atol=1e-4)
    raw = read_camera_path(tmp_path / "new" / "camera_path.json").cameras.camera_to_world.double()
    assert torch.allclose(raw, transform_poses(path.camera_to_world.double(), own), atol=1e-5)


def test_nerfstudio_itself_makes_the_same_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("nerfstudio", reason="nerfstudio is not installed: pip install nerfstudio")
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    from nerfturbo.data.formats.transforms import write_blender
    from nerfturbo.data.scene import load_scene

    folder = write_blender([ball_scene("train"), ball_scene("test", n_views=2)], tmp_path / "ball")
    scenes = [load_scene(folder, split) for split in ("train", "test")]
    write_nerfstudio(tmp_path / "new", scenes, scenes[0].cameras)
    parser = NerfstudioDataParserConfig(data=tmp_path / "new", downscale_factor=1).setup()
    found = parser.get_dataparser_outputs("val")
    ours = json.loads((tmp_path / "new" / "dataparser_transforms.json").read_text())
    assert torch.allclose(found.dataparser_transform, torch.tensor(ours["transform"]), atol=1e-5)
    assert found.dataparser_scale == pytest.approx(ours["scale"], rel=1e-5)
    assert len(found.image_filenames) == 2 and found.image_filenames[0].is_file()


def test_cameras_are_as_large_as_the_files_they_name(tmp_path: Path) -> None:
    """nerfstudio reads the whole photos of a run that was trained with --downscale."""
    from nerfturbo.data.formats.transforms import write_blender
    from nerfturbo.data.scene import load_scene

    folder = write_blender([ball_scene("train"), ball_scene("test", n_views=2)], tmp_path / "ball")
    whole, small = (load_scene(folder, "train", downscale=factor) for factor in (1, 3))
    assert int(small.cameras.size.max()) < int(whole.cameras.size.min())
    for name, scene in (("whole", whole), ("small", small)):
        write_cameras(tmp_path / f"{name}.json", [scene])
    first, second = (json.loads((tmp_path / f"{name}.json").read_text())["frames"][0] for name in ("whole", "small"))
    for key in ("w", "h", "fl_x", "fl_y", "cx", "cy"):
        assert second[key] == pytest.approx(first[key], rel=1e-4), key


def test_what_is_exported_renders_as_the_run_s_own_path(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    made = nerfturbo("export", "nerfstudio", run_folder, "ns", *REFERENCE, "--json")
    assert made.code == 0 and made.json["cameras"] > 0, made.err
    assert made.json["bytes"] == sum(path.stat().st_size for path in Path("ns").iterdir())  # not the folder's own
    assert {path.name for path in Path("ns").iterdir()} == {
        "transforms.json",
        "camera_path.json",
        "dataparser_transforms.json",
    }
    again = nerfturbo("export", "nerfstudio", run_folder, "ns", *REFERENCE)
    assert again.code == 2 and "--overwrite" in again.err
    flags = ["--path", "ns/camera_path.json", "--only", "0", "30", *REFERENCE, "--output"]
    beside = nerfturbo("render", run_folder, *flags, "beside")
    assert beside.code == 0 and "coordinates of ns/dataparser_transforms.json" in beside.err, beside.err
    own = nerfturbo(
        "render", run_folder, "--path", "auto", "--frames", "60", "--only", "0", "30", *REFERENCE, "--output", "own"
    )
    assert own.code == 0, own.err
    for name in ("frame_0000.png", "frame_0030.png"):
        assert Path("own", name).read_bytes() == Path("beside", name).read_bytes()
    Path("ns/dataparser_transforms.json").rename("kept.json")
    given = nerfturbo("render", run_folder, "--dataparser", "kept.json", *flags, "given")
    assert given.code == 0 and Path("given/frame_0030.png").read_bytes() == Path("own/frame_0030.png").read_bytes()
    plain = nerfturbo("render", run_folder, *flags, "plain")
    assert plain.code == 0 and "coordinates of" not in plain.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected a JSON object"),
        ("{}", "transform: expected 16 numbers"),
        ('{"transform": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}', "scale: expected"),
        (
            '{"transform": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], "scale": 0}',
            "scale: expected a number > 0, got 0",
        ),
        ('{"transform": [[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], "scale": 1}', "transform: expected"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError) as caught:
        through_parser(tmp_path / "a.json", None)
    assert "a.json" in str(caught.value) and says in str(caught.value)


def test_a_missing_file_is_refused(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    write_camera_path(Path("p.json"), CameraPath(ball_scene("train").cameras))
    for flags, says in (
        (["--path", "p.json", "--dataparser", "none.json"], "none.json"),
        (["--path", "orbit", "--dataparser", "p.json"], "--dataparser: expected a --path FILE.json, got 'orbit'"),
    ):
        found = nerfturbo("render", run_folder, *flags, *REFERENCE)
        assert found.code == 2 and says in found.err, found.err
