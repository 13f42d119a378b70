"""report.html of a run, and the comparison of several: pages that need no other file and ask nothing of the network."""

import base64
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..config import NO_STEP_LIMIT, Config, to_dict
from ..files import write_atomically
from .images import load_comparison
from .run_folder import RunFolder, finite

MAX_POINTS = 600  # of a curve
MAX_IMAGES = 24  # views shown with images; the table lists all of them
MAX_TURNTABLE_BYTES = 6_000_000
CURVES = ("psnr", "loss", "occupied_fraction", "rays_per_second", "samples_per_second", "learning_rate", "loss_scale")
COMPARED = ("scene", "psnr", "ssim", "lpips", "steps", "train_seconds", "rays_per_second")


def write_report(run: RunFolder) -> None:
    """Make report.html from what lies in the run folder."""
    write_page(run.report_file, report_data(run), "report_page")


def write_page(path: Path, data: dict[str, Any], name: str) -> None:
    """A page in one file: NAME.html and NAME.js in the frame, with the data, the charts and the style of all pages."""

    def part(*names: str) -> str:
        return "".join((files("nerfturbo.evaluation") / file).read_text(encoding="utf-8") for file in names)

    page = part("page_frame.html")
    parts = {
        "<!--BODY-->\n": part(f"{name}.html"),
        "  <!--CHARTS-->\n": part("page_charts.html"),
        "/*STYLE*/": part("page.css"),
        "/*SCRIPT*/": part("page_charts.js", f"{name}.js"),
        # "<" is escaped so that no text of the data can end the script element it stands in.
        "/*DATA*/": json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c"),
    }
    for mark, text in parts.items():
        head, _, tail = page.partition(mark)
        page = head + text + tail
    write_atomically(path, page)


def report_data(run: RunFolder) -> dict[str, Any]:
    """What the page shows, as plain values."""
    metrics, log = run.read_metrics(), run.read_log()
    views = sorted(metrics.pop("per_view", []), key=lambda view: math.inf if view["psnr"] is None else view["psnr"])
    shown = sorted(_views_with_images(len(views)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # Pillow works outside of Python's lock
        images = dict(zip(shown, threads.map(lambda place: _images(run, views[place]["index"]), shown), strict=True))
    files = ((kind, run.turntable_file(kind[-3:])) for kind in ("video/mp4", "image/gif"))
    small = ((kind, path) for kind, path in files if path.is_file() and path.stat().st_size <= MAX_TURNTABLE_BYTES)
    # What a reader of the report may open: the run's own files, exports and videos.
    endings = {".html", ".glb", ".ply", ".obj", ".mp4", ".gif", ".onnx", ".npz", ".json"}
    found = [path.name for path in run.path.iterdir() if path.is_file() and path.suffix.lower() in endings]
    pages = [f"{path.parent.name}/{path.name}" for path in run.path.glob("*/index.html")]
    return {
        "run": run.path.name,
        "metrics": metrics,
        "config": _shown_config(run.read_config()),
        "curves": _curves(log),
        "previews": _thinned([record for record in log if record.get("kind") == "preview"]),
        "views": [view | images.get(place, {}) for place, view in enumerate(views)],
        "turntable": next((data_uri(kind, path.read_bytes()) for kind, path in small), None),
        "beside": sorted({*found, *pages} - {run.report_file.name}),
    }


def _shown_config(config: Config) -> dict[str, Any]:
    """The config as plain values for people: a run without a limit of steps says so in words."""
    values = to_dict(config)
    if values["train"]["steps"] >= NO_STEP_LIMIT:
        values["train"]["steps"] = "until the time limit"
    return values


def _views_with_images(n_views: int) -> set[int]:
    """Places in the list, worst first: the worst third of what fits, then evenly to the best."""
    if n_views <= MAX_IMAGES:
        return set(range(n_views))
    worst = MAX_IMAGES // 3
    rest = MAX_IMAGES - worst
    return set(range(worst)) | {worst + round(k * (n_views - 1 - worst) / (rest - 1)) for k in range(rest)}


def _images(run: RunFolder, index: int) -> dict[str, str]:
    path = run.view_file(index)
    parts = load_comparison(path) if path.is_file() else ()
    return {name: data_uri("image/webp", part) for name, part in zip(("truth", "render", "error"), parts, strict=False)}


def renew_links(run: RunFolder, made: Iterable[Path]) -> None:
    """Write the report again where something was made beside it."""
    if run.report_file.is_file() and any(path.resolve().parent == run.path.resolve() for path in made):
        write_report(run)


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode("ascii")


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(records) <= MAX_POINTS:
        return records
    return [records[round(k * (len(records) - 1) / (MAX_POINTS - 1))] for k in range(MAX_POINTS)]


def _curves(log: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns: the page is smaller that way."""
    kept = _thinned([record for record in log if record.get("kind") == "step"])
    return {name: [record.get(name) for record in kept] for name in ("step", "seconds", *CURVES)}


def compare_runs(runs: list[RunFolder]) -> dict[str, Any]:
    """Scores, costs, curves, and the settings in which runs differ, as plain values; runs keep the order given."""
    rows = []
    for name, run in zip(_names(runs), runs, strict=True):
        metrics = run.read_metrics()
        machine = metrics.get("machine") or {}
        row = {"name": name, "path": str(run.path)} | {key: metrics.get(key) for key in COMPARED}
        row["memory_bytes"] = metrics.get("peak_gpu_memory_bytes") or metrics.get("peak_memory_bytes")
        row["machine"] = machine.get("gpu") or machine.get("processor")
        rows.append(row | {"protocol": _protocol(metrics.get("protocol")), "curves": _curves(run.read_log())})
    flat = [_flat(_shown_config(run.read_config())) for run in runs]
    found = [{"name": name, "values": [values.get(name) for values in flat]} for name in sorted(set().union(*flat))]
    settings = [row for row in found if any(value != row["values"][0] for value in row["values"])]
    return {"runs": rows, "settings": settings}


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
    plural = "" if found.get("n_views") == 1 else "s"
    return f"{found.get('n_views')} {found.get('split')} view{plural}, {shown}, {found.get('background')}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result
