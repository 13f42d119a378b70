"""`nerfturbo export`: every kind from a run folder, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.types import Aabb

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]


@pytest.mark.parametrize(
    ("kind", "out", "flags"),
    [
        ("mesh", "a.glb", ["--resolution", "16", "--density", "0.5", "--keep-hidden"]),
        ("points", "a.ply", ["--points", "50"]),
        ("splats", "a.ply", ["--splats", "60", "--tune-seconds", "0.2", "--eval-views", "1"]),
        ("splats", "a.splat", ["--splats", "60", "--tune-seconds", "0", "--eval-views", "0"]),
        ("grid", "a.npz", []),
    ],
)
def test_every_export_writes_its_file(
    nerfturbo: Nerfturbo, run_folder: Path, kind: str, out: str, flags: list[str]
) -> None:
    result = nerfturbo("export", kind, run_folder, out, *flags, *REFERENCE, "--json")
    if kind in ("points", "splats") and result.code == 2:  # twelve steps may leave nothing solid to see
        assert "at least one that a camera sees" in result.err
        return
    assert result.code == 0, result.err
    assert Path(out).stat().st_size == result.json["bytes"] > 0 and result.json["seconds"] > 0
    assert RunFolder(run_folder).read_metrics()["exports"][out] == result.json
    if kind == "splats":
        header = Path(out).read_bytes().find(b"end_header\n") + len("end_header\n") if out == "a.ply" else 0
        assert result.json["bytes"] == header + (248 if header else 32) * result.json["splats"] > header
        assert (result.json["score"] or {"views": 0})["views"] == result.json["poses_aligned"] + int(flags[-1])
    again = nerfturbo("export", kind, run_folder, out, *flags, *REFERENCE)
    assert again.code == 2 and "--overwrite" in again.err


def test_a_textured_mesh_is_two_files_and_a_score(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    flags = ["--texture", "--texture-size", "128", "--resolution", "16", "--density", "0.5", "--faces", "200"]
    result = nerfturbo("export", "mesh", run_folder, "a.obj", *flags, "--keep-hidden", *REFERENCE, "--json")
    assert result.code == 0, result.err
    assert result.json["files"] == ["a.glb", "a.obj", "a.mtl", "a.png"]
    assert all(Path(name).stat().st_size > 0 for name in result.json["files"])
    score = result.json["texture"]
    assert 0.0 < score["against_photos"] < 60.0 and 0.0 < score["covered"] <= 1.0 and score["views"] > 0
    Path("a.obj").unlink()
    again = nerfturbo("export", "mesh", run_folder, "a.obj", *flags, *REFERENCE)
    assert again.code == 2 and "a.glb: expected a new file" in again.err and not Path("a.obj").exists()


def test_a_mesh_of_an_unbounded_scene_ends_at_its_box(nerfturbo: Nerfturbo, scene: Path) -> None:
    """Levels double what a grid holds: at the same voxels, six of them would be far more than any memory."""
    flags = ["--steps", 2, "--grid.levels", 6, "--output", "run"]
    trained = nerfturbo("train", scene, *TINY_FLAGS, *flags)
    assert trained.code == 0, trained.err
    small = ["--resolution", "64", "--keep-hidden", *REFERENCE, "--json"]
    made = nerfturbo("export", "mesh", "run", "a.glb", "--density", "1e-4", *small)
    assert made.code == 0 and "inside the scene's box; --box takes another" in made.err, made.err
    assert max(high - low for low, high in zip(made.json["low"], made.json["high"], strict=True)) < 4.0


def test_exports_take_the_crop_that_was_saved_with_the_run(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    flags = ["--resolution", "16", "--density", "0.5", "--keep-hidden", *REFERENCE, "--json"]
    whole = nerfturbo("export", "mesh", run_folder, "whole.glb", *flags)
    low, high = whole.json["low"], whole.json["high"]
    assert "crop" not in whole.err
    box = Aabb(tuple(low), (*high[:2], 0.5 * (low[2] + high[2])))
    RunFolder(run_folder).write_crop(box)
    half = nerfturbo("export", "mesh", run_folder, "half.glb", *flags)
    assert half.json["high"][2] == pytest.approx(box.high[2]) and half.json["faces"] < whole.json["faces"]
    assert half.err.count("as saved in the viewer; --no-crop or --box override it") == 1
    for name, override in (("all.glb", ["--no-crop"]), ("given.glb", ["--box", *low, *high])):
        other = nerfturbo("export", "mesh", run_folder, name, *flags, *override)
        assert other.json["faces"] == whole.json["faces"] and "saved in the viewer" not in other.err
    RunFolder(run_folder).write_crop(Aabb.cube(1.0, (50.0, 0.0, 0.0)))
    for kind, out in (("mesh", "a.ply"), ("points", "a.ply"), ("splats", "a.ply"), ("web", "a.html")):
        empty = nerfturbo("export", kind, run_folder, out, *REFERENCE)
        assert empty.code == 2 and "crop.json: expected a box that holds a part of the scene" in empty.err, empty.err
        assert not Path(out).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mesh", "RUN", "a.stl"], "ending in .glb, .ply, .obj"),
        (["mesh", "RUN", "a.glb", "--density", "-1"], "--density"),
        (["mesh", "RUN", "a.ply", "--texture"], "--texture: expected a file ending in .glb, .obj, .usdz, got a.ply"),
        (["mesh", "RUN", "a.glb", "--texture", "--texture-size", "0"], "--texture-size"),
        (["mesh", "RUN", "a.glb", "--resolution", "2"], "--resolution"),
        (["mesh", "RUN", "a.glb", "--box", *"555666"], "what is occupied lies in"),
        (["mesh", "RUN", "a.glb", "--density", "1e9", "--resolution", "16"], "densest point"),
        (["points", "RUN", "a.obj"], "ending in .ply"),
        (["points", "RUN", "a.ply", "--points", "0"], "--points"),
        (["splats", "RUN", "a.spz"], "ending in .ply, .splat, .html"),
        (["splats", "RUN", "a.ply", "--splats", "0"], "--splats"),
        (["splats", "RUN", "a.ply", "--tune-seconds", "-1"], "--tune-seconds"),
        (["grid", "RUN", "a.npy"], "ending in .npz"),
        (["onnx", "RUN", "a.pt"], "ending in .onnx"),
        (["web", "RUN", "a.txt"], "ending in .html"),
        (["web", "RUN", "a.html", "--split"], "the name of a folder"),
        (["web", "RUN", "a.html", "--budget-mb", "0"], "--budget-mb"),
        (["web", "RUN", "a.html", "--name", "\udcff"], "--name: expected text that can be printed"),
        (["web", "nowhere", "a.html"], "nowhere: expected a run folder"),
        (["grid", "nowhere", "a.npz"], "nowhere: expected a run folder"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    nerfturbo: Nerfturbo, run_folder: Path, words: list[str], says: str
) -> None:
    result = nerfturbo("export", *[run_folder if word == "RUN" else word for word in words], *REFERENCE)
    assert result.code == 2 and says in result.err and not list(Path(".").iterdir()), result.err
