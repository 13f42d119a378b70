"""The trainers' benchmark: a loop that trains something else is named, and never timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is an extra and not installed")

from common import run_study
from nerfturbo.data.formats.transforms import write_blender
from nerfturbo.ops import use_backend
from trainers import LABELS, compare_losses, draw_bars, main

from ..tiny import TINY_FLAGS, ball_scene

SETTINGS = TINY_FLAGS[: TINY_FLAGS.index("--backend")]


def test_other_losses_are_named() -> None:
    truth = {1: 0.5, 2: 0.4}
    assert compare_losses({1: 0.5, 2: 0.4001}, truth) == "passed"
    assert compare_losses({1: 0.5, 2: 0.41}, truth) == "the loss of step 2 is 0.41, the first loop's 0.4"
    assert compare_losses({1: float("nan")}, truth).startswith("the loss of step 1 is nan")


@pytest.mark.filterwarnings("ignore")
def test_five_loops_train_the_same(tmp_path: Path) -> None:
    scene, output = tmp_path / "ball", tmp_path / "trainers.json"
    write_blender([ball_scene("train"), ball_scene("test", n_views=2)], scene)
    flags = ["--steps", "6", "--rounds", "1", "--eval-views", "1", "--output", str(output), "--device", "cpu"]
    with use_backend("reference"):
        assert run_study(main, [str(scene), *SETTINGS, *flags]) == 0
    record = json.loads(output.read_text())
    loops = record["values"]["loops"]
    assert [loop["loop"] for loop in loops] == ["plain", "native", "lightning", "lightning captured", "fabric"]
    for loop in loops:
        assert loop["gate"] == "passed" and loop["step_ms"] > 0.0 and 3 <= loop["lines"] <= 25
        assert loop["psnr"] == pytest.approx(loops[0]["psnr"], abs=1e-2)
        assert LABELS[loop["loop"]] in output.with_suffix(".svg").read_text()
    assert loops[0]["ratio"] == 1.0 and "median over rounds" in record["protocol"]


@pytest.mark.filterwarnings("ignore")
def test_some_loops_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene, output = tmp_path / "ball", tmp_path / "trainers.json"
    write_blender([ball_scene("train"), ball_scene("test", n_views=2)], scene)
    flags = ["--steps", "6", "--rounds", "1", "--eval-views", "1", "--output", str(output), "--device", "cpu"]
    with use_backend("reference"):
        loops = ["--loops", "native", "lightning-captured"]
        assert run_study(main, [str(scene), *SETTINGS, *flags, *loops]) == 0
        found = json.loads(output.read_text())["values"]["loops"]
        assert [loop["loop"] for loop in found] == ["native", "lightning captured"] and found[0]["ratio"] == 1.0
        assert run_study(main, [str(scene), *SETTINGS, *flags, "--loops", "mine"]) == 2
    assert "native eager" not in (said := capsys.readouterr().err) and "lightning captured" in said and "'mine'" in said


def test_a_plot_of_nothing_is_a_plot(tmp_path: Path) -> None:
    assert draw_bars(tmp_path / "a.svg", [], "empty").read_text().startswith("<svg")
