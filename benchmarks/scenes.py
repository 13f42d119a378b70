"""Every scene of a folder, trained without a flag but a time limit and a size: the table of docs/studies/scenes.md.

    python benchmarks/scenes.py DATA OUTPUT.json [--seconds 180] [--device cpu] [--scenes ngp/fox llff/fern] [--as-is]

DATA holds the scenes by name (blender/lego, ngp/fox, ...); with --as-is its pictures are small enough already, as
`scripts/stage_scenes.py` makes them. For each scene `nerfturbo scene info` and `train` run as a user would run them.
OUTPUT.json, OUTPUT.md (the table), OUTPUT.png (truth, render and error of one test view of each scene) and
OUTPUT.log (what the commands said) are renewed after every scene; rows of scenes that are not asked for stay.
--pictures keeps each scene's picture and camera plot in a folder. --one-process saves the start of Python for each
scene, which then share their peak memory. A scene that fails leaves its reason in the file and does not stop the
others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

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
# D-NeRF's test views are known not to match its training views: without them the val split is scored.
LEFT_OUT = {"dnerf/lego": ("test", "transforms_test.json")}
SHOWN = {"ngp/fox": 1}  # of the test pictures; the middle one unless named here, which of the fox shows no face
SHEET_WIDTH = 1200  # of the picture of all scenes
START_SECONDS = 300.0  # a command may take this much longer than it trains: imports, kernels, scores


def command(args: argparse.Namespace, seconds: float, *words: str) -> str:
    """Run `nerfturbo WORDS` and return what it prints; what it says meanwhile goes into the log."""
    log = args.output.with_suffix(".log")
    with log.open("a", encoding="utf-8") as said:
        print(f"$ nerfturbo {' '.join(words)}", file=said, flush=True)
        code, printed = _run_here(words, said) if args.one_process else _run_apart(words, said, seconds)
    if code != 0:
        last = [text.strip() for text in log.read_text(encoding="utf-8").splitlines() if text.strip()][-1]
        raise RuntimeError(f"nerfturbo {words[0]} ended with {code}: {last}")
    return printed


def _run_apart(words: tuple[str, ...], said: TextIO, seconds: float) -> tuple[int, str]:
    line = [sys.executable, "-m", "nerfturbo", *words]
    try:
        run = subprocess.run(line, stdout=subprocess.PIPE, stderr=said, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nerfturbo {words[0]} took more than {seconds:g} s") from None
    return run.returncode, run.stdout


def _run_here(words: tuple[str, ...], said: TextIO) -> tuple[int, str]:
    from nerfturbo.cli.main import main as nerfturbo

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        return nerfturbo(list(words)), printed.getvalue()


def without(source: Path, names: tuple[str, ...], work: Path) -> Path:
    """The same scene without some of its entries, as links."""
    if not any((source / name).exists() for name in names):
        return source
    target = work / "links" / source.name
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in names:
            os.symlink(path.resolve(), target / path.name)
    return target


def one_scene(source: Path, name: str, downscale: int, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """What was recognised and chosen, and what training reached."""
    stem = name.replace("/", "-")
    shrink = ["--downscale", str(downscale), "--allow-outside"]  # what is left of a scene is links
    source = without(source, LEFT_OUT.get(name, ()), work)
    plot = [] if args.pictures is None else ["--plot", str(args.pictures / f"{stem}-cameras.png")]
    info = json.loads(command(args, START_SECONDS, "scene", "info", str(source), *shrink, *plot, "--json"))
    run = work / stem
    flags = ["--time-limit", f"{args.seconds:g}", "--turntable", "0", "--device", args.device]
    flags += ["--eval-views", str(args.views or 1_000_000)]  # all of them, however long that takes
    longest = 3.0 * args.seconds + START_SECONDS
    command(args, longest, "train", str(source), *shrink, *flags, "--output", str(run))
    metrics = json.loads((run / "metrics.json").read_text())
    config = json.loads((run / "config.json").read_text())["config"]
    pictures = sorted((run / "images").glob("test_*.png"))
    shown = pictures[min(SHOWN.get(name, len(pictures) // 2), len(pictures) - 1)]
    add_to_sheet(args.output.with_suffix(".png"), shown)
    if args.pictures is not None:
        shutil.copy(shown, args.pictures / f"{stem}.png")
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


def add_to_sheet(sheet: Path, picture: Path) -> None:
    """Put a picture below those that are there, all of one width."""
    from PIL import Image

    images = [Image.open(file).convert("RGB") for file in (sheet, picture) if file.is_file()]
    images = [image.resize((SHEET_WIDTH, round(image.height * SHEET_WIDTH / image.width))) for image in images]
    whole = Image.new("RGB", (SHEET_WIDTH, sum(image.height for image in images)))
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    whole.save(sheet)


def table(rows: list[dict[str, Any]], seconds: float) -> str:
    """The rows as Markdown."""
    lines = [
        f"| scene | format | images (train + scored) | size | preset | bounds | PSNR, {seconds:g} s | blurred truth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['scene']} | failed: {row['error']} | | | | | | |")
            continue
        views = row["views"]
        scored = sum(count for split, count in views.items() if split in str(row["scored_on"])) or views.get("test", 0)
        levels = row["bounds"]["grid_levels"]
        side = max(high - low for low, high in zip(row["bounds"]["low"], row["bounds"]["high"], strict=True))
        bounds = f"box of {side:.3g}" + (", bounded" if levels == 1 else f" x {2 ** (levels - 1)}, unbounded")
        cells = [row["scene"], row["format"], f"{views['train']} + {scored}", "{} x {}".format(*row["resolution"])]
        cells += [row["preset"], bounds, f"{row['psnr']:.2f} dB", f"{row['blurred_psnr']:.2f} dB"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def earlier_rows(output: Path) -> dict[str, dict[str, Any]]:
    """By scene: what the file holds already."""
    if not output.is_file():
        return {}
    return {row["scene"]: row for row in json.loads(output.read_text())["values"]}


def write(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> str:
    """The file and the table, with the scenes in their order."""
    ordered = [rows[name] for name in SCENES if name in rows]
    text = table(ordered, args.seconds)
    sizes = "pictures as they are" if args.as_is else "--downscale N"
    scored = "all test views" if args.views is None else f"{args.views} test views"
    protocol = (
        f"nerfturbo train SCENE --time-limit {args.seconds:g}, {sizes}, no other flag; {scored} (dnerf: val), on white"
    )
    what = "every format, trained without a flag"
    write_json(args.output, Record(what, protocol, 0, ordered, machine=machine(args.device)))
    args.output.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, help="score only this many test views")
    parser.add_argument("--as-is", action="store_true", help="do not shrink the pictures")
    parser.add_argument("--one-process", action="store_true", help="run the commands in this process")
    parser.add_argument("--pictures", type=Path, help="a folder for each scene's picture and camera plot")
    parser.add_argument("--scenes", nargs="*", choices=sorted(SCENES), help="all of them unless given")
    args = parser.parse_args()
    rows = earlier_rows(args.output)
    for folder in (args.output.parent, args.pictures):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    asked = [name for name in SCENES if not args.scenes or name in args.scenes]
    failed, text = 0, ""
    with tempfile.TemporaryDirectory() as work:
        for name in asked:
            downscale = SCENES[name] if args.device == "cpu" else max(1, SCENES[name] // 4)
            start = time.monotonic()
            try:
                rows[name] = one_scene(args.data / name, name, 1 if args.as_is else downscale, args, Path(work))
            except (RuntimeError, OSError, KeyError, IndexError, ValueError) as error:
                rows[name] = {"scene": name, "error": f"{type(error).__name__}: {error}"[:400]}
                failed += 1
            text = write(args, rows)
            print(json.dumps(rows[name]), f"{time.monotonic() - start:.0f} s", flush=True)
    print(text)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
