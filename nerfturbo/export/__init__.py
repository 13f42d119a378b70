"""What leaves the project for other programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError

Progress = Callable[[float], None]  # takes the share that is done


def quiet(share: float) -> None:
    """Tell nobody how far the work is."""


def check_ending(path: Path, *endings: str) -> None:
    """Refuse a file of another kind, before any work is done."""
    if path.suffix.lower() not in endings:
        raise InputError(str(path), "a file ending in " + ", ".join(endings), repr(path.suffix))


def require_package(module: str, package: str, purpose: str, extra: str) -> None:
    """Refuse to go on without an optional package.

    >>> require_package("json", "json", "nothing", "all")
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(package, f"installed, for {purpose}", "not found", f"pip install 'nerfturbo[{extra}]'")
