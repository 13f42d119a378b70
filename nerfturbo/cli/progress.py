"""What commands show: a live display on a terminal, plain lines elsewhere. Always on stderr; stdout is for results. And
the clock of the command: previews and totals count from its begin, slow imports included."""

import contextlib
import itertools
import logging
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from ..viewer.notebook import Bar

PLAIN_SECONDS, BAR_SECONDS = 5.0, 0.25  # between plain lines, between pictures of a bar
LOGGER = "nerfturbo"

_started = time.monotonic()
_marks: list[tuple[str, float]] = []
_words = sys.argv[1:]


def restart_clock(words: Sequence[str]) -> None:
    """A command of these words begins now: for callers that run several in one process."""
    global _started, _words
    _started, _words = time.monotonic(), list(words)
    _marks.clear()


def command_line() -> str:
    """The command that runs, ready to paste."""
    return shlex.join(["nerfturbo", *_words])


def since_command() -> float:
    """Seconds since the command began."""
    return time.monotonic() - _started


def seconds_by_stage() -> dict[str, float]:
    """How long each phase has taken, without what is behind a colon or in brackets; before the first lies the start."""
    result: dict[str, float] = {}
    for (text, begun), (_, end) in itertools.pairwise([("starting", _started), *_marks, ("", time.monotonic())]):
        stage = text.partition(": ")[0].partition(" (")[0]
        result[stage] = result.get(stage, 0.0) + end - begun
    return result if _marks else {}


class Display:
    """Phases come one after the other; `update` moves the bar of the current one. This one says nothing."""

    def phase(self, text: str) -> None:
        _marks.append((text, time.monotonic()))

    def left(self, fraction: float) -> float | None:
        """Seconds to the end of the phase, by what it has taken so far; None where that says little yet."""
        spent = time.monotonic() - _marks[-1][1] if _marks else 0.0
        return spent * (1.0 - fraction) / fraction if spent > 2.0 and 0.01 < fraction < 1.0 else None

    def note(self, text: str) -> None: ...

    def update(self, fraction: float, *, eta: float | None = None, record: dict[str, Any] | None = None) -> None: ...

    def close(self) -> None: ...


def open_display() -> Display:
    """The display that fits where stderr goes."""
    if "ipykernel" in sys.modules:
        from ..viewer.notebook import open_bar

        if bar := open_bar():
            return PlainDisplay(bar)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return RichDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


class LogNotes(logging.Handler):
    """What the library logs, and Python's warnings, as notes of a display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name == "py.warnings":  # "file:line: Category: text", then the line of code
            text = "warning: " + text.splitlines()[0].split("Warning: ", 1)[-1]
        self._display.note(text)


@contextlib.contextmanager
def showing() -> Iterator[Display]:
    """A display for one command, with the library's log and warnings on it."""
    display = open_display()
    handler = LogNotes(display)
    loggers = [logging.getLogger(name) for name in (LOGGER, "py.warnings")]
    level = loggers[0].level
    loggers[0].setLevel(logging.INFO)
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield display
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        logging.captureWarnings(False)
        loggers[0].setLevel(level)
        display.close()


class PlainDisplay(Display):
    """A line per phase, and one every few seconds in between; or a bar below the cell of a notebook."""

    def __init__(self, bar: "Bar | None" = None) -> None:
        self._phase, self._last, self._bar = "", 0.0, bar

    def phase(self, text: str) -> None:
        super().phase(text)
        self._phase, self._last = text, time.monotonic()
        self._bar(0.0, text) if self._bar else self.note(text)

    def note(self, text: str) -> None:
        print(f"[{since_command():6.1f} s] {text}", file=sys.stderr, flush=True)

    def update(self, fraction: float, *, eta: float | None = None, record: dict[str, Any] | None = None) -> None:
        if time.monotonic() - self._last < (BAR_SECONDS if self._bar else PLAIN_SECONDS):
            return
        self._last, eta = time.monotonic(), self.left(fraction) if eta is None else eta
        parts = [f"{self._phase}: {100.0 * fraction:.0f}%"]
        parts += [] if record is None else [f"step {record['step']}", *describe(record)]
        parts += [] if eta is None else [f"{duration(eta)} left"]
        self._bar(fraction, ", ".join(parts)) if self._bar else self.note(", ".join(parts))

    def close(self) -> None:
        if self._bar:
            self._bar(1.0, "")


class RichDisplay(Display):
    """A bar with the numbers below it, redrawn a few times a second."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._console, self._phase, self._started = console, "", time.monotonic()
        self._fraction: float | None = None
        self._eta: float | None = None
        self._record: dict[str, Any] | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, text: str) -> None:
        super().phase(text)
        self._phase, self._started = text, time.monotonic()
        self._fraction, self._eta, self._record = None, None, None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self, fraction: float, *, eta: float | None = None, record: dict[str, Any] | None = None) -> None:
        self._fraction, self._record, self._eta = fraction, record, self.left(fraction) if eta is None else eta

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._fraction is None:
            seconds = time.monotonic() - self._started
            self._spinner.update(text=Text(f"{self._phase} ({seconds:.0f} s)"))
            return self._spinner
        line = Table.grid(padding=(0, 1), expand=False)
        left = "" if self._eta is None else f"{duration(self._eta)} left"
        bar = ProgressBar(total=1.0, completed=self._fraction, width=32)
        line.add_row(Text(self._phase, style="bold"), bar, f"{100.0 * self._fraction:3.0f}%", Text(left, style="cyan"))
        if self._record is None:
            return line
        return Group(line, Text("  " + "  ".join(describe(self._record)), style="dim"))


def describe(record: dict[str, Any]) -> list[str]:
    """The numbers of a log record, for people."""
    gpu = []
    if "gpu_utilisation" in record:
        memory, power = record.get("gpu_memory_bytes", 0.0) / 1e9, record.get("gpu_power_watts", 0.0)
        gpu = [f"GPU {record['gpu_utilisation']:.0f}%, {memory:.1f} GB, {power:.0f} W"]
    speeds = [f"{quantity(record[f'{what}_per_second'])} {what}/s" for what in ("rays", "samples")]
    quality = [f"PSNR {record['psnr']:.2f} dB", f"loss {record['loss']:.5f}"]
    return [*quality, *speeds, f"{100.0 * record['occupied_fraction']:.1f}% occupied", *gpu]


def in_words(value: Any) -> str:
    """
    >>> in_words([216, 384]), in_words([[8, 6], [16, 12]]), in_words("sRGB")
    ('216 x 384', '8 x 6 to 16 x 12', 'sRGB')
    """
    if not isinstance(value, list):
        return str(value)
    return (" to " if isinstance(value[0], list) else " x ").join(map(in_words, value))


def quantity(value: float) -> str:
    """
    >>> quantity(950), quantity(12_340), quantity(3_400_000)
    ('950', '12.3 k', '3.4 M')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """
    >>> duration(7.6), duration(75), duration(3700)
    ('8 s', '1:15 min', '1:01 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def make_table(title: str, *headers: str, left: int = 1) -> "Table":
    """A table whose first `left` columns are words, the others numbers."""
    from rich.table import Table

    table = Table(title=title)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right")
    return table
