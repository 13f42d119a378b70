"""Folders as users bring them: described, trained, scored and resumed without a flag."""

from __future__ import annotations

from pathlib import Path

from nerfturbo.evaluation.run_folder import open_run

from ..data import folders
from ..data.test_ndc import write_facing
from .conftest import Nerfturbo


def test_scene_info_says_what_was_chosen(nerfturbo: Nerfturbo) -> None:
    folder = folders.write_transforms(Path("capture"), aabb_scale=8, k1=0.05)
    (folder / "images" / "view_03.png").unlink()
    found = nerfturbo("scene", "info", folder, "--json").json
    assert found["format"] == "instant-ngp / nerfstudio" and found["cameras"]["model"] == "opencv"
    assert found["bounds"]["grid_levels"] == 4 and found["splits"]["val"] is None
    assert found["splits"]["test"]["views"] == 1 and found["warnings"]
    shown = nerfturbo("scene", "info", folder).out
    for words in (
        "preset  proposal",
        "opencv, 1 different",
        "unbounded, 4 grid levels",
        "note  unbounded: aabb_scale 8",
        "warning  transforms.json: skipped 1 frame:",
    ):
        assert words in shown


def test_an_unbounded_capture_through_a_real_lens_trains_without_a_flag(nerfturbo: Nerfturbo) -> None:
    parameters = [30.0, 30.0, 12.0, 8.0, -0.1, 0.01, 0.001, 0.002]
    folder = folders.write_colmap(Path("capture"), model=4, parameters=parameters)
    (folder / "sparse" / "0" / "points3D.bin").unlink()  # nothing says where the scene ends
    small = ["--grid.resolution", 16, "--field.log2-entries", 10, "--train.batch-samples", 1024]
    result = nerfturbo("train", folder, "--steps", 4, "--turntable", 0, "--output", "run", *small, "--json")
    assert result.code == 0, result.err
    described = nerfturbo("scene", "info", folder, "--json").json
    assert "preset proposal-cpu, because the scene is unbounded" in result.err
    assert "16 images by 1 camera (OPENCV) in sparse/0" in result.err
    assert described["preset"] == open_run("run").read_config().preset == "proposal-cpu"
    assert all(note in result.err for note in described["fitted"]) and len(described["fitted"]) == 2
    assert "grid.levels 5" in result.err and "every 8th picture is a test view" in result.err
    assert nerfturbo("eval", "run").code == 0
    assert nerfturbo("train", "--resume", "run", "--steps", 6, "--turntable", 0).code == 0
    shown = nerfturbo("render", "run", "--path", "spiral", "--frames", 2, "--crop", *["-1", "-1", "-1", "1", "1", "1"])
    assert shown.code == 0, shown.err
    small = [*small, "--preset", "ngp-cpu", "--grid.contraction", "sphere"]
    result = nerfturbo("train", folder, "--steps", 4, "--turntable", 0, "--output", "folded", *small)
    assert result.code == 0 and "unbounded: grid.levels 5" in result.err
    refused = nerfturbo("train", folder, "--output", "no", "--sampler", "proposal", "--sampler.coarse-samples", 0)
    assert refused.code == 2 and "sampler.coarse_samples: expected a whole number from 1 to" in refused.err


def test_a_forward_facing_capture_in_ndc(nerfturbo: Nerfturbo) -> None:
    """One flag; the run remembers it. What would come out bent is refused before anything is written."""
    folder = write_facing(Path("facing"))
    small = ["--grid.resolution", 16, "--field.log2-entries", 10, "--train.batch-samples", 1024, "--turntable", 0]
    result = nerfturbo("train", folder, "--ndc", "--steps", 4, "--output", "run", *small, "--json")
    assert result.code == 0 and "NDC: the near plane is" in result.err, result.err
    assert nerfturbo("eval", "run").code == 0
    assert nerfturbo("render", "run", "--path", "spiral", "--frames", 2, "--output", "frames").code == 0
    refused = nerfturbo("export", "mesh", "run", "out.ply", "--resolution", 16)
    assert refused.code == 2 and "got one in normalised device coordinates; train without --ndc" in refused.err
    assert not Path("out.ply").exists()
    refused = nerfturbo("train", folder, "--ndc", "--cameras.refine", "--steps", 4, "--output", "other", *small)
    assert refused.code == 2 and "cameras.refine: expected a scene in plain space" in refused.err
    assert nerfturbo("scene", "info", folder, "--ndc", "--json").json["bounds"]["grid_levels"] == 1
