"""The scripts of `benchmarks/` as functions, beside what tests of the command line have."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from common import run_study

from ..cli.conftest import Outcome, nerfturbo, outcome, run_folder, scene, scene_on_disk, trained

__all__ = ["nerfturbo", "run_folder", "scene", "scene_on_disk", "trained"]

Study = Callable[..., Outcome]


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """`study("ablation", ...)` in this process, in an empty working directory."""
    (tmp_path / "cwd").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "cwd")

    def run(script: str, *words: object) -> Outcome:
        main = importlib.import_module(script).main
        return outcome(capsys, lambda: run_study(main, [str(word) for word in words]))

    return run
