"""When the command began: previews and totals count from there, slow imports included."""

from __future__ import annotations

import time

_started = time.monotonic()
_marks: list[tuple[str, float]] = []


def restart() -> None:
    """A command begins now: for callers that run several in one process."""
    global _started
    _started = time.monotonic()
    _marks.clear()


def since_command() -> float:
    """Seconds since the command began."""
    return time.monotonic() - _started


def mark(stage: str) -> None:
    """A stage of the command begins, and the one before it ends."""
    _marks.append((stage, time.monotonic()))


def seconds_by_stage() -> dict[str, float]:
    """How long each stage has taken; what came before the first is starting up."""
    if not _marks:
        return {}
    result = {"starting": _marks[0][1] - _started}
    ends = [begun for _, begun in _marks[1:]] + [time.monotonic()]
    for (stage, begun), end in zip(_marks, ends, strict=True):
        result[stage] = result.get(stage, 0.0) + end - begun
    return result
