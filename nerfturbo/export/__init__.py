"""What leaves the project for other programs."""

import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import InputError, refuse

Progress = Callable[[float], None]  # takes the share that is done


def quiet(share: float) -> None:
    """Tell nobody how far the work is."""


def paced(seconds: float, steps: float = math.inf, progress: Progress = quiet) -> Iterator[float]:
    """The share of the work that is done, before each step, until so many seconds or steps are over. The first step,
    which compiles, does not count into the seconds."""
    started, step = time.perf_counter(), 0
    while (share := max(step / steps, (time.perf_counter() - started) / max(seconds, 1e-9))) < 1.0:
        yield share
        progress(share)
        step += 1
        started = time.perf_counter() if step == 1 else started


def check_ending(path: Path, *endings: str, flag: str = "") -> None:
    """Refuse a file of another kind, before any work is done; the error names the flag, where one is given."""
    got = str(path) if flag else repr(path.suffix)
    refuse(path.suffix.lower() not in endings, flag or str(path), "a file ending in " + ", ".join(endings), got)


def require_package(module: str, package: str, purpose: str, extra: str) -> None:
    """Refuse to go on without an optional package.

    >>> require_package("json", "json", "nothing", "all")
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(package, f"installed, for {purpose}", "not found", f"pip install 'nerfturbo[{extra}]'")
