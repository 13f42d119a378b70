"""The run folder: written whole, refused politely, and emptied only of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nerfturbo.errors import CheckpointError, InputError
from nerfturbo.evaluation import run_folder
from nerfturbo.evaluation.run_folder import RunFolder, check_output, create_run, open_run, write_json

from ..tiny import tiny_config


def test_what_is_written_is_read(tmp_path: Path) -> None:
    created = create_run(tmp_path / "a" / "b", tiny_config(steps=7))
    opened = open_run(tmp_path / "a" / "b")
    assert opened == created and opened.read_config() == tiny_config(steps=7)
    opened.write_metrics({"psnr": 30.0, "bad": math.nan, "list": [math.inf, 1.0]})
    assert opened.read_metrics() == {"version": 2, "psnr": 30.0, "bad": None, "list": [None, 1.0]}


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="holds other files"):
        create_run(tmp_path, tiny_config())
    create_run(tmp_path / "run", tiny_config())
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"got a run; go on with it by --resume .* or replace it by --overwrite"):
        create_run(tmp_path / "run", tiny_config())


def test_overwriting_removes_only_what_a_run_writes(tmp_path: Path) -> None:
    run = create_run(tmp_path, tiny_config())
    mine = ["notes.txt", "images/mine.png", "checkpoints/readme", "images_old/test_000.png"]
    own = ["metrics.json", "report.html", "images/test_000.png", "checkpoints/step_00000001/state.json"]
    for name in mine + own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    run = create_run(tmp_path, tiny_config(steps=3), overwrite=True)
    assert all((tmp_path / name).is_file() for name in mine)
    assert not any((tmp_path / name).exists() for name in own)
    assert run.read_config().train.steps == 3


def test_a_path_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(InputError, match="file"):
            check_output(path)
        with pytest.raises(InputError, match="file"):
            create_run(path, tiny_config())
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_that_cannot_be_finished_is_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, document: dict) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_json", full)
    with pytest.raises(InputError, match="No space left on device"):
        create_run(tmp_path / "a" / "b", tiny_config())
    assert list(tmp_path.iterdir()) == []


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "not readable"), ("[]", "not a file of a run"), ('{"version": 99, "config": {}}', "newer nerfturbo")],
)
def test_a_broken_config_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        open_run(tmp_path)


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    run = create_run(tmp_path, tiny_config())
    document = json.loads(run.config_file.read_text())
    document["config"]["train"]["stepps"] = 4
    run.config_file.write_text(json.dumps(document))
    with pytest.raises(InputError, match="stepps"):
        open_run(tmp_path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("x")])
def test_what_is_not_a_run_is_refused(tmp_path: Path, make) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(InputError, match="a run folder"):
        open_run(path)


def test_the_log_survives_a_cut_line_and_is_trimmed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    lines = [json.dumps({"kind": "step", "step": step}) for step in (1, 10, 20)]
    run.log_file.write_text("\n".join([*lines, '{"kind": "st']))
    assert [record["step"] for record in run.read_log()] == [1, 10, 20]
    assert [record["step"] for record in run.trim_log(10)] == [1, 10]
    assert len(run.log_file.read_text().splitlines()) == 2


def test_a_run_named_without_its_time_is_refused_with_the_newest_of_that_name(tmp_path: Path) -> None:
    for name in ("fox [1]-20260130-101500", "fox [1]-20260131-080000", "fox [1]-20260201-090000"):
        (tmp_path / name).mkdir()
        if "0201" not in name:  # a folder of something else
            (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"got no such folder; the newest one is .*fox \[1\]-20260131-080000$"):
        open_run(tmp_path / "fox [1]")
    with pytest.raises(InputError, match=r"a run folder is what `nerfturbo train` writes$"):
        open_run(tmp_path / "fern")
    with pytest.raises(InputError, match=r"a run folder is what `nerfturbo train` writes$"):
        open_run(tmp_path / "nowhere" / "fox")


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [f".report.{dead.pid}-19.tmp.html", f"images/.preview.{os.getpid()}-5.tmp.png"]
    left += [f"checkpoints/.step_00000004.{dead.pid}.tmp/state.json"]
    kept = [f".report.{os.getppid()}-1.tmp.html", ".notes.tmp", "thesis.12.tmp", "images/test_000.png"]
    for name in left + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    run_folder.claim(tmp_path)
    run_folder.release_claims()
    assert [name for name in left + kept if (tmp_path / name).exists()] == kept
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_folder_that_is_read_only_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it: root may write everywhere, so that no mode of the folder would show it here."""
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=f"new: expected a place that can be written, got {tmp_path} is read-only"):
        run_folder.check_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
