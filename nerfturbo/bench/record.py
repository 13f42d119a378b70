"""Benchmark results on disk, a JSON per run: {what, command, commit, machine, protocol, seed, values}; their change."""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..evaluation.results import describe_machine, versions
from ..files import write_atomically

KEYS = ("what", "command", "commit", "machine", "protocol", "seed", "values")
LESS_IS_BETTER = ("us", "ms", "milliseconds", "seconds", "bytes")  # words in the names of what is measured
MORE_IS_BETTER = ("second", "psnr", "ssim")  # the first as in rays_per_second
SCORE_NOISE = {"psnr": 0.1, "ssim": 0.005}  # what runs of one thing differ by where neither record says


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


@dataclass(frozen=True)
class Change:
    """One number of two records: the median of each one's repeats, and by how much repeats differ."""

    name: str
    old: float
    new: float
    noise: float
    verdict: str  # better, worse or same


def compare_records(old: dict[str, Any], new: dict[str, Any], noise: float) -> list[Change]:
    """Every time, size and score that both have. Times and sizes may differ by `noise`, a share of them, or by what the
    repeats in one record do, if that is more."""
    before: dict[tuple[str, str], list[float]] = {}
    after: dict[tuple[str, str], list[float]] = {}
    for found, record in ((before, old), (after, new)):
        for name, unit, value in _measured(record["values"], ""):
            found.setdefault((name, unit), []).append(value)
    changes = []
    for (name, unit), repeats in before.items():
        if (name, unit) in after:
            first, last = statistics.median(repeats), statistics.median(after[name, unit])
            spreads = [0.5 * (max(each) - min(each)) for each in (repeats, after[name, unit])]
            usual = max([SCORE_NOISE.get(unit, noise * abs(first)), *spreads])
            better = (last > first) == (unit in MORE_IS_BETTER)
            verdict = "same" if abs(last - first) <= usual else "better" if better else "worse"
            changes.append(Change(name, first, last, usual, verdict))
    return changes


def _measured(values: Any, name: str) -> Iterator[tuple[str, str, float]]:
    """Name, unit and value of each number whose name says its unit. Lists of numbers, and parts that differ by their
    seed alone, are repeats of one thing; other parts of a list are named by their texts and their place.

    >>> list(_measured({"timings": [{"way": "frame", "wall_ms": 2.5, "rounds": 14}], "psnr": [36.0, 36.2]}, ""))
    [('timings 0 frame wall_ms', 'ms', 2.5), ('psnr', 'psnr', 36.0), ('psnr', 'psnr', 36.2)]
    """
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _measured(value, f"{name} {key}".strip())
    elif isinstance(values, list):
        for place, value in enumerate(values):
            part = isinstance(value, dict) and "seed" not in value
            texts = [str(place), *(text for text in value.values() if isinstance(text, str))] if part else []
            yield from _measured(value, " ".join([name, *texts]).strip())
    elif isinstance(values, int | float) and not isinstance(values, bool):
        words = name.split(" ")[-1].split("_")
        units = [unit for unit in (*LESS_IS_BETTER, *MORE_IS_BETTER) if unit in words]
        if units:
            yield name, units[0], float(values)
