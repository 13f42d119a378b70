"""A short run of the fuzzer of commands, one case per file and verb, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import commands

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are forked processes")


def test_damaged_files_and_odd_flags_end_well(tmp_path: Path) -> None:
    names = [name for name in commands.FILES if not name.startswith("scenes/")]  # those: data/test_damaged_files.py
    names, output = [*names, *commands.VERBS], tmp_path / "fuzz.json"
    words = [sys.executable, commands.__file__, "--count", str(len(names)), "--start", str(1000 * len(names))]
    words += ["--output", str(output), "--only", *names]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert json.loads(output.read_text())["cases"] == len(names)


def test_flags_are_found_in_the_help() -> None:
    assert {"--train.batch-samples", "--optim.lr", "--downscale", "--field.width"} <= set(commands.flags_of("train"))
    assert "--pixel" in commands.flags_of("inspect")


@pytest.mark.parametrize(
    ("words", "about", "wrong"),
    [
        ("eval nowhere", "nowhere", None),
        ("eval nowhere", "config.json", "not named"),
        ("trian", "trian", None),
        ("--version", "", None),
    ],
)
def test_a_refusal_must_name_its_cause(words: str, about: str, wrong: str | None, tmp_path: Path) -> None:
    (tmp_path / "ball").mkdir()
    found = commands.run_case(commands.Case(tuple(words.split()), (about,)), tmp_path)
    assert (found or "").startswith(wrong or "") and (found is None) == (wrong is None), found


def test_crashes_and_foreign_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "case" / "ball").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")

    def climb(words: list[str]) -> int:
        Path("../secret").read_text()
        return 0

    def fail(words: list[str]) -> int:
        raise IndexError

    for run, wrong in ((climb, "outside its folders"), (fail, "exit 99 with a traceback")):
        monkeypatch.setattr("nerfturbo.cli.main.main", run)
        found = commands.run_case(commands.Case(("x",), ("",)), tmp_path / "case")
        assert found is not None and found.startswith(wrong), found
