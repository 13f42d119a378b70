"""Refinement from the command line: train, export the cameras, open them again, render, score with poses fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nerfturbo.data.scene import load_scene
from nerfturbo.training.checkpoint import latest_checkpoint
from nerfturbo.training.trainer import load_model

from ..data import folders
from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]
LEARN = ["--cameras.refine", "--cameras.focal", "--cameras.distortion", "--photo.exposure", "--photo.appearance", "3"]


@pytest.mark.parametrize("kind", ["transforms", "colmap"])
def test_cameras_are_learned_exported_and_opened_again(nerfturbo: Nerfturbo, tmp_path: Path, kind: str) -> None:
    write = {"transforms": lambda at: folders.write_transforms(at, aabb_scale=2), "colmap": folders.write_colmap}
    folder = write[kind](tmp_path / "scene")
    flags = [*TINY_FLAGS, "--steps", 6, "--output", "run", "--grid.levels", 1]
    assert nerfturbo("train", folder, *flags, *LEARN).code == 0
    result = nerfturbo("export", "cameras", "run", folder / "new" / "transforms.json", *REFERENCE, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert found["cameras"] == folders.N_VIEWS and found["learned"] and found["turned_degrees"] > 0.0
    assert found["focal_factor"] != 1.0
    document = json.loads((folder / "new" / "transforms.json").read_text())
    assert len(document["test_filenames"]) == 2 and ("aabb_scale" in document) == (kind == "transforms")
    for frame in document["frames"]:  # beside the pictures, as a scene of its own
        frame["file_path"] = frame["file_path"].removeprefix("../")
    for split in ("train_filenames", "test_filenames"):
        document[split] = [name.removeprefix("../") for name in document[split]]
    (folder / "transforms.json").write_text(json.dumps(document))
    again, model = load_scene(folder), load_model(latest_checkpoint(Path("run")))
    assert model.photos is not None and len(again) == model.photos.n_photos
    (folder / "transforms.json").unlink()
    given = load_scene(write[kind](tmp_path / "other") if kind == "transforms" else folder)
    learned = model.photos.refined(given.cameras)
    assert torch.allclose(again.cameras.focal, learned.focal, rtol=1e-5)
    assert learned.distortion is not None and again.cameras.distortion is not None and learned.distortion.any()
    assert torch.allclose(again.cameras.distortion, learned.distortion, rtol=1e-4)
    if kind == "transforms":  # its box is given, so that the place is the same
        assert torch.allclose(again.cameras.camera_to_world, learned.camera_to_world, atol=1e-5)


def test_frames_have_the_look_of_a_photo_and_test_views_can_be_fitted(nerfturbo: Nerfturbo, scene: Path) -> None:
    assert nerfturbo("train", scene, *TINY_FLAGS, *LEARN, "--steps", 4, "--output", "run").code == 0
    render = ["render", "run", "--path", "train", "--frames", 1, *REFERENCE]
    assert nerfturbo(*render, "--output", "mean").code == 0
    assert nerfturbo(*render, "--photo", 1, "--output", "one").code == 0
    first, second = (sorted(Path(name).rglob("*.png")) for name in ("mean", "one"))
    assert len(first) == len(second) == 1
    assert "a training image from 0 to 3" in nerfturbo(*render, "--photo", 4, "--output", "x").err
    result = nerfturbo("eval", "run", "--align-poses", 2, "--json", *REFERENCE)
    assert result.code == 0 and result.json["poses_aligned"] == 2, result.err
    assert "--align-poses: expected a number of steps" in nerfturbo("eval", "run", "--align-poses", -1).err
    assert result.json["right_halves"] is None
    told = nerfturbo("eval", "run", "--fit-looks", 2, *REFERENCE)
    halves = json.loads(Path("run/metrics.json").read_text())["right_halves"]
    assert told.code == 0 and f"right halves, looks fitted to the left ones: {halves['psnr']:.2f} dB" in told.out
    assert halves["steps"] == 2 and len(halves["per_view"]) == len(result.json["per_view"]) and halves["psnr"] > 0.0
    assert "--fit-looks: expected a number of steps" in nerfturbo("eval", "run", "--fit-looks", -1).err


def test_a_run_that_learned_no_looks_has_none_to_fit(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    result = nerfturbo("eval", run_folder, "--fit-looks", 2, *REFERENCE)
    assert result.code == 2 and "--fit-looks: expected a run with --photo.exposure or --photo.appearance" in result.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--photo.appearance", 99], "photo.appearance: expected a whole number from 0 to 48, got 99"),
        (["--loss.depth", -1], "loss.depth: expected a number >= 0, got -1.0"),
        (["--loss.depth", 1], "expected a COLMAP reconstruction"),
    ],
)
def test_bad_values_are_named(nerfturbo: Nerfturbo, scene: Path, flags: list[object], says: str) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 2, "--output", "run", *flags)
    assert result.code == 2 and says in result.err and not Path("run").exists(), result.err


def test_a_run_without_refinement_exports_its_cameras_as_given(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    result = nerfturbo("export", "cameras", run_folder, "a.json", *REFERENCE)
    assert result.code == 0 and "as they were given" in result.out
    assert "ending in .json" in nerfturbo("export", "cameras", run_folder, "a.txt", *REFERENCE).err
    render = nerfturbo("render", run_folder, "--photo", 0, "--output", "x", *REFERENCE)
    assert render.code == 2 and "learned the look of its photos" in render.err
