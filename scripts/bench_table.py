"""A benchmark's JSON as a table for the documentation: of `benchmarks/ablation.py`, `precision.py` or `trainers.py`.

python scripts/bench_table.py benchmarks/results/h200/ablation.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from records import read_record


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def ablation(values: dict[str, Any]) -> str:
    first, rows = values["rows"][0], []
    for row in values["rows"]:
        if row["psnr"] is None:
            rows.append([row["name"], row.get("error") or "-", "", "", ""])
            continue
        memory = number(None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6, ".0f", " MB")
        times = f"{row['seconds'] / first['seconds']:.2f}"
        rows.append([row["name"], f"{row['seconds']:.1f} s", times, memory, f"{row['psnr']:.2f} dB"])
        rows[-1].append("" if row is first else f"{row['psnr'] - first['psnr']:+.2f}")
    return table(["technique", "training", "times as long", "memory", "PSNR", "dB more"], rows)


def precision(values: dict[str, Any]) -> str:
    rows = []
    for line in values["same_batch"]:
        memory = None if line["peak_bytes"] is None else line["peak_bytes"] / 1e6
        speed = number(line["samples_per_second"] / 1e6, ".1f", " M")
        rows.append([line["kind"], speed, number(line["samples_per_second_ratio"], ".2f")])
        rows[-1] += [number(memory, ".0f", " MB"), number(line["peak_bytes_ratio"], ".2f")]
        rows[-1] += [number(line["psnr"], ".2f", " dB"), number(line["psnr_difference"], "+.2f"), str(line["skipped"])]
    headers = ["precision", "samples/s", "times fp32", "memory", "of fp32's", "PSNR", "dB more", "skipped"]
    return "\n\n".join([table(headers, rows), *equal_time(values)])


def equal_time(values: dict[str, Any]) -> list[str]:
    """Where a coarse pass places fine samples: what a step takes, what fp32's time buys, and that in words."""
    if not values.get("fine_samples"):
        return []
    steps, times = [], []
    for search in values["fine_samples"]:
        parts = [number(search["passes"][name], ".2f", " ms") for name in ("coarse", "fine", "rest")]
        steps.append([search["kind"], *parts, number(search["step_ms"], ".2f", " ms")])
        steps[-1] += [number(search["ratio"], ".2f"), str(search["fine_samples"])]
    for line in values["same_time"]:
        memory = None if line["peak_bytes"] is None else line["peak_bytes"] / 1e6
        times.append([line["kind"], str(line["fine_samples"]), f"{line['steps']:.0f}", f"{line['seconds']:.1f} s"])
        times[-1] += [f"{line['rays_per_second'] / 1e3:.1f} k", f"{line['samples_per_second'] / 1e6:.2f} M"]
        times[-1] += [number(memory, ".0f", " MB"), number(line["psnr"], ".2f", " dB")]
        times[-1] += [number(line["psnr_difference"], "+.2f"), number(line["ssim"], ".3f")]
    headers = ["precision", "coarse pass", "fine pass", "rest", "a step", "times fp32's", "fine samples to train with"]
    found = [table(headers, steps)]
    headers = ["precision", "fine samples", "steps", "training", "rays/s", "samples/s", "memory"]
    found += [table([*headers, "PSNR", "dB more", "SSIM"], times)] if times else []
    return [*found, "\n".join(f"- {text}" for text in values["in_words"])]


def trainers(values: dict[str, Any]) -> str:
    rows = []
    for loop in values["loops"]:
        times = [
            number(loop["step_ms"], ".2f", " ms"),
            number(loop["ratio"], ".3f"),
            number(loop["psnr"], ".2f", " dB"),
        ]
        rows.append([loop["label"], *times, str(loop["lines"])])
    return table(["loop", "a step", "to plain", "PSNR", "lines"], rows)


def main() -> int:
    values = read_record(sys.argv[1])["values"]
    kinds = {"rows": ablation, "same_batch": precision, "loops": trainers}
    made = next((make for key, make in kinds.items() if key in values), None)
    if made is None:
        print("neither an ablation nor precisions nor trainers", file=sys.stderr)
        return 2
    print(made(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
