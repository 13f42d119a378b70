"""A benchmark's JSON as a table for the documentation: of `nerfturbo bench ablation`, `precision` or `trainers`.

python scripts/bench_table.py benchmarks/h200_ablation.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    return table(headers, rows)


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
    values = json.loads(Path(sys.argv[1]).read_text())["values"]
    kinds = {"rows": ablation, "same_batch": precision, "loops": trainers}
    made = next((make for key, make in kinds.items() if key in values), None)
    if made is None:
        print("neither an ablation nor precisions nor trainers", file=sys.stderr)
        return 2
    print(made(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
