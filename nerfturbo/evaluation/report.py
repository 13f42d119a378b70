"""report.html: everything about a run on one page that needs no other file and asks nothing of the network.

The page: `report_page.html` in `page_frame.html`, with style, script and one JSON object inside; pictures as data URIs.
"""

from __future__ import annotations

import base64
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from ..config import NO_STEP_LIMIT, Config, to_dict
from ..files import write_atomically
from .pictures import load_comparison
from .run_folder import RunFolder, finite

MAX_POINTS = 600  # of a curve
MAX_PICTURES = 24  # views shown with pictures; the table lists all of them
MAX_TURNTABLE_BYTES = 6_000_000
CURVES = (
    "psnr",
    "loss",
    "occupied_fraction",
    "rays_per_second",
    "samples_per_second",
    "learning_rate",
    "loss_scale",
)


def write_report(run: RunFolder) -> None:
    """Make report.html from what lies in the run folder."""
    write_atomically(run.report_file, render_page(report_data(run)))


def render_page(data: dict[str, Any], name: str = "report_page") -> str:
    """The page with its data inside: NAME.html and NAME.js in the frame, the charts and the style of all pages."""

    def part(*names: str) -> str:
        return "".join((files("nerfturbo.evaluation") / file).read_text(encoding="utf-8") for file in names)

    page = part("page_frame.html")
    # "<" is escaped so that no text of the data can end the script element it stands in.
    blob = json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "<!--BODY-->\n": part(f"{name}.html"),
        "  <!--CHARTS-->\n": part("page_charts.html"),
        "/*STYLE*/": part("page.css"),
        "/*SCRIPT*/": part("page_charts.js", f"{name}.js"),
        "/*DATA*/": blob,
    }
    for mark, text in parts.items():
        head, _, tail = page.partition(mark)
        page = head + text + tail
    return page


def report_data(run: RunFolder) -> dict[str, Any]:
    """What the page shows, as plain values."""
    metrics = run.read_metrics()
    log = run.read_log()
    views = sorted(metrics.get("per_view", []), key=lambda view: view["psnr"] if view["psnr"] is not None else math.inf)
    shown = sorted(_views_with_pictures(len(views)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # Pillow works outside of Python's lock
        found = threads.map(lambda place: _pictures(run, views[place]["index"]), shown)
        pictures = dict(zip(shown, found, strict=True))
    return {
        "run": run.path.name,
        "metrics": {name: value for name, value in metrics.items() if name != "per_view"},
        "config": shown_config(run.read_config()),
        "curves": run_curves([record for record in log if record.get("kind") == "step"]),
        "previews": _thinned([record for record in log if record.get("kind") == "preview"]),
        "views": [view | pictures.get(place, {}) for place, view in enumerate(views)],
        "turntable": _turntable(run),
    }


def shown_config(config: Config) -> dict[str, Any]:
    """The config as plain values for people: a run without a limit of steps says so in words."""
    values = to_dict(config)
    if values["train"]["steps"] >= NO_STEP_LIMIT:
        values["train"]["steps"] = "until the time limit"
    return values


def _views_with_pictures(n_views: int) -> set[int]:
    """Places in the list, worst first: the worst third of what fits, then evenly to the best."""
    if n_views <= MAX_PICTURES:
        return set(range(n_views))
    worst = MAX_PICTURES // 3
    rest = MAX_PICTURES - worst
    return set(range(worst)) | {worst + round(k * (n_views - 1 - worst) / (rest - 1)) for k in range(rest)}


def _pictures(run: RunFolder, index: int) -> dict[str, str]:
    path = run.view_file(index)
    if not path.is_file():
        return {}
    return dict(zip(("truth", "render", "error"), map(_webp_uri, load_comparison(path)), strict=True))


def _webp_uri(content: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(content).decode("ascii")


def _turntable(run: RunFolder) -> str | None:
    path = run.turntable_file("gif")
    if not path.is_file() or path.stat().st_size > MAX_TURNTABLE_BYTES:
        return None
    return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(records) <= MAX_POINTS:
        return records
    return [records[round(k * (len(records) - 1) / (MAX_POINTS - 1))] for k in range(MAX_POINTS)]


def run_curves(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns: the page is smaller that way."""
    kept = _thinned(records)
    return {name: [record.get(name) for record in kept] for name in ("step", "seconds", *CURVES)}
