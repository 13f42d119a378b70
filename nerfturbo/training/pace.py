"""How many steps to queue at once where a clock ends training."""

from __future__ import annotations

from ..config import NO_STEP_LIMIT

LOOK_EVERY = 0.25  # seconds; one chunk runs while another waits, so that a limit is passed by twice as much at most


class Pace:
    """Measures a step by the training clock: chunks of slow steps become shorter, those of fast ones stay as they are.

    A GPU has always one chunk queued behind the one that runs: at the start of a chunk the one before is not done yet.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[int, float]] = []  # step and seconds at the start of the last ones
        self.step_seconds = 0.0

    def steps_at_once(self, step: int, seconds: float) -> int:
        """The most steps to queue now, at `step` and after so many `seconds` of training; at least one."""
        self._chunks.append((step, seconds))
        if len(self._chunks) == 2:  # the very first chunk is waited for, so that the second is all that was queued
            (first, before), _ = self._chunks
            self._measure(step - first, seconds - before)
        elif len(self._chunks) == 4:
            del self._chunks[0]
            (first, _), (second, before), _ = self._chunks
            self._measure(second - first, seconds - before)
        return NO_STEP_LIMIT if self.step_seconds == 0.0 else max(1, int(LOOK_EVERY / self.step_seconds))

    def _measure(self, steps: int, seconds: float) -> None:
        if steps > 0:  # else a checkpoint was loaded in between
            self.step_seconds = max(0.0, seconds / steps)
