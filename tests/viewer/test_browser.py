"""The live page in a real browser, over a training that runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nerfturbo.evaluation.camera_path import read_camera_path
from nerfturbo.ops import use_backend
from nerfturbo.training.callbacks import MetricsLog
from nerfturbo.training.checkpoint import list_checkpoints
from nerfturbo.training.trainer import Trainer
from nerfturbo.viewer.page import LivePage, ViewedTraining
from nerfturbo.viewer.panel import SceneFacts

from ..conftest import IN_CI
from ..tiny import ball_scene, tiny_config

pytestmark = pytest.mark.slow
FLAGS = ["--no-sandbox", "--disable-gpu", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE = 60.0


def find_browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if IN_CI:
            pytest.fail("CI installs Chromium, and it is not there")
        pytest.skip("no Chromium to open the page with")
    return found


@dataclass
class Running:
    trainer: Trainer
    page: LivePage
    folder: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Training in a thread, with its page."""
    folder = tmp_path_factory.mktemp("run")
    train, test = ball_scene("train"), ball_scene("test", n_views=2)
    with use_backend("reference"):
        trainer = Trainer(tiny_config(steps=10_000_000), train)
    page = LivePage(SceneFacts("ball", train, test, train.aabb, folder / "paths", True))
    page._panel._share.value = 60  # pictures soon, on a machine that does other things too
    log = MetricsLog(None, every_steps=5)
    trainer.callbacks += [log, ViewedTraining(page, log, folder / "checkpoints")]

    def fit() -> None:
        with use_backend("reference"):
            trainer.fit()

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    yield Running(trainer, page, folder)
    trainer.should_stop = True
    thread.join(timeout=30.0)
    page.close()
    assert not thread.is_alive()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE:.0f} s: {what}"
        time.sleep(0.1)


def picture(page, name: str) -> np.ndarray:
    """The left half of the page, without the panel; kept where NERFTURBO_SCREENSHOTS says."""
    from PIL import Image

    content = page.screenshot(timeout=PATIENCE * 1000)
    if "NERFTURBO_SCREENSHOTS" in os.environ:
        kept = Path(os.environ["NERFTURBO_SCREENSHOTS"])
        kept.mkdir(parents=True, exist_ok=True)
        (kept / f"{name}.png").write_bytes(content)
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=float)
    return pixels[250:, :380]


def differ(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())


def test_the_page_lives(running: Running) -> None:
    from playwright.sync_api import sync_playwright

    browser_path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 800, "height": 600})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(running.page.url, timeout=PATIENCE * 1000)
        page.wait_for_selector("text=Finest picture", timeout=PATIENCE * 1000)
        until(lambda: running.page.frames_sent > 1, "the first pictures")
        page.wait_for_timeout(800)
        shots = {"opened": picture(page, "opened")}
        assert shots["opened"].std() > 5.0, "something is on the page"

        before, sent = running.trainer.step, running.page.frames_sent
        page.mouse.move(200, 400)
        page.mouse.down()
        page.mouse.move(330, 440, steps=5)
        page.mouse.up()
        until(lambda: running.page.frames_sent > sent + 1, "pictures of the turned camera")
        page.wait_for_timeout(800)
        shots["turned"] = picture(page, "turned")
        assert differ(shots["opened"], shots["turned"]) > 1.0
        until(lambda: running.trainer.step > before, "training to go on")

        page.locator("input[value='color']").first.click()
        page.get_by_role("option", name="opacity").click()
        sent = running.page.frames_sent
        until(lambda: running.page.frames_sent > sent + 1, "pictures of opacity")
        page.wait_for_timeout(800)
        shots["opacity"] = picture(page, "opacity")
        assert differ(shots["turned"], shots["opacity"]) > 3.0

        _pause_and_save(page, running)
        _make_a_path(page, running)
        assert [url for url in asked if url.startswith("http") and "//localhost:" not in url] == []
        before = running.trainer.step
        browser.close()
    until(lambda: running.trainer.step > before + 5, "training to go on after the page was closed")
    until(lambda: not running.page._clients, "the client to be gone")


def _pause_and_save(page, running: Running) -> None:
    page.get_by_role("button", name="Pause training").click()
    until(lambda: running.page.wishes.paused, "the pause")
    page.wait_for_timeout(500)
    held = running.trainer.step
    page.wait_for_timeout(700)
    assert running.trainer.step <= held + 1
    page.get_by_role("button", name="Save a checkpoint").click()
    until(lambda: bool(list_checkpoints(running.folder / "checkpoints")), "a checkpoint")
    page.get_by_role("button", name="Go on training").click()
    until(lambda: running.trainer.step > held + 3, "training to go on")


def _make_a_path(page, running: Running) -> None:
    page.get_by_text("Camera path", exact=True).click()
    add = page.get_by_role("button", name="Add this view")
    add.click()
    page.get_by_text("1 of the two views").wait_for(timeout=PATIENCE * 1000)
    page.mouse.move(200, 400)
    page.mouse.down()
    page.mouse.move(300, 420, steps=4)
    page.mouse.up()
    page.wait_for_timeout(800)
    add.click()
    page.get_by_text("2 views").wait_for(timeout=PATIENCE * 1000)
    page.get_by_role("button", name="Save the path").click()
    file = running.folder / "paths" / "path.json"
    until(file.is_file, "the path's file")
    path = read_camera_path(file)
    assert len(path.cameras) == 120 and float((path.cameras.positions[0] - path.cameras.positions[-1]).norm()) > 0.05
    assert len(json.loads(file.read_text())["keyframes"]) == 2


def test_hostile_messages_do_not_bring_training_down(running: Running) -> None:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    before, address = running.trainer.step, f"ws://localhost:{running.page.port}/"
    origin = f"http://localhost:{running.page.port}"
    with pytest.raises(WebSocketException):
        connect(address, origin="http://evil.example", open_timeout=20)  # type: ignore[arg-type]
    for content in (b"", b"\xff" * 1000, "text", b"\x93" + b"\x00" * (1 << 20), b"\xdc" * (60 << 20)):
        try:
            with connect(address, origin=origin, max_size=None, open_timeout=20) as socket:  # type: ignore[arg-type]
                socket.send(content)
                socket.recv(timeout=1.0)
        except (WebSocketException, TimeoutError, OSError):
            continue
    until(lambda: running.trainer.step > before + 5, "training to go on")
