"""Several runs side by side: scores, costs, curves, and the settings in which they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import write_atomically
from .report import render_page, run_curves, shown_config
from .run_folder import RunFolder


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
