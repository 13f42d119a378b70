"""Every scene of a folder, trained without a flag but a time limit and a size: the table of docs/datasets.md.

    python benchmarks/scenes.py DATA OUTPUT.json [--seconds 180] [--device cpu] [--scenes ngp/fox llff/fern]

DATA holds the scenes by name (blender/lego, ngp/fox, ...). For each of them `nerfturbo scene info` and `train` run as a
user would run them. Beside OUTPUT.json come OUTPUT.md with the table, and a folder OUTPUT with one picture per
scene: truth, render and error of its middle test view.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nerfturbo.bench.record import Record, machine, write_json

# Divisors that bring the pictures to about 200 pixels: what a CPU trains in minutes. A GPU takes a quarter of them.
SCENES = {
    "blender/lego": 4,
    "dnerf/lego": 4,
    "ngp/fox": 8,
    "ngp/fruit": 4,
    "llff/fern": 2,
    "colmap/beer": 4,
}


def command(*words: str) -> str:
    """Run `nerfturbo WORDS` and return what it prints; what it says meanwhile goes to stderr."""
    run = subprocess.run([sys.executable, "-m", "nerfturbo", *words], stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"nerfturbo {' '.join(words)} ended with {run.returncode}")
    return run.stdout


def one_scene(data: Path, name: str, downscale: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """What was recognised and chosen, and what training reached."""
    shrink = ["--downscale", str(downscale)]
    info = json.loads(command("scene", "info", str(data / name), *shrink, "--json"))
    run = work / name.replace("/", "-")
    flags = ["--time-limit", str(args.seconds), "--turntable", "0", "--device", args.device]
    flags += [] if args.views is None else ["--eval-views", str(args.views)]
    command("train", str(data / name), *shrink, *flags, "--output", str(run))
    metrics = json.loads((run / "metrics.json").read_text())
    config = json.loads((run / "config.json").read_text())["config"]
    pictures = sorted((run / "images").glob("test_*.png"))
    shown = args.output.with_suffix("") / f"{name.replace('/', '-')}.png"
    shown.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(pictures[len(pictures) // 2], shown)
    splits = {split: found["views"] for split, found in info["splits"].items() if found is not None}
    return {
        "scene": name,
        "format": info["format"],
        "views": splits,
        "resolution": metrics["protocol"]["resolution"],
        "preset": config["preset"],
        "bounds": info["bounds"],
        "psnr": metrics["psnr"],
        "ssim": metrics["ssim"],
        "constant_psnr": metrics["baselines"]["constant_psnr"],
        "blurred_psnr": metrics["baselines"]["blurred_psnr"],
        "scored_on": metrics["protocol"]["split"],
        "steps": metrics["steps"],
        "train_seconds": metrics["train_seconds"],
        "total_seconds": metrics["total_seconds"],
        "peak_memory_bytes": metrics["peak_memory_bytes"],
    }


def table(rows: list[dict[str, Any]], seconds: float) -> str:
    """The rows as Markdown."""
    lines = [
        f"| scene | format | images (train + test) | size | preset | bounds | PSNR, {seconds:g} s | blurred truth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        views = row["views"]
        scored = sum(count for split, count in views.items() if split in str(row["scored_on"])) or views.get("test", 0)
        levels = row["bounds"]["grid_levels"]
        side = max(high - low for low, high in zip(row["bounds"]["low"], row["bounds"]["high"], strict=True))
        bounds = f"box of {side:.3g}" + (", bounded" if levels == 1 else f" x {2 ** (levels - 1)}, unbounded")
        cells = [row["scene"], row["format"], f"{views['train']} + {scored}", "{} x {}".format(*row["resolution"])]
        cells += [row["preset"], bounds, f"{row['psnr']:.2f} dB", f"{row['blurred_psnr']:.2f} dB"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, help="score only this many test views")
    parser.add_argument("--scenes", nargs="*", choices=sorted(SCENES), help="all of them unless given")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for name, divisor in SCENES.items():
            if args.scenes and name not in args.scenes:
                continue
            downscale = divisor if args.device == "cpu" else max(1, divisor // 4)
            rows.append(one_scene(args.data, name, downscale, args, Path(work)))
            print(json.dumps(rows[-1]), flush=True)
    text = table(rows, args.seconds)
    args.output.with_suffix(".md").write_text(text)
    protocol = (
        f"nerfturbo train SCENE --downscale N --time-limit {args.seconds:g}, no other flag; all test views, on white"
    )
    what = "every format, trained without a flag"
    write_json(args.output, Record(what, protocol, 0, rows, machine=machine(args.device)))
    print(text)


if __name__ == "__main__":
    main()
