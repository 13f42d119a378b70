"""Bake run folders for the web and open the pages in headless Chromium (software GL):

    nerfturbo train SCENE --time-limit 60 --output runs/SCENE           # for each scene
    python benchmarks/web_scenes.py runs/fox runs/beer --pages pages --out benchmarks/results/cpu/web_scenes.json

Of each run, for the default size and for --phone: seconds of baking (wall, and of both cores together), bytes, dB
against the field and the test photos; from the page: milliseconds from navigation to the still and to the first
picture, and screenshots 1400 and 390 pixels wide beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from nerfturbo.bench.record import Record, machine, write_json

FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
KEPT = ("bytes", "budget_mb", "cells", "levels", "vertices", "features", "score", "scored_size", "tune_steps")
WIDTHS = {1400: 900, 390: 780}
MARK = "performance.getEntriesByName('{}')[0]?.startTime ?? null"
FIRST = MARK.format("first-picture")


def bake(run: Path, file: Path, *flags: str) -> dict:
    command = [sys.executable, "-m", "nerfturbo", "export", "web", str(run), str(file), "--overwrite", "--json", *flags]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    after, said = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(done.stdout)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = {"seconds": time.perf_counter() - started, "processor_seconds": busy}
    return {name: said[name] for name in KEPT} | {"seconds_by_part": said["seconds_by_part"]} | times


def look(file: Path) -> dict:
    """Milliseconds to the still, to the first picture drawn and until all is loaded, by width of the page. The first
    page waits for the browser's graphics to start too; an empty one says how long that takes."""
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page()
        page.goto("data:text/html,<p>text")
        started = time.perf_counter()
        page.screenshot()
        found["empty_page_ms"] = 1000.0 * (time.perf_counter() - started)
        page.close()
        for width, height in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(600_000)
            page.goto(file.resolve().as_uri())
            page.evaluate("nerfturbo.ready.then(() => true)")
            whole = page.evaluate("performance.now()")
            page.wait_for_function(f"() => ({FIRST}) !== null")
            page.wait_for_function("() => !nerfturbo.page.pace.busy && !nerfturbo.page.pace.wanted")
            still = page.evaluate(MARK.format("still"))
            found[width] = {"still_ms": still, "first_picture_ms": page.evaluate(FIRST), "loaded_ms": whole}
            page.screenshot(path=str(file.with_name(f"{file.stem}_{width}.png")))
            page.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.pages.mkdir(parents=True, exist_ok=True)
    values = json.loads(options.out.read_text())["values"] if options.out.exists() else {}
    for run in options.runs:
        for label, flags in {"default": (), "phone": ("--phone",)}.items():
            file, load = options.pages / f"{run.name}_{label}.html", os.getloadavg()[0]
            made = bake(run, file, *flags) | {"load_before": load}
            values.setdefault(run.name, {})[label] = made | {"page": look(file)}
            record = Record(
                what="bake time, size, PSNR and first picture of web pages of short CPU runs",
                protocol="one bake each; seconds: the whole command, on two cores shared with load_before others; "
                "processor_seconds: its own; first picture: from navigation, headless Chromium, software GL",
                seed=0,
                values=values,
                machine=machine("cpu"),
            )
            print(write_json(options.out, record), json.dumps(values[run.name][label])[:600])


if __name__ == "__main__":
    main()
