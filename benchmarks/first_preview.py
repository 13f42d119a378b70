"""How long after the command `nerfturbo train` shows its first preview: with nothing cached, then with everything.

    python benchmarks/first_preview.py benchmarks/results/cpu/first_preview.json [SCENE]

Runs the command itself, twice, with cache folders of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from nerfturbo.bench.record import Record, machine, write_json

FLAGS = ("--time-limit", "5", "--eval-views", "1", "--turntable", "0")


def first_preview(scene: str, folder: Path, name: str) -> dict[str, float]:
    """Seconds from the start of the command to its first preview, and to the line `training`."""
    caches = {"NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "xdg"}
    environment = os.environ | {key: str(folder / value) for key, value in caches.items()}
    command = [sys.executable, "-m", "nerfturbo", "train", scene, *FLAGS, "--output", str(folder / name)]
    start, seconds = time.monotonic(), {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = round(time.monotonic() - start, 2)
            print(f"{now:6.2f} {line.rstrip()}", flush=True)
            if re.search(r"\] training$", line.rstrip()):
                seconds.setdefault("training_starts", now)
            if "first preview" in line:
                seconds["first_preview"] = now
    if process.returncode != 0 or "first_preview" not in seconds:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode} and showed {seconds}")
    return seconds


def main() -> None:
    output, scene = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "toybox"
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: first_preview(scene, Path(folder), name) for name in ("cold", "cached")}
    protocol = "one run each of the command itself; cold: new, empty cache folders; cached: the same folders again"
    what = f"seconds from `nerfturbo train {Path(scene).name} {' '.join(FLAGS)}` to its first preview"
    on = machine("cuda" if torch.cuda.is_available() else "cpu")
    write_json(output, Record(what=what, protocol=protocol, seed=0, values=rows, machine=on))
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
