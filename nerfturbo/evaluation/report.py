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
from pathlib import Path
from typing import Any

from ..config import NO_STEP_LIMIT, Config, to_dict
from ..files import write_atomically
from .images import load_comparison
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


def compare_runs(runs: list[RunFolder]) -> dict[str, Any]:
    """What the page and the table show, as plain values; runs keep the order given."""
    rows = []
    for name, run in zip(_names(runs), runs, strict=True):
        metrics, log = run.read_metrics(), run.read_log()
        machine = metrics.get("machine") or {}
        rows.append(
            {
                "name": name,
                "path": str(run.path),
                "scene": metrics.get("scene"),
                "psnr": metrics.get("psnr"),
                "ssim": metrics.get("ssim"),
                "lpips": metrics.get("lpips"),
                "steps": metrics.get("steps"),
                "train_seconds": metrics.get("train_seconds"),
                "rays_per_second": metrics.get("rays_per_second"),
                "memory_bytes": metrics.get("peak_gpu_memory_bytes") or metrics.get("peak_memory_bytes"),
                "machine": machine.get("gpu") or machine.get("processor"),
                "protocol": _protocol(metrics.get("protocol")),
                "curves": run_curves([record for record in log if record.get("kind") == "step"]),
            }
        )
    return {"runs": rows, "settings": _differences([shown_config(run.read_config()) for run in runs])}


def write_comparison(path: Path, found: dict[str, Any]) -> None:
    """One page that needs no other file; whole or not at all."""
    write_atomically(path, render_page(found, "compare_page"))


def _names(runs: list[RunFolder]) -> list[str]:
    """Folder names, with as many parents as it takes to tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({index})" for index, part in enumerate(parts)]


def _protocol(found: dict[str, Any] | None) -> str:
    if not found:
        return "not scored"
    size = found.get("resolution") or []
    shown = " x ".join(map(str, size)) if size and not isinstance(size[0], list) else "several sizes"
    return f"{found.get('n_views')} {found.get('split')} views, {shown}, {found.get('background')}"


def _differences(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    flat = [_flat(config) for config in configs]
    names = sorted(set().union(*flat))
    rows = [{"name": name, "values": [values.get(name) for values in flat]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result
