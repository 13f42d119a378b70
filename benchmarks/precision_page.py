"""The precision comparison as one HTML page that needs no other file: tables, curves, difference images."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from charts import Bars, Curve, bar_chart, line_chart
from fine_samples import FineSearch
from nerfturbo.files import replacing
from precision_runs import PrecisionResult, PrecisionRun, in_words, summarise

STYLE = """body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#111}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:.4rem}figcaption{font-size:13px;color:#555}
img{image-rendering:pixelated;max-width:300px;width:240px}svg{width:49%;height:auto;min-width:340px;vertical-align:top}
svg:first-of-type{display:block;width:auto}"""
DIFFERENCE_GAIN = 8.0
BATCH_COLUMNS = {
    "kind": "precision",
    "batch_samples": "batch, samples",
    "seconds": "s",
    "rays_per_second": "rays/s",
    "samples_per_second": "samples/s",
    "samples_per_second_ratio": "times fp32",
    "peak_bytes": "peak, MB",
    "peak_bytes_ratio": "of fp32's",
    "psnr": "PSNR, dB",
    "psnr_difference": "dB more than fp32",
    "ssim": "SSIM",
    "skipped": "steps skipped",
}
STEP_COLUMNS = {
    "kind": "precision",
    "coarse": "coarse pass, ms",
    "fine": "fine pass, ms",
    "rest": "rest, ms",
    "step_ms": "a step, ms",
    "ratio": "times fp32's",
    "fine_samples": "fine samples to train with",
}
TIME_COLUMNS = {
    "kind": "precision",
    "fine_samples": "fine samples per ray",
    "steps": "steps",
    "seconds": "s",
    "rays_per_second": "rays/s",
    "samples_per_second": "samples/s",
    "peak_bytes": "peak, MB",
    "psnr": "PSNR, dB",
    "psnr_difference": "dB more than fp32",
    "ssim": "SSIM",
}


def plots(result: PrecisionResult) -> dict[str, str]:
    """SVG texts by file name."""
    first = [run for run in result.same_batch if run.seed == result.same_batch[0].seed]
    names = [run.kind for run in first]
    sizes = [None if run.peak_bytes is None else run.peak_bytes / 1e6 for run in first]
    panels = [Bars("samples/s", [run.samples_per_second for run in first]), Bars("peak memory, MB", sizes)]
    found = {"speed": bar_chart("At one batch", names, panels)}
    found |= _score_plots(first, "Test views", "")
    return found | _score_plots(result.same_memory, "Test views, each with its largest batch", "same_memory_")


def _score_plots(runs: Sequence[PrecisionRun], title: str, prefix: str) -> dict[str, str]:
    """PSNR and SSIM over seconds and over steps."""
    found = {}
    for score, unit in (("psnr", "PSNR, dB"), ("ssim", "SSIM")):
        scored = [(run, [p for p in run.points if getattr(p, score) is not None]) for run in runs]
        scored = [(run, points) for run, points in scored if points]
        for axis, label in (("seconds", "seconds of training"), ("step", "steps")) if scored else ():
            curves = [
                Curve(run.kind, [getattr(p, axis) for p in points], [getattr(p, score) for p in points])
                for run, points in scored
            ]
            found[f"{prefix}{score}_over_{axis}"] = line_chart(title, curves, x_label=label, y_label=unit)
    return found


def time_plots(result: PrecisionResult) -> dict[str, str]:
    """SVG texts by file name: how a step grows with the fine samples, and what those in fp32's time do to scores."""
    found = {}
    curves = [Curve(one.kind, *_growth(one)) for one in result.searches.values() if len(one.trials) > 1]
    if curves:
        ends = [min(x for curve in curves for x in curve.x), max(x for curve in curves for x in curve.x)]
        labels = {"x_label": "fine samples per ray", "y_label": "a step, times fp32's"}
        curves.insert(0, Curve("fp32's step", ends, [1.0, 1.0]))
        found["step_over_fine_samples"] = line_chart("What fits into fp32's step", curves, **labels)
    runs = [run for run in result.same_time if run.seed == result.same_time[0].seed]
    if runs:
        samples = Bars("fine samples per ray", [run.fine_samples for run in runs])
        panels = [samples, Bars("PSNR, dB", [run.psnr for run in runs], from_zero=False)]
        found["equal_time"] = bar_chart("In fp32's time", [run.kind for run in runs], panels)
    return found


def _growth(search: FineSearch) -> tuple[list[float], list[float]]:
    """Fine samples of the trials and their ratio to fp32's step, in order."""
    timed = sorted((trial.fine_samples, trial.ratio) for trial in search.trials if trial.ratio is not None)
    return [float(n) for n, _ in timed], [ratio for _, ratio in timed]


def precision_page(result: PrecisionResult, title: str) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(title)}</h1>", "<h2>At one batch</h2>", _table(summarise(result.same_batch))]
    if result.same_memory or result.misfits:
        budget = "" if result.budget is None else f": {result.budget / 1e6:.0f} MB"
        parts += [f"<h2>Each with the largest batch that fits one memory budget{budget}</h2>"]
        parts += [_table(summarise(result.same_memory))] if result.same_memory else []
        parts += [f"<p>{escape(f'{kind}: {why}')}</p>" for kind, why in result.misfits.items()]
    parts += plots(result).values()
    if result.searches:
        parts += ["<h2>Saved time spent on fine samples</h2>", _table(step_lines(result), STEP_COLUMNS)]
        parts += [_table(summarise(result.same_time), TIME_COLUMNS)] if result.same_time else []
        parts += [f"<p>{escape(text)}</p>" for text in in_words(replace(result, misfits={}))]
        parts += time_plots(result).values()
    parts += ["<h2>Pictures</h2>", _pictures(result.images)]
    own = [run for run in (*result.same_memory, *result.same_time) if run not in result.same_batch]
    parts += ["<h2>Stability</h2>", _stability([*result.same_batch, *own])]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def step_lines(result: PrecisionResult) -> list[dict[str, Any]]:
    """A step of each kind at the config's samples, and the fine samples that fit into fp32's."""
    return [{**vars(search.passes), **vars(search)} for search in result.searches.values()]


def _table(lines: Sequence[dict[str, Any]], columns: dict[str, str] = BATCH_COLUMNS) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in columns.values())
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(name, line[name])}</td>" for name in columns) + "</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "peak_bytes":
        return f"{value / 1e6:,.0f}"
    if name == "psnr_difference":
        return f"{value:+.2f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return escape(str(value))


def _pictures(images: dict[str, Tensor]) -> str:
    """The truth, every render, and how far each is from fp32's, enlarged."""
    parts = [_figure(name, image) for name, image in images.items()]
    base = images.get("fp32")
    for name, image in images.items():
        if base is not None and name not in ("truth", "fp32"):
            difference = ((image - base).abs() * DIFFERENCE_GAIN).clamp(0.0, 1.0)
            parts.append(_figure(f"|{name} - fp32| x {DIFFERENCE_GAIN:g}", difference))
    return "".join(parts)


def _figure(caption: str, image: Tensor) -> str:
    from PIL import Image

    pixels = (image.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).cpu().numpy()
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode("ascii")
    return f'<figure><img src="{uri}" alt=""><figcaption>{escape(caption)}</figcaption></figure>'


def _stability(runs: Sequence[PrecisionRun]) -> str:
    rows = []
    for run in runs:
        scales = ", ".join(f"{scale:g} from step {step}" for step, scale in run.loss_scales[:12])
        name = f"{run.kind}, seed {run.seed}, {run.batch_samples} samples"
        rows.append(f"<tr><td>{escape(name)}</td><td>{run.skipped}</td><td>{escape(scales)}</td></tr>")
    return f"<table><tr><th>run</th><th>steps skipped</th><th>loss scale</th></tr>{''.join(rows)}</table>"


def renders_file(output: Path) -> Path:
    """Where the pictures of an unfinished comparison wait for its page."""
    return output.with_name(f".{output.stem}-renders.safetensors")


def write_renders(output: Path, images: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    from safetensors.torch import save_file

    with replacing(renders_file(output)) as temporary:
        save_file({name: image.contiguous() for name, image in images.items()}, temporary)


def read_renders(output: Path) -> dict[str, Tensor]:
    """Those that were written; none where the file is missing or broken, since they can be done without."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with contextlib.suppress(OSError, SafetensorError):
        return load_file(renders_file(output))
    return {}
