"""What is decided about captures as people leave them: bounded or not, up, which model, which images."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.config import Config, DataConfig
from nerfturbo.data.cameras import look_at
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.placement import place
from nerfturbo.data.scene import Decision, MissingSplitError, Scene, load_scene, open_scenes
from nerfturbo.errors import InputError
from nerfturbo.evaluation import trial
from nerfturbo.presets import preset

from . import captures
from .captures import anywhere, ring, side_by_side, sideways, walk, write_blender, write_colmap, write_transforms

KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "alpha ring": (lambda folder: write_transforms(folder, ring(), backdrop="none"), "bounded"),
    "alpha ring, Blender": (lambda folder: write_blender(folder, ring(), "none"), "bounded"),
    "rendered on white": (lambda folder: write_transforms(folder, ring(), backdrop="white"), "bounded"),
    "rendered on white, Blender": (lambda folder: write_blender(folder, ring(), "white"), "bounded"),
    "rendered on white, COLMAP": (
        lambda folder: write_colmap(folder, ring(), captures.points(), backdrop="white"),
        "bounded",
    ),
    "photo ring, points on the ball": (lambda folder: write_colmap(folder, ring(), captures.points()), "unbounded"),
    "photo ring, far points": (lambda folder: write_colmap(folder, ring(), captures.points(9.0)), "unbounded"),
    "photo ring, no points": (lambda folder: write_transforms(folder, ring()), "unbounded"),
    "photos with camera_angle_x": (lambda folder: write_blender(folder, ring()), "unbounded"),
    "photo arc": (lambda folder: write_colmap(folder, ring(span=90.0), captures.points()), "unbounded"),
    "forward-facing": (lambda folder: write_colmap(folder, side_by_side(), captures.points(1.5)), "unbounded"),
    "walk": (lambda folder: write_colmap(folder, walk(), captures.points(0.7)), "unbounded"),
}


def decision(scene: Scene, what: str) -> Decision:
    return next(note for note in scene.notes if isinstance(note, Decision) and note.what == what)


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_follow_what_the_images_show(tmp_path: Path, kind: str) -> None:
    write, verdict = KINDS[kind]
    folder = write(tmp_path / "scene")
    scene, test = load_scene(folder), load_scene(folder, "test")
    found = decision(scene, "bounds")
    assert found.choice == verdict and scene.extent.kind == verdict and scene.other is None
    assert (test.extent, test.to_original is None) == (scene.extent, scene.to_original is None)
    other = {"bounded": "unbounded", "unbounded": "bounded"}[verdict]
    assert found.flag == f"--bounds {other}" and str(found).endswith(f"({found.flag} overrides)")
    asked = load_scene(folder, options=LoadOptions(bounds=other))  # type: ignore[arg-type]
    assert asked.extent.kind == other and "as asked" in decision(asked, "bounds")
    again = load_scene(folder, options=LoadOptions(bounds=verdict))  # type: ignore[arg-type]
    assert again.extent == scene.extent  # what a run records opens the same scene


def test_masks_that_hide_the_surroundings_make_an_object(tmp_path: Path) -> None:
    folder = write_transforms(tmp_path / "scene", ring())
    assert load_scene(folder).extent.kind == "unbounded"
    captures.write_images(folder / "masks", ring(), "none")
    for path in (folder / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(path))[..., 3]).save(path)
    assert load_scene(folder).extent.kind == "bounded"


def test_things_seen_from_above_are_in_doubt(tmp_path: Path) -> None:
    """All that the images show may be between the cameras: background, but nothing beyond the points."""
    scene = load_scene(write_colmap(tmp_path / "scene", ring(pitch=75.0), captures.points(0.4)))
    assert scene.extent.kind == "unbounded" and scene.other is not None and scene.other.kind == "bounded"
    assert "`train` tries both" in decision(scene, "bounds")
    asked = load_scene(scene.source, options=LoadOptions(bounds="unbounded"))
    assert asked.other is None and asked.extent == scene.extent
    assert scene.within(scene.other).grid_levels == 1 and scene.within(scene.other).other is None


@pytest.mark.parametrize(
    ("backdrop", "lean", "verdict", "steps"),
    [("park", "bounded", "unbounded", 160), ("white", "bounded", "bounded", 60)],
    ids=["park", "white"],
)
def test_a_trial_finds_what_the_images_show(
    tmp_path: Path, backdrop: captures.Backdrop, lean: str, verdict: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out views score better with the bounds that are right; what the cues lean to stays where both are as good.
    By steps, so that a busy machine decides the same."""
    monkeypatch.setattr(trial, "STEPS", steps)
    monkeypatch.setattr(trial, "SECONDS", 600.0)
    scene = load_scene(write_transforms(tmp_path / "scene", ring(24), backdrop=backdrop))
    asked = {
        kind: load_scene(scene.source, options=LoadOptions(bounds=kind)).extent  # type: ignore[arg-type]
        for kind in ("bounded", "unbounded")
    }
    other = "bounded" if lean == "unbounded" else "unbounded"
    start = preset("auto", "cpu")
    start = replace(start, train=replace(start.train, batch_samples=1 << 13))
    doubtful = replace(scene.within(asked[lean]), other=asked[other])
    extent, note = trial.try_bounds(start, doubtful, auto=start, device="cpu")
    print(note)
    left = "bounded" if verdict == "unbounded" else "unbounded"
    assert extent.kind == verdict and note.choice == verdict and note.flag == f"--bounds {left}"
    assert note.count(" dB") == 2


def error_of_up(poses: torch.Tensor, up: torch.Tensor) -> float:
    """Degrees between the up that is found and the true one."""
    cameras = load_cameras(poses)
    found = place(cameras, poses).to_original[:3, 2]
    return math.degrees(math.acos(min(1.0, float(found / found.norm() @ up))))


def load_cameras(poses: torch.Tensor):
    from nerfturbo.data.cameras import Cameras

    return Cameras.pinhole(poses.float(), width=64, height=48, field_of_view_x=0.9)


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize(("span", "pitch"), [(360.0, 25.0), (360.0, 3.0), (120.0, 35.0), (60.0, 30.0), (90.0, 55.0)])
def test_up_of_rings_and_tilted_arcs(span: float, pitch: float, turns: int, noise: float) -> None:
    """Stored upright, on either side or upside down; held with some degrees of roll and pitch."""
    poses, up = anywhere(ring(24, span=span, pitch=pitch))
    draw = torch.Generator().manual_seed(1)
    turn = torch.linalg.matrix_exp(_skew(torch.randn(24, 3, generator=draw, dtype=torch.float64) * math.radians(noise)))
    poses = torch.cat([poses[:, :, :3] @ turn, poses[:, :, 3:]], -1)
    if turns == 2:
        up = -up  # nothing but EXIF tells a capture that hangs upside down
    assert error_of_up(sideways(poses, turns), up) < (3.0 if noise == 0.0 or span > 60.0 else 4.0)


def _skew(v: torch.Tensor) -> torch.Tensor:
    x, y, z = v.unbind(-1)
    zero = torch.zeros_like(x)
    rows = [[zero, -z, y], [z, zero, -x], [-y, x, zero]]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def test_up_of_walks_and_of_cameras_side_by_side() -> None:
    for poses, up in (anywhere(walk()), anywhere(side_by_side())):
        assert error_of_up(poses, up) < 1.0


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_up_of_a_short_arc_whose_height_varies(turns: int) -> None:
    """Both pairs of axes are nearly level, and one of them is much more so."""
    angle = torch.linspace(0.0, 1.0, 20, dtype=torch.float64)
    eyes = torch.stack([3.0 * angle.cos(), 3.0 * angle.sin(), 2.0 + 0.5 * (5.0 * angle).sin()], -1)
    poses, up = anywhere(look_at(eyes, torch.zeros(3, dtype=torch.float64)))
    assert error_of_up(sideways(poses, turns), up) < 1.0


def test_up_of_cameras_that_roll_any_way_is_that_of_their_ring() -> None:
    poses, up = anywhere(ring(24, pitch=20.0))
    roll = torch.rand(24, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 6.28
    right, upward, backward, position = poses.unbind(-1)
    c, s = roll.cos()[:, None], roll.sin()[:, None]
    rolled = torch.stack([right * c + upward * s, upward * c - right * s, backward, position], -1)
    assert error_of_up(rolled, up) < 3.0
    assert "stand in a plane" in place(load_cameras(rolled), rolled).notes[0]


@pytest.mark.parametrize("tag", [6, 8, 3])
def test_exif_says_how_stored_images_are_held(tmp_path: Path, tag: int) -> None:
    """Side by side, level, so that only EXIF knows."""
    turns = {6: 1, 3: 2, 8: 3}[tag]
    poses = side_by_side()
    stated, up = anywhere(sideways(poses, turns))
    folder = write_transforms(tmp_path / "scene", poses, stated=stated, turns=turns)
    exif = Image.Exif()
    exif[0x0112] = tag
    for path in (folder / "images").iterdir():
        Image.open(path).save(path, exif=exif)
    scene = load_scene(folder)
    assert scene.to_original is not None
    found = scene.to_original[:3, 2] / scene.to_original[:3, 2].norm()
    assert math.degrees(math.acos(min(1.0, float(found @ up)))) < 1.0
    assert np.array_equal(scene.images.image_bytes(0).numpy(), np.asarray(Image.open(scene.files[0])))  # as stored


@pytest.mark.parametrize("axis", ["x", "-y", "z"])
@pytest.mark.parametrize("kind", ["alpha ring, Blender", "photo ring, no points", "aabb_scale"])
def test_up_may_be_chosen_by_hand(tmp_path: Path, kind: str, axis: str) -> None:
    if kind == "aabb_scale":
        folder = write_transforms(tmp_path / "scene", ring())
        document = json.loads((folder / "transforms.json").read_text())
        (folder / "transforms.json").write_text(json.dumps(document | {"aabb_scale": 4}))
    else:
        folder = KINDS[kind][0](tmp_path / "scene")
    scene = load_scene(folder, options=LoadOptions(up=axis))  # type: ignore[arg-type]
    back = scene.to_original
    assert back is not None
    expected = torch.zeros(3, dtype=torch.float64)
    expected["xyz".index(axis[-1])] = -1.0 if axis[0] == "-" else 1.0
    assert torch.allclose(back[:3, 2] / back[:3, 2].norm(), expected, atol=1e-6)
    assert "as asked" in decision(scene, "up")
    original = scene.cameras.positions.double() @ back[:3, :3].T + back[:3, 3]
    plain = load_scene(folder)
    there = plain.cameras.positions.double()
    if plain.to_original is not None:
        there = there @ plain.to_original[:3, :3].T + plain.to_original[:3, 3]
    assert torch.allclose(original, there, atol=1e-5)


def test_a_config_records_bounds_and_up() -> None:
    data = DataConfig().placed("unbounded", "-y")
    assert data.bounds == "unbounded up -y" and data.placed("bounded").bounds == "bounded up -y"
    assert data.placed() == data and data.placed(up="auto") == DataConfig(bounds="unbounded")
    options = LoadOptions.of(data)
    assert (options.bounds, options.up) == ("unbounded", "-y")
    for wrong in ("endless", "auto up", "auto up w", "up x"):
        with pytest.raises(InputError, match=r"(bounds|up): expected one of auto, "):
            LoadOptions.of(DataConfig(bounds=wrong))
    note = Decision.of("up", "up is z", "as asked", "--up x")
    assert pickle.loads(pickle.dumps(note)) == note and pickle.loads(pickle.dumps(note)).flag == "--up x"


def test_runs_of_before_are_placed_as_they_were(tmp_path: Path) -> None:
    """Version 1 of config.json: the mean of the up axes."""
    from nerfturbo.evaluation.run_folder import create_run

    poses = ring(span=250.0, pitch=35.0)
    folder = write_colmap(tmp_path / "scene", poses, captures.points())
    config = Config(data=DataConfig(source=str(folder)))
    run = create_run(tmp_path / "run", config)
    assert run.read_config() == config
    document = json.loads(run.config_file.read_text())
    run.config_file.write_text(json.dumps(document | {"version": 1}))
    data = run.read_config().data
    assert data.bounds == "auto up mean"
    old, new = load_scene(folder, options=LoadOptions.of(data)), load_scene(folder)
    assert old.to_original is not None and new.to_original is not None
    mean = poses[:, :, 1].mean(0)
    assert torch.allclose(old.to_original[:3, 2] / old.to_original[:3, 2].norm(), mean / mean.norm(), atol=1e-5)
    assert float(new.to_original[2, 2] / new.to_original[:3, 2].norm()) > 0.999


def test_the_largest_of_several_models_is_taken(tmp_path: Path) -> None:
    poses = ring()
    folder = write_colmap(tmp_path / "scene", poses[:3], captures.points(), model="sparse/0")
    names = captures.write_images(folder / "images", poses)
    captures.write_model(folder / "sparse" / "1", names[:12], poses[:12], captures.points())
    captures.write_model(folder / "sparse" / "10", names[12:], poses[12:], captures.points())
    train, test = open_scenes(folder)
    assert len(train) + len(test) == 12
    found = decision(train, "model")
    assert found.choice == "sparse/1" and "12 images" in found and "sparse/10 (4), sparse/0 (3)" in found
    assert any(note.startswith("warning: 4 of 16 images have no pose and are left out, as ") for note in train.notes)
    shutil.rmtree(folder / "sparse" / "0")
    assert len(load_scene(folder)) == len(train)  # a model need not be the first


def test_missing_images_of_blender_splits_are_skipped(tmp_path: Path) -> None:
    folder = write_blender(tmp_path / "scene", ring(), "none")
    (folder / "train" / "002.png").unlink()
    (folder / "test" / "000.png").unlink()
    train, test = open_scenes(folder)
    assert (len(train), len(test), test.split) == (11, 3, "test")
    for split in ("train", "test"):
        expected = f"warning: transforms_{split}.json: skipped 1 frame: image files missing"
        assert expected in train.notes
    assert all("002" not in file for file in train.files)


@pytest.mark.parametrize("backdrop", ["none", "park"])
def test_an_incomplete_test_split_stops_nothing(tmp_path: Path, backdrop: captures.Backdrop) -> None:
    folder = write_blender(tmp_path / "scene", ring(20), backdrop)
    shutil.rmtree(folder / "test")
    train, test = open_scenes(folder)
    assert len(train) + len(test) == 16 and test.split == "train"  # some of the training views are scored
    (said,) = (note for note in train.notes if "test split left out" in note)
    assert "transforms_test.json" in said and "no such file './test/000'" in said
    with pytest.raises(MissingSplitError, match=r"transforms_test\.json: frame 0"):
        load_scene(folder, "test")
    shutil.rmtree(folder / "train")
    with pytest.raises(InputError, match=r"transforms_train\.json: frame 0: file_path"):
        open_scenes(folder)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("blender/lego", "bounded"),
        ("blender/mic", "bounded"),
        ("dnerf/lego", "bounded"),
        ("ngp/fox", "unbounded"),
        ("ngp/fruit", "unbounded"),
        ("mip360/bicycle", "unbounded"),
        ("colmap/beer", "unbounded"),
        ("llff/fern", "unbounded"),
    ],
)
def test_real_captures(scene_dir: Callable[[str], Path], name: str, verdict: str) -> None:
    split = "val" if name == "dnerf/lego" else "test"
    scene = load_scene(scene_dir(name), split, downscale=16)
    assert decision(scene, "bounds").choice == scene.extent.kind == verdict and scene.other is None
    assert scene.cameras.camera_to_world[:, 2, 1].mean() > 0.5  # +z is up


def test_runs_of_version_1_keep_their_bounds(tmp_path: Path) -> None:
    """Points between the cameras of a ring made a scene bounded in one box about the cameras, whatever images show."""
    from nerfturbo.data.cameras import Cameras

    cameras = Cameras.pinhole(ring(24).float(), width=32, height=32, field_of_view_x=0.8)
    points = 0.3 * torch.nn.functional.normalize(torch.randn(200, 3, generator=torch.Generator().manual_seed(1)), dim=1)
    old = place(cameras, ring(24).double(), points.double(), options=LoadOptions(up="mean"))
    assert old.extent.grid_levels == 1 and old.extent.aabb.high == (1.0, 1.0, 1.0) and old.other is None
    now = place(cameras, ring(24).double(), points.double())
    assert now.extent.grid_levels == 2
