"""`nerfturbo render`: paths, channels, outputs, and going on with a broken sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nerfturbo.evaluation.camera_path import CameraPath, write_camera_path

from ..tiny import ball_scene
from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]


@pytest.mark.parametrize("path", ["spiral", "interpolate", "train"])
def test_every_path_renders(nerfturbo: Nerfturbo, run_folder: Path, path: str) -> None:
    result = nerfturbo("render", run_folder, "--path", path, "--frames", 2, "--output", "out", *REFERENCE)
    assert result.code == 0 and len(list(Path("out").glob("frame_*.png"))) == 2


def test_channels_go_to_files_of_their_own(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    words = ["--show", "color", "depth", "normal", "opacity", "--frames", 2, "--output", "a.gif", "seq"]
    result = nerfturbo("render", run_folder, *words, *REFERENCE)
    assert result.code == 0 and result.out.split() == ["a.gif", "seq"]
    assert sorted(path.name for path in Path(".").glob("*.gif")) == [
        *("a.gif", "a_depth.gif", "a_normal.gif", "a_opacity.gif")
    ]
    assert len(list(Path("seq").glob("*.png"))) == 8


def test_a_broken_sequence_is_gone_on_with(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    words = ["render", run_folder, "--frames", 4, "--output", "seq", *REFERENCE]
    assert nerfturbo(*words).code == 0
    files = sorted(Path("seq").glob("*.png"))
    before = [file.read_bytes() for file in files]
    files[2].unlink()
    kept = files[1].stat().st_mtime_ns
    again = nerfturbo(*words)
    assert again.code == 0 and "3 of 4 frames are there" in again.err
    assert files[1].stat().st_mtime_ns == kept and [file.read_bytes() for file in files] == before
    other = nerfturbo(*words, "--background", "black")
    assert other.code == 2 and "--overwrite" in other.err and [file.read_bytes() for file in files] == before


def test_less_memory_gives_the_same_pixels(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    words = ["render", run_folder, "--path", "test", "--frames", 1, *REFERENCE]
    assert nerfturbo(*words, "--output", "a").code == 0
    assert nerfturbo(*words, "--output", "b", "--max-memory", 0.01).code == 0
    assert Path("a/frame_0000.png").read_bytes() == Path("b/frame_0000.png").read_bytes()
    assert nerfturbo("eval", run_folder, "--eval-views", 1, "--max-memory", 1, *REFERENCE).code == 0
    for verb in ("render", "eval"):
        refused = nerfturbo(verb, run_folder, "--max-memory", 0)
        assert refused.code == 2 and "--max-memory: expected megabytes > 0, got 0" in refused.err


def test_a_camera_path_file_and_chosen_frames(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    from PIL import Image

    write_camera_path(Path("mine.json"), CameraPath(ball_scene(n_views=5, size=12).cameras, fps=10))
    result = nerfturbo("render", run_folder, "--path", "mine.json", "--only", "0", "3-4", "--output", "o", *REFERENCE)
    assert result.code == 0
    assert sorted(path.name for path in Path("o").glob("*.png")) == [f"frame_{k:04d}.png" for k in (0, 3, 4)]
    assert Image.open("o/frame_0003.png").size == (12, 12)
    document = json.loads(Path("mine.json").read_text())
    Path("mine.json").write_text(json.dumps(document | {"camera_path": [{}]}))
    broken = nerfturbo("render", run_folder, "--path", "mine.json", "--output", "p")
    assert broken.code == 2 and "camera_path[0]" in broken.err and not Path("p").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--path", "sideways"], "--path: expected one of auto, orbit"),
        (["--path", "obrit"], "got 'obrit'; did you mean orbit?"),
        (["--path", "none.json"], "no such file none.json"),
        (["--only", "x"], "--only"),
        (["--only", "99"], "frames from 0 to 59"),
        (["--crop", *"555666"], "what is occupied lies in"),
        (["--crop", *"555111"], "--crop: expected three finite numbers and three larger ones, got 5 5 5 1 1 1"),
        (["--scale", "1e6"], "--scale: expected frames of at most 16384 pixels"),
        (["--output", "a", "b"], "at most one folder"),
        (["--time", "2"], "--time"),
        (["--fps", "0"], "--fps"),
    ],
)
def test_bad_flags_are_refused_and_nothing_is_written(
    nerfturbo: Nerfturbo, run_folder: Path, flags: list[str], says: str
) -> None:
    output = [] if "--output" in flags else ["--output", "out"]
    result = nerfturbo("render", run_folder, *flags, *output, *REFERENCE)
    assert result.code == 2 and says in result.err and not list(Path(".").iterdir()), result.err
