"""Ctrl-C and SIGTERM: a checkpoint, the command to go on with, exit code 130; and going on works."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core.compiler_lock import global_compiler_lock

from nerfturbo.cli.main import interrupts_arrive, run_command
from nerfturbo.training.checkpoint import latest_checkpoint, list_checkpoints, read_state

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo

COMMAND = [sys.executable, "-c", "import sys; from nerfturbo.cli.main import main; sys.exit(main())"]


def start(*words: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [*COMMAND, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 90.0
    while not list_checkpoints(run / "checkpoints"):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no checkpoint: {process.communicate()}")
        time.sleep(0.05)


@pytest.mark.parametrize("trainer", ["native", "lightning"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_saves_says_how_to_resume_and_resuming_works(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, number: int, trainer: str
) -> None:
    if trainer == "lightning":
        pytest.importorskip("lightning")
    run = tmp_path / "a run"
    flags = [*TINY_FLAGS, "--downscale", 2, "--steps", 1_000_000, "--save-every", 0.2, "--output", run]
    flags += ["--trainer", trainer]
    process = start("train", scene, *flags)
    wait_for_checkpoint(process, run)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and out == ""
    saved = read_state(latest_checkpoint(run)).step
    assert f"interrupted at step {saved}; checkpoint saved in {latest_checkpoint(run)}" in err
    command = re.search(r"^resume with: nerfturbo (.*)$", err, re.MULTILINE)
    assert command is not None
    words = shlex.split(command.group(1))
    assert words == ["train", "--resume", str(run), "--backend", "reference"]
    assert not (run / "metrics.json").exists()

    again = nerfturbo(*words, "--steps", saved + 3, "--turntable", 0)
    assert again.code == 0, again.err
    assert read_state(latest_checkpoint(run)).step == saved + 3
    assert (run / "metrics.json").is_file()


def test_exit_codes_of_the_real_command(tmp_path: Path) -> None:
    process = start("train", tmp_path / "missing")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert [line for line in err.splitlines() if line.startswith("error: ")] and "Traceback" not in err


CALLED_BY_C = """
import ctypes, os, signal, sys, time
from nerfturbo.cli import doctor
from nerfturbo.cli.main import main

def command(rest):
    @ctypes.CFUNCTYPE(None)
    def callback():  # as LLVM calls numba while kernels compile
        os.kill(os.getpid(), signal.SIG{name})
        for _ in range(10_000):  # here the signal's handler raises, and what it raises cannot pass through C
            pass

    for _ in range(3):
        callback()
    time.sleep(60.0)
    return 0

doctor.main = command
sys.exit(main(["doctor"]))
"""


HALF_MADE = """
import os, signal, sys
from nerfturbo.cli import doctor
from nerfturbo.cli.main import main

class Module:
    def __del__(self):
        del self.part

made = Module()
doctor.main = lambda rest: os.kill(os.getpid(), signal.SIGINT) or [None for _ in range(100_000)]
code = main(["doctor"])
del made
sys.exit(code)
"""


def test_what_an_interrupt_left_half_made_ends_without_a_traceback() -> None:
    run = subprocess.run([sys.executable, "-c", HALF_MADE], capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_an_interrupt_inside_a_callback_of_c_is_not_lost(name: str) -> None:
    program = [sys.executable, "-c", CALLED_BY_C.format(name=name)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


def test_an_interrupt_while_another_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(timer: threading.Timer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), interrupts_arrive():
        sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_c_code_made_another_error_of(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:  # as safetensors does while it reads
        try:
            os.kill(os.getpid(), number)
            time.sleep(1.0)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
        return 0

    before = signal.getsignal(number)
    assert run_command(command) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_a_kernel_is_whole(number: signal.Signals) -> None:
    seen: list[str] = []

    def command() -> int:
        with global_compiler_lock:  # as numba holds it while LLVM works
            os.kill(os.getpid(), number)
            time.sleep(0.2)
            seen.append("whole")
        time.sleep(10.0)
        seen.append("lost")
        return 0

    assert run_command(command) == 130
    assert seen == ["whole"]
