"""Optional packages: found before any work is done, or a clear word on how to install them."""

from __future__ import annotations

import importlib.util

from ..errors import InputError


def need(module: str, package: str, purpose: str, extra: str) -> None:
    """Refuse to go on without an optional package.

    >>> need("json", "json", "nothing", "all")
    """
    if importlib.util.find_spec(module) is None:
        raise InputError(package, f"installed, for {purpose}", "not found", f"pip install 'nerfturbo[{extra}]'")
