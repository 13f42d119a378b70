"""Pixels in headless Chromium: `python benchmarks/web_page.py PAGE.html DATA FIELD.npz OUT.json [DOWNSCALE [VIEWS]]`.

Draws the test views of a scene with the page's own shader (software GL will do) and compares them with the photos and
with the field's pictures that `benchmarks/web.py` kept. No request may leave the page.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import open_scenes
from nerfturbo.evaluation.evaluate import truth_image
from nerfturbo.evaluation.metrics import psnr

FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
ROWS = 80  # drawn at a time: one draw must not take so long that the browser gives up
DRAW = """([eye, axes, lens, width, height]) => {
    const bytes = nerfturbo.page.renderer.pixels({eye, axes, lens, width, height},
        {background: [1, 1, 1], depth: false, depthRange: [0, 1]});
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    return btoa(text);
}"""


def draw(page, cameras, index: int) -> torch.Tensor:
    width, height = cameras.size[index].tolist()
    pose, parts = cameras.camera_to_world[index], []
    fx, fy, cx, cy = [*cameras.focal[index].tolist(), *cameras.center[index].tolist()]
    for first in range(0, height, ROWS):
        rows = min(ROWS, height - first)
        view = [pose[:, 3].tolist(), pose[:, :3].T.tolist(), [fx, fy, cx, cy - first], width, rows]
        content = np.frombuffer(base64.b64decode(page.evaluate(DRAW, view)), np.uint8)
        parts.append(content.reshape(rows, width, 4)[..., :3])
    return torch.from_numpy(np.concatenate(parts).astype(np.float32) / 255.0)


def main(file: str, data: str, field: str, out: str, downscale: str = "1", views: str = "10") -> None:
    from playwright.sync_api import sync_playwright

    test = open_scenes(data, LoadOptions(int(downscale)))[1]
    kept = np.load(field)
    rows = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 64, "height": 64})
        page.set_default_timeout(0)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        started = time.perf_counter()
        page.goto(Path(file).resolve().as_uri())
        page.evaluate("nerfturbo.ready.then(() => true)")
        loaded = time.perf_counter() - started
        for index, rgb in list(zip(kept["views"].tolist(), kept["rgb"], strict=True))[: int(views)]:
            started = time.perf_counter()
            found = draw(page, test.cameras, index)
            row = {
                "view": index,
                "against_field": psnr(found, torch.from_numpy(rgb.astype(np.float32) / 255.0)),
                "against_photos": psnr(found, truth_image(test, index)),
                "seconds": time.perf_counter() - started,
            }
            rows.append(row)
            print(row, flush=True)
            means = {name: sum(one[name] for one in rows) / len(rows) for name in ("against_field", "against_photos")}
            foreign = [url for url in asked if not url.startswith(("file:", "blob:", "data:"))]
            document = {"what": "page in headless Chromium", "load_seconds": loaded, "requests": foreign}
            document |= {"bytes": Path(file).stat().st_size, "means": means, "views": rows}
            Path(out).write_text(json.dumps(document, indent=1) + "\n")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
