"""report.html: everything about a run on one page that needs no other file and asks nothing of the network."""

from __future__ import annotations

import html
import json

from .run_folder import RunFolder, write_text


def write_report(run: RunFolder) -> None:
    metrics = json.dumps(run.read_metrics(), indent=1)
    write_text(run.report_file, f"<!doctype html><meta charset=utf-8><pre>{html.escape(metrics)}</pre>")
