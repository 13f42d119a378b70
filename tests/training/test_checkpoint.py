"""Checkpoints are whole or absent, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from nerfturbo.errors import CheckpointError
from nerfturbo.training import checkpoint as module
from nerfturbo.training.checkpoint import (
    VERSION,
    CheckpointState,
    latest_checkpoint,
    list_checkpoints,
    load_tensors,
    read_state,
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "not a readable checkpoint state"),
        ("[1, 2]", "not a readable checkpoint state"),
        ('{"version": 1}', "not a readable checkpoint state"),
        (json.dumps({"version": VERSION + 1}), "written by a newer nerfturbo"),
    ],
)
def test_broken_states_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = save_checkpoint(tmp_path, state(1), model(), None)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_state(path)


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
