"""The live page in a real browser, over a training that runs."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerfturbo.data.cameras import Cameras
from nerfturbo.evaluation.camera_path import read_camera_path
from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.export.video import video_writer
from nerfturbo.ops import use_backend
from nerfturbo.training.callbacks import MetricsLog
from nerfturbo.training.checkpoint import list_checkpoints
from nerfturbo.training.trainer import Trainer
from nerfturbo.viewer.page import LivePage, ViewedTraining
from nerfturbo.viewer.panel import SceneFacts

from ..conftest import IN_CI
from ..tiny import FIELD_OF_VIEW, ball_scene, tiny_config
from .looker import PATIENCE, until

pytestmark = pytest.mark.slow
FLAGS = ["--no-sandbox", "--disable-gpu", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDTH, HEIGHT = 800, 560
# Drawing by software takes the whole processor unless it pauses between frames.
FEW_FRAMES = (
    "{const draw = requestAnimationFrame; window.requestAnimationFrame = (f) => setTimeout(() => draw(f), 100)}"
)


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
    """Training in a thread, with its page open to other machines."""
    folder = tmp_path_factory.mktemp("run")
    train, test = ball_scene("train"), ball_scene("test", n_views=2)
    with use_backend("reference"):
        trainer = Trainer(tiny_config(steps=10_000_000), train)
    video = {"video": lambda file, fps: video_writer(file, fps=fps), "suffix": ".gif"}
    facts = SceneFacts("ball", train, test, train.aabb, RunFolder(folder), True, **video)
    page = LivePage(facts, host="0.0.0.0")
    page.panel._share.value = 60  # pictures soon, on a machine that does other things too
    log = MetricsLog(None, every_steps=5)
    trainer.callbacks += [log, ViewedTraining(page, log, folder / "checkpoints")]
    trainer.callbacks.append(lambda *_: time.sleep(0.05))  # the browser needs the processor more

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=FLAGS)
        yield opened
        opened.close()


@dataclass
class Person:
    """A browser's page, and what the viewer knows of it."""

    running: Running
    page: Any
    client: Any
    asked: list[str]

    def picture(self) -> np.ndarray:
        """The page left of the panel."""
        from PIL import Image

        content = self.page.screenshot(timeout=PATIENCE * 1000)
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=float)[:, : WIDTH - 340]

    def keep(self, name: str) -> None:
        """Keep a screenshot where NERFTURBO_SCREENSHOTS says."""
        if "NERFTURBO_SCREENSHOTS" in os.environ:
            self.page.screenshot(path=Path(os.environ["NERFTURBO_SCREENSHOTS"]) / f"{name}.png")

    def until_changed(self, before: np.ndarray, least: float, what: str) -> np.ndarray:
        """The picture, once it is another."""
        found = [before]

        def changed() -> bool:
            found[0] = self.picture()
            return float(np.abs(found[0] - before).mean()) > least

        until(changed, what)
        return found[0]

    def button(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()

    def says(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for(timeout=PATIENCE * 1000)

    def unfold(self, folder: str) -> None:
        self.page.get_by_text(folder, exact=True).click()

    def at_rest(self, element: Any) -> dict[str, float]:
        """The rectangle of an element, once it has been the same for a second: unfolding folders move what is below."""
        seen: list[Any] = []

        def still() -> bool:
            self.page.wait_for_timeout(200)
            seen.append(element.bounding_box())
            return seen[-1] is not None and len(seen) > 5 and all(place == seen[-1] for place in seen[-6:])

        until(still, "the element to be at rest")
        return seen[-1]

    def show(self, channel: str) -> None:
        self.page.locator(f"input[value='{self.client.channel.value}']").first.click()
        self.page.get_by_role("option", name=channel).click()


@pytest.fixture
def visit(running: Running, browser: Any) -> Iterator[Callable[..., Person]]:
    contexts = []

    def open_one(width: int = WIDTH, height: int = HEIGHT) -> Person:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        known, asked = set(running.page._clients), []
        contexts[-1].add_init_script(FEW_FRAMES)
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(running.page.url)
        until(lambda: len(set(running.page._clients) - known) == 1, "the page to know its new client")
        (number,) = set(running.page._clients) - known
        running.page._clients[number].quality.value = 128  # small pictures are soon sharp
        return Person(running, page, running.page._clients[number], asked)

    yield open_one
    for context in contexts:
        context.close()
    until(lambda: not running.page._clients, "the clients to be gone")


def test_pictures_follow_the_camera_and_sharpen_at_rest(visit: Callable[..., Person], running: Running) -> None:
    person = visit()
    blank = np.full_like(person.picture(), 255.0)
    opened = person.until_changed(blank, 3.0, "the first picture")
    painter, mouse = person.client.painter, person.page.mouse
    until(lambda: painter._finished_at is not None, "a sharp picture")
    sharp, step = painter._pixels, running.trainer.step
    mouse.move(300, 400)
    mouse.down()
    places, seen = itertools.cycle([(330, 420), (360, 410)]), []

    def coarse() -> bool:
        mouse.move(*next(places), steps=3)
        seen.append(painter._pixels)
        return 0 < painter._pixels <= 0.5 * sharp

    until(coarse, "a coarse picture of the moving camera")
    mouse.move(430, 440, steps=3)
    mouse.up()
    person.until_changed(opened, 1.0, "a picture from elsewhere")
    until(lambda: painter._pixels >= 0.9 * sharp, "a sharp picture again")
    until(lambda: running.trainer.step > step, "training to go on")
    host = running.page.url.split("?")[0]
    assert [url for url in person.asked if url.startswith("http") and not url.startswith(host)] == []


def test_the_page_is_closed_without_its_token(running: Running, browser: Any) -> None:
    page = browser.new_page()
    answer = page.goto(running.page.url.split("?")[0])
    assert answer.status == 403 and "asks for its token" in page.content()
    page.close()


def test_channels_cameras_and_two_people(visit: Callable[..., Person]) -> None:
    person, other = visit(), visit(390, 844)
    before = person.until_changed(np.full_like(person.picture(), 255.0), 3.0, "the first picture")
    person.show("opacity")
    person.until_changed(before, 3.0, "opacity")
    person.unfold("In the scene")
    person.page.get_by_text("Cameras of train").click()
    until(lambda: len(person.client._frusta.get("train", ())) == 4, "the frusta")
    camera = person.client.handle.camera
    camera.position, camera.look_at = (9.0, 9.0, 6.0), (0.0, 0.0, 0.0)  # all of them are in sight
    cameras = person.running.page.panel.facts.train.cameras
    index = next(index for index in range(4) if place_of(camera, cameras[index])[0] < WIDTH - 400)
    place = cameras.positions[index].numpy()

    def flown() -> bool:
        """Clicks have no effect until the browser has drawn the frusta from there, and a busy one may send where it was
        after it has flown: then once more."""
        if float(np.linalg.norm(camera.position - place)) < 1e-3 and person.client._inside is not None:
            return True
        late = time.monotonic() - begun[-1] > 20.0
        if late:
            begun.append(time.monotonic())
            camera.position, camera.look_at = (9.0, 9.0, 6.0), (0.0, 0.0, 0.0)
        if late or person.client._flights == 0:
            person.page.mouse.click(*place_of(camera, cameras[index]))
        return False

    begun = [time.monotonic()]

    until(flown, "the flight to the camera")
    assert camera.fov == pytest.approx(FIELD_OF_VIEW)
    person.show("error")
    person.says(f"Error against train photo {index}")
    person.keep("error")
    assert other.client.view.channel == "color" and not other.client._frusta
    view = other.client.view
    across = 2.0 * np.arctan(np.tan(0.5 * view.field_of_view_y) * view.aspect)
    assert view.aspect < 0.5 and across == pytest.approx(FIELD_OF_VIEW)  # the object is not cut at the sides
    assert other.page.evaluate("document.documentElement.scrollWidth") <= 390
    other.keep("phone")


def place_of(camera: Any, photo: Cameras) -> tuple[float, float]:
    """Where the middle of a photo's frustum is on the page."""
    import viser

    side = np.tan(0.5 * FIELD_OF_VIEW)
    ahead = 0.06 * float(photo.positions.norm()) / (side * side / 3.0) ** (1.0 / 3.0)  # viser keeps their volume
    middle = (photo.positions + ahead * photo.forward)[0].numpy()
    x, y, z = viser.transforms.SO3(camera.wxyz).inverse().apply(middle - camera.position)
    focal = 0.5 * HEIGHT / np.tan(0.5 * camera.fov)
    return 0.5 * WIDTH + focal * x / z, 0.5 * HEIGHT + focal * y / z


def test_training_is_paused_saved_and_resumed(visit: Callable[..., Person], running: Running) -> None:
    person = visit()
    person.unfold("Curves")
    drawn = """() => [...document.querySelectorAll(".uplot canvas")].filter((canvas) => canvas.width > 50 && [...canvas
        .getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data].some((value, i) => i % 4 == 3 && value))
        .length"""
    until(lambda: person.page.evaluate(drawn) == 2, "both curves")
    person.button("Pause training")
    person.says("(paused)")
    held = running.trainer.step
    person.keep("paused")
    person.button("Save a checkpoint")
    person.says("saved step_")
    assert list_checkpoints(running.folder / "checkpoints") and running.trainer.step == held
    person.button("Resume training")
    until(lambda: running.trainer.step > held + 3, "training to go on")


def test_a_path_and_a_crop_are_made_on_the_page(visit: Callable[..., Person], running: Running) -> None:
    person, editor = visit(), running.page._editor
    mouse = person.page.mouse
    person.unfold("Camera path")
    person.button("Add this view")
    person.says("1 of the two views")
    where = person.client.view
    mouse.move(200, 400)
    mouse.down()
    mouse.move(300, 420, steps=4)
    mouse.up()
    until(lambda: person.client.view is not where and not person.client.fresh, "the camera to move")
    person.button("Add this view")
    person.says("2 views")
    person.button("Save the path")
    person.says("saved; render it with")
    file = running.folder / "camera_paths" / "path.json"
    path = read_camera_path(file)
    assert len(path.cameras) == 120 and float((path.cameras.positions[0] - path.cameras.positions[-1]).norm()) > 0.05
    assert len(json.loads(file.read_text())["keyframes"]) == 2
    editor._frames.value, editor._height.value = 4, 32
    person.button("Render the video")
    until(lambda: file.with_suffix(".gif").is_file(), "the video")
    person.says("path.gif")
    person.keep("video")
    person.unfold("Camera path")
    person.unfold("Crop")
    thumb = person.page.locator(".multi-slider-thumb").first

    person.page.get_by_role("button", name="Add this view").wait_for(state="hidden")  # its folder moves all below it
    spot = person.at_rest(thumb)
    mouse.move(spot["x"] + 0.5 * spot["width"], spot["y"] + 0.5 * spot["height"])
    mouse.down()
    mouse.move(spot["x"] + 0.5 * spot["width"] + 40.0, spot["y"] + 0.5 * spot["height"], steps=4)
    mouse.up()
    until(lambda: person.client.view.crop is not None, "the crop, which a moved range ticks")
    person.button("Use for exports")
    person.says("take this box")
    saved, box = RunFolder(running.folder).read_crop(), running.page.panel.facts.box
    assert saved is not None and box.low[0] + 0.1 < saved.low[0] < box.high[0] and saved.high == box.high


def test_hostile_messages_do_not_bring_training_down(running: Running) -> None:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    before, address = running.trainer.step, f"ws://localhost:{running.page.port}/"
    origin, headers = f"http://localhost:{running.page.port}", {"Cookie": f"nerfturbo={running.page._proxy.token}"}
    with pytest.raises(WebSocketException):
        connect(address, origin="http://evil.example", open_timeout=20, additional_headers=headers)  # type: ignore[arg-type]
    options = {"max_size": None, "open_timeout": 20, "additional_headers": headers}
    for content in (b"", b"\xff" * 1000, "text", b"\x93" + b"\x00" * (1 << 20), b"\xdc" * (60 << 20)):
        try:
            with connect(address, origin=origin, **options) as socket:  # type: ignore[arg-type]
                socket.send(content)
                socket.recv(timeout=1.0)
        except (WebSocketException, TimeoutError, OSError):
            continue
    until(lambda: running.trainer.step > before + 5, "training to go on")
