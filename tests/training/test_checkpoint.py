"""Checkpoints are whole or absent, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nerfturbo.errors import CheckpointError, InputError
from nerfturbo.training import checkpoint as module
from nerfturbo.training.checkpoint import (
    VERSION,
    CheckpointState,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_tensors,
    read_state,
    read_tensors,
    save_checkpoint,
)


def state(step: int) -> CheckpointState:
    return CheckpointState(step=step, train_seconds=1.5, n_rays=64, config={"preset": "ngp"}, bounds={})


def model(width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    saved, loaded = model(), model()
    path = save_checkpoint(tmp_path, state(7), saved, None)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", "tensors.safetensors"]
    assert read_state(path) == state(7)
    load_tensors(path, loaded)
    assert torch.equal(saved.weight, loaded.weight)


def test_only_the_newest_are_kept_and_saving_twice_at_one_step_works(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3, 100):
        save_checkpoint(tmp_path, state(step), model(), None, keep=2)
    assert [read_state(path).step for path in list_checkpoints(tmp_path)] == [3, 100]
    (tmp_path / "checkpoints").mkdir()
    assert not any(path.name.endswith(".tmp") for path in tmp_path.iterdir())


@pytest.mark.parametrize("fails_in", ["safetensors", "fsync", "replace"])
def test_a_failed_save_leaves_the_previous_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    save_checkpoint(tmp_path, state(1), model(), None)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails_in == "safetensors":
        monkeypatch.setattr("safetensors.torch.save_file", full)
    else:
        monkeypatch.setattr(module.os, fails_in, full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are intact"):
        save_checkpoint(tmp_path, state(2), model(), None)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_tensors(list_checkpoints(tmp_path)[0], model())


def test_both_files_and_their_folder_are_on_disk_before_they_are_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync, replace = [], module._fsync, os.replace
    monkeypatch.setattr(module, "_fsync", lambda path: (fsync(path), flushed.append(path.name)))
    monkeypatch.setattr(module.os, "replace", lambda a, b: (replace(a, b), flushed.append(Path(b).name)))
    final = save_checkpoint(tmp_path, state(1), model(), None)
    *before, folder = flushed[: flushed.index(final.name)]
    assert set(before) == {"tensors.safetensors", "state.json"} and folder.startswith(f".{final.name}")


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path / "checkpoints", state(1), model(), None)
    killed = tmp_path / "checkpoints" / ".step_00000002.123.tmp"
    killed.mkdir()
    (killed / "state.json").write_text("{}")
    (tmp_path / "checkpoints" / "step_00000003").mkdir()  # without a state
    assert latest_checkpoint(tmp_path) == good
    assert latest_checkpoint(good) == good


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none; train one first"):
        latest_checkpoint(tmp_path)


ODD_COUNTS = [("step", "x"), ("step", 1.5), ("step", -1), ("train_seconds", [[]]), ("train_seconds", math.inf)]
ODD_COUNTS += [("n_rays", 10**400), ("lr_factor", None), ("score", "x"), ("score", 10**400)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "not a readable checkpoint state"),
        ("[1, 2]", "not a readable checkpoint state"),
        ('{"version": 1}', "not a readable checkpoint state"),
        (json.dumps({"version": VERSION + 1}), "written by a newer nerfturbo"),
        *(({name: value}, r"state\.json: not a readable checkpoint state") for name, value in ODD_COUNTS),
    ],
)
def test_broken_states_are_named(tmp_path: Path, text: str | dict, says: str) -> None:
    path = save_checkpoint(tmp_path, state(1), model(), None)
    if isinstance(text, dict):
        text = json.dumps(json.loads((path / "state.json").read_text()) | text)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_state(path)


def test_a_config_of_another_kind_is_named_with_its_checkpoint(tmp_path: Path) -> None:
    odd = replace(state(1), config={"train": {"ong": 1}})
    path = save_checkpoint(tmp_path, odd, model(), None)
    from nerfturbo.training.trainer import load_model

    with pytest.raises(InputError, match=rf"{path.name}: config\.train\.ong: expected one of"):
        load_model(path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 1000])
def test_broken_tensors_are_named(tmp_path: Path, content: bytes) -> None:
    path = save_checkpoint(tmp_path, state(1), model(), None)
    (path / "tensors.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_tensors(path, model())


def test_tensors_of_another_shape_or_name_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), model(width=3), None)
    with pytest.raises(CheckpointError, match=r"weight: expected shape \(2, 4\), found shape \(2, 3\)"):
        load_tensors(path, model(width=4))
    with pytest.raises(CheckpointError, match=r"0\.weight: expected shape .* found no such tensor"):
        load_tensors(path, nn.Sequential(model()))


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(1), model(), None)
    length = int.from_bytes((path / "tensors.safetensors").read_bytes()[:8], "little")
    assert length < os.path.getsize(path / "tensors.safetensors")  # a safetensors header, not a pickle
    json.loads((path / "tensors.safetensors").read_bytes()[8 : 8 + length])


def steps_in(folder: Path) -> list[int]:
    return [read_state(path).step for path in list_checkpoints(folder)]


def test_the_best_by_score_stays_besides_the_newest(tmp_path: Path) -> None:
    for step, score in ((1, math.nan), (2, 25.0), (3, 24.0), (4, None), (5, 23.0)):
        save_checkpoint(tmp_path, replace(state(step), score=score), model(), None, keep=2)
    assert steps_in(tmp_path) == [2, 4, 5]
    best = best_checkpoint(tmp_path)
    assert best is not None and read_state(best).score == 25.0
    newer = save_checkpoint(tmp_path, replace(state(5), score=25.0), model(), None)
    assert best_checkpoint(tmp_path) == newer
    save_checkpoint(tmp_path, replace(state(6), score=26.0), model(), None, keep=1)
    assert steps_in(tmp_path) == [6]


def test_version_1_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(3), model(), None)
    values = json.loads((path / "state.json").read_text())
    old = {name: values[name] for name in ("step", "train_seconds", "n_rays", "config", "bounds")}
    (path / "state.json").write_text(json.dumps({"version": 1, **old}))
    assert read_state(path) == state(3)
    (path / "state.json").write_text(json.dumps({"version": 0, **old}))
    with pytest.raises(CheckpointError, match="not a readable checkpoint state"):
        read_state(path)


def test_one_factor_of_the_focal_length_becomes_one_for_each_axis(tmp_path: Path) -> None:
    save_file({"photos.focal": torch.arange(3.0)}, tmp_path / "tensors.safetensors")
    (focal,) = read_tensors(tmp_path / "tensors.safetensors").values()
    assert focal.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Writes past this size fail as on a full disk, by the system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_inside_a_save_is_named_and_harms_nothing(tmp_path: Path) -> None:
    large = nn.Linear(200, 200)
    save_checkpoint(tmp_path, state(1), large, None)
    with (
        largest_file(1 << 14),
        pytest.raises(CheckpointError, match=r"File too large; it takes 0\.2 MB, .* MB are free"),
    ):
        save_checkpoint(tmp_path, state(2), large, None)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_tensors(latest_checkpoint(list_checkpoints(tmp_path)[0]), large)
    save_checkpoint(tmp_path, state(2), large, None)
    assert steps_in(tmp_path) == [1, 2]


def test_saving_a_step_again_keeps_one_of_the_two_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state(1), model(), None)
    replace_file, moves = os.replace, 0

    def killed(*args: str) -> None:
        nonlocal moves
        moves += 1
        if moves == 2:  # the old one is aside, the new one not yet in place
            raise KeyboardInterrupt
        replace_file(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, replace(state(1), n_rays=7), model(), None)
    (aside,) = list_checkpoints(tmp_path)
    assert read_state(aside) == state(1)
    shutil.copytree(aside, tmp_path / "step_00000001")  # killed a moment later: both are there, one counts
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001"]
    shutil.rmtree(tmp_path / "step_00000001")
    save_checkpoint(tmp_path, replace(state(1), n_rays=8), model(), None)
    assert [(path.name, read_state(path).n_rays) for path in list_checkpoints(tmp_path)] == [("step_00000001", 8)]


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for process in (gone.pid, os.getppid()):
        (tmp_path / f".step_00000001.{process}.tmp").mkdir()
    save_checkpoint(tmp_path, state(2), model(), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".step_00000001.{os.getppid()}.tmp", "step_00000002"]
