"""What a run meets in the night: no memory, a folder that is gone or cannot be written, a second process, a clock that
jumps."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from nerfturbo.cli import train
from nerfturbo.cli.session import Session
from nerfturbo.training.checkpoint import latest_checkpoint, read_state, read_tensors
from nerfturbo.training.step import TrainingStep

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo

PACKAGE = Path(train.__file__).resolve().parents[1]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, happens: Any) -> None:
    """Let something happen once, after a step."""
    show, done = Session._show, []

    def shown(self: Session, trainer: Any, record: Any) -> None:
        show(self, trainer, record)
        if trainer.step >= step and not done:
            done.append(True)
            happens()

    monkeypatch.setattr(Session, "_show", shown)


@pytest.mark.parametrize("loop", ["native", "lightning"])
def test_memory_that_runs_out_in_a_step(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """The last whole step is saved, and the command that the error names goes on from it."""
    if loop == "lightning":
        pytest.importorskip("lightning")
    differentiate, calls = TrainingStep.differentiate, []

    def hungry(self: TrainingStep, *args: Any) -> None:
        differentiate(self, *args)
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(TrainingStep, "differentiate", hungry)
    flags = ["--steps", 5, "--output", "run", "--trainer", loop]
    done = nerfturbo("train", scene, *TINY_FLAGS, *flags)
    assert done.code == 2 and "Traceback" not in done.err
    says = r"error: memory: expected enough for a step, ran out after step 3 \(CUDA out of memory\. Tried to allocate "
    says += r"2\.00 GiB\.\); \S+step_00000003 is saved, go on with smaller batches: nerfturbo (train .*)\n"
    named = re.search(says, done.err)
    assert named is not None, done.err
    assert nerfturbo(*named[1].split(), "--backend", "reference", "--turntable", 0).code == 0
    state = read_state(latest_checkpoint(Path("run")))
    assert state.step == 5 and state.config["train"]["batch_samples"] == 256


def test_a_run_folder_that_disappears(nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 5, lambda: shutil.rmtree("run"))
    done = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 12, "--save-every", "4steps", "--output", "run")
    assert "Traceback" not in done.err
    assert done.code == 2 and "error: run/config.json: not readable" in done.err
    assert read_state(latest_checkpoint(Path("run"))).step == 12  # the next save made the folder again


def test_a_run_folder_that_cannot_be_written_any_more(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder of checkpoints was: no one can write there, not even root."""

    def block() -> None:
        Path("run/checkpoints").rename("kept")
        Path("run/checkpoints").write_text("")

    at_step(monkeypatch, 5, block)
    done = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 12, "--save-every", "4steps", "--output", "run")
    assert done.code == 2 and "Traceback" not in done.err
    assert "run/checkpoints/step_00000012: could not be saved" in done.err and "training goes on" in done.err
    assert read_tensors(Path("kept/step_00000004/tensors.safetensors"))


def test_two_processes_do_not_train_in_one_folder(nerfturbo: Nerfturbo, scene: Path) -> None:
    pytest.importorskip("fcntl")
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(flush=True)"
    hold += "; sys.stdin.read()"
    flags = [scene, *TINY_FLAGS, "--steps", 3, "--output", "run"]
    assert nerfturbo("train", *flags).code == 0
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    with subprocess.Popen([sys.executable, "-c", hold, "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        for words in (["--resume", "run", "--steps", 5, "--turntable", 0], [*flags, "--overwrite"]):
            done = nerfturbo("train", *words)
            assert done.code == 2 and "run: expected a run that no other process is training" in done.err
        other.stdin.close()
    assert before == {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    assert nerfturbo("train", "--resume", "run", "--steps", 5, "--turntable", 0).code == 0


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Durations come from clocks that no one sets; the time of day names a folder, and never one that is there."""
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(r"\btime\.time(_ns)?\(|datetime\.now|utcnow", file.read_text()), file
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    first = train.default_output("ball")
    first.mkdir(parents=True)
    assert train.default_output("ball") != first


def test_a_disk_that_fills_up_after_training_names_the_file_and_says_how_to_go_on(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, full = Image.Image.save, [True]

    def saved(image: Image.Image, path: Path, *args: Any, **kwargs: Any) -> None:
        if full and ".test_" in Path(path).name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(image, path, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "save", saved)
    done = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 4, "--output", "run")
    assert done.code == 2 and re.search(
        r"run/images/test_00\d\.\w+: No space left on device; what was trained", done.err
    )
    assert "nerfturbo eval run" in done.err and not list(Path("run/images").glob("*test_*"))
    full.clear()
    assert nerfturbo("eval", "run").code == 0 and Path("run/report.html").is_file()
