"""A time limit means it: scores and video stay within the training time, and photos are as large as a CPU can learn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from nerfturbo.cli import finish, session, startup
from nerfturbo.cli.finish import affordable_views, seconds_after
from nerfturbo.data import speed
from nerfturbo.evaluation.run_folder import open_run
from nerfturbo.ops import use_backend
from nerfturbo.ops._cpu import warmup

from ..data import folders
from ..tiny import TINY_FLAGS, ball_scene
from .conftest import Nerfturbo


@pytest.mark.parametrize(
    ("views", "side", "pixels", "expected"),
    [
        (10, 100, 1e6, (10, 1)),  # all of them
        (10, 100, 45_000, (4, 1)),  # fewer
        (10, 1000, 45_000, (2, 7)),  # two, and smaller
        (1, 1000, 45_000, (1, 5)),
        (10, 100, 10.0, (2, 1)),  # never smaller than can be looked at
    ],
)
def test_views_that_fit_the_time(views: int, side: int, pixels: float, expected: tuple[int, int]) -> None:
    chosen, divisor = affordable_views(ball_scene(n_views=views, size=10).cameras.scaled(side / 10), pixels)
    assert (len(chosen), divisor) == expected and chosen[0] == 0


def test_scoring_and_video_take_no_longer_than_training() -> None:
    assert sum(seconds_after(600.0)) == pytest.approx(600.0)


def test_a_score_on_less_says_so(nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored at half the size; the metrics, the images and what is printed agree on it. `eval` scores it all."""
    monkeypatch.setattr(finish, "seconds_a_pixel", lambda model, cameras: 15.0 / 2 / 8**2)
    monkeypatch.setattr(finish, "LEAST_SIDE", 2)
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 2, "--output", "run")
    assert result.code == 0 and "8 x 8 pixels, within the training time" in result.out
    metrics = json.loads(Path("run/metrics.json").read_text())
    protocol = metrics["protocol"]
    assert protocol["resolution"] == [8, 8] and "over 2" in protocol["resolution_source"]
    assert "nerfturbo eval" in protocol["limited_by"] and [view["index"] for view in metrics["per_view"]] == [0, 1]
    assert Image.open("run/images/test_001.png").size == (24, 8)
    assert nerfturbo("eval", "run", "--backend", "reference").code == 0
    protocol = json.loads(Path("run/metrics.json").read_text())["protocol"]
    assert protocol["resolution"] == [16, 16] and "limited_by" not in protocol


def test_views_that_are_asked_for_are_scored(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish, "seconds_a_pixel", lambda model, cameras: 1e9)
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 2, "--eval-views", 2, "--output", "run", "--json")
    assert result.json["protocol"]["resolution"] == [16, 16] and len(result.json["per_view"]) == 2


def test_photos_are_shrunk_to_what_a_cpu_learns(nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.write_transforms(Path("capture"), aabb_scale=1)
    monkeypatch.setattr(session, "LEAST_SIDE", 3)  # a fifth of 24 x 16: what is said is rounded as what is trained on
    monkeypatch.setattr(session, "PIXELS_A_RAY", 1e-3)
    words = ["train", folder, "--steps", 2, *TINY_FLAGS, "--device", "cpu", "--overwrite", "--output", "run"]
    shrunk = nerfturbo(*words)
    divisor = open_run("run").read_config().data.downscale
    assert shrunk.code == 0 and divisor > 1 and "photos shrunk from" in shrunk.err and "--downscale 1" in shrunk.err
    sizes = re.findall(r"to (\d+ x \d+): this CPU|, (\d+ x \d+); writing", shrunk.err)
    assert sizes[0][0] == sizes[1][1], shrunk.err
    assert nerfturbo("eval", "run", "--backend", "reference").code == 0
    kept = nerfturbo(*words, "--downscale", 1)
    assert kept.code == 0 and open_run("run").read_config().data.downscale == 1 and "shrunk" not in kept.err


def test_a_run_says_how_long_it_takes_before_it_has_taken_it(nerfturbo: Nerfturbo, scene: Path) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--time-limit", 3, "--turntable", 1, "--output", "run")
    assert "about 3 s of training, then at most 15 s of scoring and at most 15 s of video" in result.err


def test_the_estimate_counts_kernels_that_are_not_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "machine_speed", lambda: 2.0)
    with use_backend("cpu"):
        monkeypatch.setattr(warmup, "is_cached", lambda: False)
        assert startup.compile_note("cpu") == "about 40 s of compiling kernels (first run only), "
        monkeypatch.setattr(warmup, "is_cached", lambda: True)
        assert startup.compile_note("cpu") == ""
    with use_backend("reference"):
        monkeypatch.setattr(warmup, "is_cached", lambda: False)
        assert startup.compile_note("cpu") == ""


def test_without_a_limit_some_training_tells_how_long_the_rest_takes(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", scene, *TINY_FLAGS, "--steps", 6, "--overwrite", "--output", "run"]
    monkeypatch.setattr(session, "PLAN_TRAINING", 60.0)  # however busy the machine is
    assert "of training, then" not in nerfturbo(*words).err  # over before there is anything to tell
    monkeypatch.setattr(session, "PLAN_TRAINING", 0.0)
    assert nerfturbo(*words).err.count("of training, then at most") == 1


def test_one_of_a_thing_is_not_many(nerfturbo: Nerfturbo, scene: Path) -> None:
    words = ["--steps", 1, "--eval-views", 1, "--turntable", 1, "--output", "one"]
    trained = nerfturbo("train", scene, *TINY_FLAGS, *words)
    rendered = nerfturbo("render", "one", "--frames", 1, "--output", "frames", "--backend", "reference")
    said = trained.err + trained.out + rendered.err + rendered.out
    assert "  1 step; " in said and "rendering 1 frame" in said
    assert not re.findall(r"(?<![.\w])1 [a-z]{2,}s\b", said)


def test_the_end_of_a_run_names_four_commands(nerfturbo: Nerfturbo, scene: Path) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 2, "--output", "my run")
    said = result.out.split("next:\n")[1].splitlines()
    assert [line.split()[:2] for line in said][1:] == [["nerfturbo", word] for word in ("view", "render", "export")]
    assert "'my run/report.html'" in said[0] and all("'my run" in line for line in said)
    command = json.loads(Path("my run/metrics.json").read_text())["command"]
    assert command.startswith("nerfturbo train ") and command.endswith("--output 'my run'")
