"""What leaves the project for other programs."""

from __future__ import annotations

import importlib.util

from ..errors import InputError


def require_package(module: str, package: str, purpose: str, extra: str) -> None:
    """Refuse to go on without an optional package.

    >>> require_package("json", "json", "nothing", "all")
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(package, f"installed, for {purpose}", "not found", f"pip install 'nerfturbo[{extra}]'")
