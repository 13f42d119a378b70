"""Flags from dataclasses: field docstrings are the help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def parse(kind: type[T], argv: Sequence[str], prog: str, *, default: T | None = None) -> T:
    """Read the flags of one verb; wrong ones are explained on stderr and exit with 2."""
    import tyro

    config = (tyro.conf.FlagCreatePairsOff,)  # --json, without a --no-json
    words, name = list(argv), f"nerfturbo {prog}"
    if default is None:
        return tyro.cli(kind, prog=name, args=words, config=config)
    return tyro.cli(kind, prog=name, args=words, default=default, config=config)


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """What a flag will be, before the real parser runs: some flags decide the defaults of others.

    >>> flag_value(["--preset", "ngp"], "--preset"), flag_value(["--preset=ngp"], "--preset"), flag_value([], "--x")
    ('ngp', 'ngp', None)
    """
    found = None
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found
