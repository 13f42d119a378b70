"""Benchmark results on disk: one JSON per run, `{what, command, commit, machine, protocol, seed, values}`."""

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..evaluation.results import describe_machine, versions
from ..files import write_atomically

KEYS = ("what", "command", "commit", "machine", "protocol", "seed", "values")


@dataclass(frozen=True)
class Record:
    """One benchmark run: what was measured, on what, and how, so that it can be repeated."""

    what: str  # one line
    protocol: str  # what a number means: warm-up, repeats, statistic, what is inside the time
    seed: int
    values: Any  # lists and dictionaries of numbers and strings
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    command: str = field(default_factory=lambda: command())
    commit: str | None = field(default_factory=lambda: commit())


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads, system, GPU if the device is one, and the versions that decide speed."""
    return describe_machine(torch.device(device)) | {"versions": versions()}


def command() -> str:
    """The command line that is running, without the folders the interpreter and the script lie in."""
    return shlex.join([Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python", *sys.argv[1:]])


def commit() -> str | None:
    """The git commit of the source tree, with "+" when files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "nerfturbo")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def write_json(path: Path | str, record: Record | dict[str, Any]) -> Path:
    """Write the record whole or not at all."""
    path = Path(path)
    content = {key: asdict(record)[key] for key in KEYS} if isinstance(record, Record) else record
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError("output", "a path that can be written", f"{path} ({error.strerror})") from error
    return path
