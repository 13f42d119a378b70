"""Work that threads do behind the caller: while a GPU renders the next frame, the last ones are encoded and written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """Runs what it is given in `threads` threads, in order where there is one, never more than `ahead` calls behind.

    What a call raises comes out of a later `submit`, or of `finish`.

    >>> done = []
    >>> work = Behind(1, ahead=2)
    >>> for word in ("a", "b", "c"):
    ...     work.submit(lambda word=word: done.append(word))
    >>> work.finish()
    >>> done
    ['a', 'b', 'c']
    """

    def __init__(self, threads: int, *, ahead: int) -> None:
        self._pool, self._ahead = ThreadPoolExecutor(threads, "nerfturbo-behind"), ahead
        self._pending: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a call; waits where too many are queued."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= self._ahead):
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(work))

    def finish(self) -> None:
        """Wait for everything that is queued."""
        while self._pending:
            self._pending.popleft().result()
        self._pool.shutdown()

    def close(self, *, drop: bool) -> None:
        """End the threads: after all that is queued, or only what has begun. Harmless after `finish`."""
        self._pool.shutdown(cancel_futures=drop)
        self._pending.clear()
