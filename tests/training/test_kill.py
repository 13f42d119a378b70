"""Killed at random moments, inside saves too: every resume works and the end is the one of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nerfturbo.data.formats.transforms import write_blender

from ..tiny import TINY_FLAGS, ball_scene

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_resume.py"


def test_no_kill_loses_more_than_the_steps_since_the_last_save(tmp_path: Path) -> None:
    scene = write_blender([ball_scene("train"), ball_scene("test", n_views=1)], tmp_path / "ball")
    words = ["--data", str(scene), "--count", "1", "--start", "5", "--kinds", "train"]
    words += ["--output", str(tmp_path / "kills.json"), "--", *TINY_FLAGS]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "kills.json").read_text())["rows"]
    assert row["fate"] == "whole" and row["kills"]
