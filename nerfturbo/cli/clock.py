"""When the command began: previews and totals count from there, slow imports included."""

from __future__ import annotations

import time

_started = time.monotonic()


def restart() -> None:
    """A command begins now: for callers that run several in one process."""
    global _started
    _started = time.monotonic()


def since_command() -> float:
    """Seconds since the command began."""
    return time.monotonic() - _started
