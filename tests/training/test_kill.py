"""kill -9 at random moments, inside saves too: every resume works and the end is the one of an undisturbed run."""

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
    flags = [word for word in TINY_FLAGS if word not in ("--turntable", "0")]
    words = [str(scene), "--kills", "3", "--save-every", "4", "--output", str(tmp_path / "kills.json"), "--", *flags]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "kills.json").read_text())["values"]
    assert result["bit_equal"] and len(result["kills"]) == 3 and result["left_behind"] == []
