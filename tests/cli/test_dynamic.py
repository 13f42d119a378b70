"""The command line over a scene that moves: auto says what it picks, a render takes a time, bad flags are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nerfturbo.cli.main import main
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.formats.transforms import write_blender

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenes = [builtin_scene("seesaw", split, resolution=16, n_views=n) for split, n in (("train", 6), ("test", 2))]
    return write_blender(scenes, tmp_path_factory.mktemp("scenes") / "seesaw")


@pytest.fixture(scope="module")
def moved(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "moved"
    flags = [*TINY_FLAGS, "--backend", "cpu", "--turntable", "2", "--steps", "30", "--output", str(folder)]
    assert main(["train", str(moving), *flags]) == 0
    return folder


def frames(folder: str) -> np.ndarray:
    from PIL import Image

    return np.stack([np.asarray(Image.open(file), dtype=float) for file in sorted(Path(folder).glob("frame_*.png"))])


def test_auto_picks_the_preset_that_follows_motion(moving: Path, moved: Path, nerfturbo: Nerfturbo) -> None:
    config = json.loads((moved / "config.json").read_text())["config"]
    assert config["preset"] == "dynamic-cpu" and config["field"]["kind"] == "ngp-time"
    assert config["grid"] | {"resolution": 8, "moments": 2} == config["grid"]  # by hand; of the preset
    again = nerfturbo("train", moving, *TINY_FLAGS, "--steps", 2, "--output", "o")
    assert again.code == 0 and "preset dynamic-cpu, because the images have times" in again.err
    still = nerfturbo("train", moving, *TINY_FLAGS, "--preset", "ngp-cpu", "--steps", 2, "--output", "p")
    assert still.code == 0 and "warning" in still.err and "dynamic" in still.err


def test_renders_take_a_time(moved: Path, nerfturbo: Nerfturbo) -> None:
    words = ["render", moved, "--backend", "reference", "--frames", 3]
    assert nerfturbo(*words, "--path", "still", "--view", 1, "--output", "a").code == 0
    runs = frames("a")
    assert np.abs(runs[0] - runs[2]).mean() > 0.05, "the camera stands still, the scene does not"
    assert nerfturbo(*words, "--path", "still", "--view", 1, "--time", 1.0, "--output", "b").code == 0
    held = frames("b")
    assert np.array_equal(held[0], held[2]) and np.array_equal(held[0], runs[2])
    assert nerfturbo(*words, "--path", "test", "--output", "c").code == 0
    assert nerfturbo(*words, "--path", "test", "--time", 0.9, "--output", "d").code == 0
    assert not np.array_equal(frames("c"), frames("d"))
    assert nerfturbo(*words, "--path", "orbit", "--output", "e.gif").code == 0 and Path("e.gif").is_file()


def test_what_means_nothing_is_refused(moved: Path, run_folder: Path, nerfturbo: Nerfturbo) -> None:
    for words, told in (
        ([moved, "--time", "1.5"], "--time"),
        ([moved, "--path", "still", "--view", "9"], "--view"),
        ([run_folder, "--time", "0.5"], "a scene that moves"),
        ([run_folder, "--path", "still"], "a scene that moves"),
    ):
        result = nerfturbo("render", *words, "--output", "no")
        assert result.code == 2 and told in result.err and not Path("no").exists(), words
    for flag, value, told in (
        ("--grid.moments", "9", "grid.moments: expected a whole number from 0 to 4, got 9"),
        ("--field.motion-resolution", "0", "field.motion_resolution: expected a whole number from 8 to 4096, got 0"),
    ):
        result = nerfturbo("train", "seesaw", "--preset", "dynamic-cpu", flag, value, "--output", "no")
        assert result.code == 2 and told in result.err and not Path("no").exists(), flag


def test_splats_are_compared_with_photos_of_their_moment_alone(moving: Path, moved: Path, nerfturbo: Nerfturbo) -> None:
    times = [frame["time"] for frame in json.loads((moving / "transforms_test.json").read_text())["frames"]]
    assert len(times) == 2 and min(times) > 0.1  # splats show time 0
    words = ["--splats", 60, "--tune-seconds", 0, "--eval-views", 2, "--backend", "reference", "--json"]
    result = nerfturbo("export", "splats", moved, "a.ply", *words)
    assert result.code == 0, result.err
    assert result.json["score"]["views"] == 2 and result.json["score"]["against_photos"] is None
