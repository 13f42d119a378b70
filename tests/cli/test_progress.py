"""What people see: phases, numbers, the library's log and warnings, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import warnings

import pytest

from nerfturbo.cli import progress
from nerfturbo.cli.progress import PlainDisplay, RichDisplay, describe, open_display, showing

RECORD = {
    "step": 20,
    "psnr": 21.456,
    "loss": 0.01,
    "rays_per_second": 12_000,
    "samples_per_second": 2.5e6,
    "occupied_fraction": 0.0421,
}


def test_records_are_described() -> None:
    assert describe(RECORD) == ["PSNR 21.46 dB", "loss 0.01000", "12.0 k rays/s", "2.5 M samples/s", "4.2% occupied"]


def test_plain_lines_come_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "_started", 70.0)  # when the command began, before its imports
    display = PlainDisplay()
    display.phase("training")
    for _ in range(12):
        now += 1.0
        display.update(0.5, eta=75.0, record=RECORD)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0] == "[  30.0 s] training"
    assert "training: 50%, step 20, PSNR 21.46 dB" in lines[1] and lines[1].endswith("1:15 min left")


def test_the_live_display_draws_phase_bar_and_numbers() -> None:
    from rich.console import Console

    screen = io.StringIO()
    display = RichDisplay(Console(file=screen, force_terminal=True, width=100, highlight=False))
    try:
        display.phase("compiling CPU kernels")
        display._live.refresh()
        display.phase("training")
        display.update(0.25, eta=8.0, record=RECORD)
        display._live.refresh()
        display.note("a path [with brackets]")
    finally:
        display.close()
    shown = screen.getvalue()
    for text in ("compiling CPU kernels", "training", "25%", "8 s left", "PSNR 21.46 dB", "a path [with brackets]"):
        assert text in shown, text


def test_the_parts_of_a_stage_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_started", 0.0)
    marks = [
        ("compiling (once, about 40 s)", 1.0),
        ("compiling (once): march", 3.0),
        ("compiling (once): adam", 7.0),
        ("training", 9.0),
    ]
    monkeypatch.setattr(progress, "_marks", marks)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 10.0)
    assert progress.seconds_by_stage() == {"starting": 1.0, "compiling": 8.0, "training": 1.0}


def test_elsewhere_than_on_a_terminal_lines_are_plain() -> None:
    assert isinstance(open_display(), PlainDisplay)


def test_the_log_and_warnings_become_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with showing():
        logging.getLogger("nerfturbo.data").info("rendering %d views", 60)
        logging.getLogger("nerfturbo.data").debug("unseen")
        warnings.warn("no camera sees any cell", stacklevel=1)
    shown = capsys.readouterr().err
    assert "rendering 60 views" in shown and "warning: no camera sees any cell" in shown and "unseen" not in shown
    logging.getLogger("nerfturbo.data").info("later")
    assert "later" not in capsys.readouterr().err
