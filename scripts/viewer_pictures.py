"""Take the pictures of the viewer's page for the documentation: docs/images/viewer.webp and viewer_phone.webp.

nerfturbo train builtin:toybox --output runs/toybox && python scripts/viewer_pictures.py runs/toybox
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

SIZES = {"viewer": (1280, 800), "viewer_phone": (390, 844)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
SHARP_SECONDS = 60.0  # by then the finest picture is there, on a slow machine too
PATIENCE = 300_000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    command = [sys.executable, "-m", "nerfturbo", "view", str(args.run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer, sync_playwright() as playwright:
        assert viewer.stdout is not None
        found = re.match(r"(http\S+)", viewer.stdout.readline())
        assert found is not None, "the viewer printed no address"
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(PATIENCE)
            page.goto(found.group(1))
            arrange(page, wide=width > 1000)
            page.wait_for_timeout(1000.0 * SHARP_SECONDS)
            file = args.output / f"{name}.webp"
            Image.open(io.BytesIO(page.screenshot(timeout=PATIENCE))).convert("RGB").save(file, quality=80, method=6)
            print(f"{file}: {width}x{height}, {file.stat().st_size / 1024:.0f} KB")
            page.close()
        browser.close()
        viewer.terminate()


def arrange(page: Any, *, wide: bool) -> None:
    """Open what the picture is to show, and close what a browser without a GPU says."""
    page.get_by_text("Software WebGL").wait_for()
    page.locator(".mantine-Notification-closeButton").first.click()
    if not wide:
        page.get_by_text("nerfturbo", exact=True).click()  # folds the panel
    else:
        page.get_by_text("Curves", exact=True).click()
        page.get_by_text("In the scene", exact=True).click()
        page.get_by_text("Cameras of train").click()
        page.mouse.move(400, 500)
        page.mouse.wheel(0, 900)


if __name__ == "__main__":
    main()
