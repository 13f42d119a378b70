"""`nerfturbo export web` from a run folder: the page, the folder, what is said, and what is left alone."""

from __future__ import annotations

from pathlib import Path

from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.types import Aabb

from .conftest import Nerfturbo

FLAGS = ["--tune-seconds", "1", "--eval-views", "1"]
PAGES = (("b", []), ("c", ["--phone"]))


def test_a_run_becomes_a_page_and_a_folder(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    made = nerfturbo("export", "web", run_folder, "a.html", *FLAGS, "--name", "<ball>", "--json")
    assert made.code == 0, made.err
    said = made.json
    assert Path("a.html").stat().st_size == said["bytes"] < 30e6 and said["score"]["views"] == 1
    assert said["blocks"] > 0 and said["bake_seconds"] <= said["seconds"] and said["tune_steps"] > 0
    assert "<title>&lt;ball&gt;</title>" in Path("a.html").read_text("utf-8")
    words = ["--tune-steps", "2", "--eval-views", "0", "--json"]
    counted = [nerfturbo("export", "web", run_folder, f"{name}.html", *words, *flag).json for name, flag in PAGES]
    assert [made["budget_mb"] for made in counted] == [30.0, 8.0] and said["scored_size"][0] > 0
    assert [made["tune_steps"] for made in counted] == [2, 2] and counted[0]["data_bytes"] == counted[1]["data_bytes"]
    refused = nerfturbo("export", "web", run_folder, "d.html", "--tune-steps", "0")
    assert refused.code == 2 and "--tune-steps: expected a number > 0, got 0" in refused.err
    again = nerfturbo("export", "web", run_folder, "a.html", *FLAGS)
    assert again.code == 2 and "--overwrite" in again.err
    folder = nerfturbo("export", "web", run_folder, "site", *FLAGS, "--split", "--tune-seconds", "0")
    assert folder.code == 0 and "serve the folder" in folder.out, folder.err
    assert "dB against the field" in folder.out and folder.out.count("; 1 test view\n") == 1
    assert {"index.html", "main.js", "data"} <= {path.name for path in Path("site").iterdir()}
    assert sorted(path.name for path in Path(".").iterdir()) == ["a.html", "b.html", "c.html", "site"]


def test_a_page_takes_the_crop_that_was_saved_with_the_run(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    words = ["--tune-steps", "2", "--eval-views", "1", "--json"]
    whole = nerfturbo("export", "web", run_folder, "whole.html", *words, "--eval-views", "0").json
    RunFolder(run_folder).write_crop(Aabb((-1.5, -1.5, -1.5), (1.5, 1.5, 0.0)))
    half = nerfturbo("export", "web", run_folder, "half.html", *words)
    assert half.code == 0 and "as saved in the viewer" in half.err, half.err
    tall, low = (made["cells"][2] * made["voxel"] for made in (whole, half.json))
    assert low < tall and half.json["vertices"] < 0.75 * whole["vertices"], (tall, low, half.json, whole)
    assert half.json["score"]["against_photos"] is None and half.json["score"]["against_field"] > 15.0
