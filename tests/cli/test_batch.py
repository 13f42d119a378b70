"""`nerfturbo batch`: a list of scenes is worked off, goes on where it stopped, and ends in one summary."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nerfturbo.cli.batch import read_jobs
from nerfturbo.errors import InputError

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo


def test_a_list_is_worked_off_and_gone_on_with(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    scenes, out = tmp_path / "scenes.txt", tmp_path / "out"
    scenes.write_text(f"# two scenes\n{scene} --steps 3\n\n{tmp_path / 'missing'}  # there is none\n")
    flags = ["--output", out, "--workers", 2, "--json", "--", *TINY_FLAGS, "--eval-views", 1]
    result = nerfturbo("batch", scenes, *flags)
    assert result.code == 1
    done, failed = result.json["scenes"]
    assert (done["name"], done["status"], done["steps"]) == ("ball", "done", 3) and done["psnr"] > 0.0
    assert failed["status"] == "failed" and "no such folder" in failed["error"]
    assert "1 of 2 scenes done, mean PSNR" in (out / "summary.md").read_text()

    scenes.write_text(f"{scene} --steps 3\n")
    again = nerfturbo("batch", scenes, *flags)
    assert again.code == 0 and "ball: finished before" in again.err
    assert json.loads((out / "summary.json").read_text())["scenes"][0]["psnr"] == done["psnr"]


def test_an_unfinished_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    scenes = tmp_path / "scenes.txt"
    kept = "--preset=vanilla --bounds bounded --ndc --init_from zoo:toybox-cpu --init-parts grid density_net"
    scenes.write_text(f"a/lego --steps 9 --seed 3 {kept}\nb/lego\nbuiltin:armillary")
    jobs = read_jobs(scenes, tmp_path / "out", ["--device", "cpu"])
    assert [job.name for job in jobs] == ["lego", "lego-2", "armillary"]
    begun = jobs[0].command()
    assert begun is not None and begun[4:8] == ["a/lego", "--device", "cpu", "--steps"] and "--overwrite" in begun
    checkpoint = tmp_path / "out" / "lego" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    resumed = jobs[0].command()
    assert resumed is not None
    assert resumed[4:] == ["--resume", str(tmp_path / "out" / "lego"), "--device", "cpu", "--steps", "9"]
    (tmp_path / "out" / "lego" / "metrics.json").write_text("{}")
    assert jobs[0].command() is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing", "expected at least one scene, got none"),
        ("--steps 3", "scenes.txt:1: expected a scene before its flags"),
        ("lego --output x", "expected flags other than --output"),
        ("lego 'open", "scenes.txt:1: expected a scene and flags"),
    ],
)
def test_bad_lists_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "scenes.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_jobs(path, tmp_path)


def test_bad_flags_are_named(nerfturbo: Nerfturbo, tmp_path: Path) -> None:
    scenes = tmp_path / "scenes.txt"
    scenes.write_text("lego")
    for shard in ("2/2", "x", "1"):
        result = nerfturbo("batch", scenes, "--shard", shard)
        assert result.code == 2 and "--shard: expected I/N" in result.err
    missing = nerfturbo("batch", tmp_path / "none.txt")
    assert missing.code == 2 and "none.txt: expected a text file" in missing.err and "Errno" not in missing.err
