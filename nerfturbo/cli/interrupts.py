"""Ctrl-C and SIGTERM end a command, wherever they meet it.

Both become a KeyboardInterrupt in whatever Python code runs. If C called that code, an exception cannot go on through
it: ctypes drops it after a note, and so do finalizers. LLVM calls back into numba that way, so that an interrupt while
kernels compile would be lost. What is dropped is raised again a moment later.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

AGAIN_AFTER = 0.05  # seconds: by then C has usually left the callback; if not, it is dropped and comes again


@contextlib.contextmanager
def interrupts_arrive() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl-C does, and neither is lost. For the main thread; others change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def dropped(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            report(found)
            return
        timer = threading.Timer(AGAIN_AFTER, _signal_main_thread)
        timer.daemon = True
        timers.append(timer)
        timer.start()

    handler, report = signal.signal(signal.SIGTERM, _interrupt), sys.unraisablehook
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, handler)


def _signal_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # a real one: it ends a sleep, too
    else:
        _thread.interrupt_main(signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
