"""The exported page in a real browser: its pixels are the reference's, it obeys, and what is broken is said."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nerfturbo.data.cameras import Cameras
from nerfturbo.export.splats import REST
from nerfturbo.export.splats.files import splat_bytes
from nerfturbo.export.splats.make import picture
from nerfturbo.export.web.bake import Score
from nerfturbo.export.web.baked import Baked
from nerfturbo.export.web.page import PageFacts, splat_page, write_page
from nerfturbo.export.web.reference import render_page
from nerfturbo.types import Aabb

from ..viewer.test_browser import FLAGS, PATIENCE, find_browser, until
from .test_splats import some_splats, view
from .web_scene import make_baked, make_cameras, make_result

pytestmark = pytest.mark.slow
NAME = 'ball <img src=x onerror="window.hacked=1"> & </script><script>window.hacked=1</script>'
VIEW = """([eye, axes, lens, width, height, depth]) => Array.from(nerfturbo.page.renderer.pixels(
    {eye, axes, lens, width, height}, {background: [1, 1, 1], depth, depthRange: [0, 6]}))"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    path = find_browser()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def baked() -> Baked:
    return make_baked(2)


@pytest.fixture(scope="module")
def file(baked: Baked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "ball.html"
    facts = PageFacts(NAME, Score(36.5, 33.25, 34.0, 2, 20.0, 40.0), 12.0)
    write_page(path, make_result(baked), make_cameras(), facts)
    return path


def open_page(browser, address: str, *, script: str = "", **options):
    """A page that has loaded its scene, or failed to; with all requests it made and all errors of its script."""
    context = browser.new_context(viewport={"width": 320, "height": 200}, **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    if script:
        page.add_init_script(script)
    page.asked, page.failures = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.failures.append(str(error)))
    page.goto(address)
    page.evaluate("window.nerfturbo ? nerfturbo.ready.then(() => true, () => false) : false")
    return page


def pixels(page, cameras: Cameras, index: int, *, depth: bool = False) -> np.ndarray:
    width, height = cameras.size[index].tolist()
    pose = cameras.camera_to_world[index]
    lens = [*cameras.focal[index].tolist(), *cameras.center[index].tolist()]
    found = page.evaluate(VIEW, [pose[:, 3].tolist(), pose[:, :3].T.tolist(), lens, width, height, depth])
    return np.array(found, dtype=float).reshape(height, width, 4)[..., :3]


def camera_of(page) -> list[float]:
    return page.evaluate("[...nerfturbo.page.camera.eye, ...nerfturbo.page.camera.target]")


@pytest.fixture(scope="module")
def opened(browser, file: Path) -> Iterator:
    """One page for all tests that leave it as it was, or do not mind."""
    page = open_page(browser, file.as_uri(), has_touch=True)
    yield page
    page.context.close()


@pytest.mark.parametrize("kind", ["levels", "plain"])
def test_the_pixels_are_those_of_the_reference(browser, opened, baked: Baked, tmp_path: Path, kind: str) -> None:
    page, cameras = opened, make_cameras(40)
    if kind == "plain":
        baked, file = make_baked(1, features=False, voxel=0.07), tmp_path / "plain.html"
        write_page(file, make_result(baked), make_cameras(), PageFacts("plain", None, 1.0))
        page = open_page(browser, file.as_uri())
    for index in range(3):
        expected = (render_page(baked, cameras, index).rgb * 255.0).round().numpy()
        found = pixels(page, cameras, index)
        error = np.abs(found - expected)
        assert error.mean() < 0.6 and np.quantile(error, 0.99) <= 6.0, (index, error.mean(), error.max())
        assert expected.std() > 20.0 or kind == "plain"
    # The walk through the blocks is the same too: the depth view shows where light stops.
    depth = pixels(page, cameras, 0, depth=True)
    solid = render_page(baked, cameras, 0).opacity.numpy() > 0.99
    assert np.abs(depth[solid] - 255.0).mean() > 50.0 and np.abs(depth[~solid] - 255.0).mean() < 60.0
    assert page.failures == []
    if kind == "plain":
        page.context.close()


def test_splats_on_a_page_are_those_of_the_rasteriser(browser, tmp_path: Path) -> None:
    splats, camera, file = some_splats(400, scale=0.1), view(60, 40), tmp_path / "splats.html"
    splats[:, REST] = 0.0  # the page has one colour for all directions
    file.write_bytes(splat_page(splat_bytes(splats), Aabb.cube(1.5), camera, NAME))
    page = open_page(browser, file.as_uri())
    drawn = picture(splats, camera, 0).numpy() * 255.0
    pose, lens = camera.camera_to_world[0], [*camera.focal[0].tolist(), *camera.center[0].tolist()]
    words = [pose[:, 3].tolist(), pose[:, :3].T.tolist(), lens]
    script = "([eye, axes, lens]) => Array.from(nerfturbo.page.splats.pixels({eye, axes, lens, width: 60, height: 40}))"
    error = np.abs(np.array(page.evaluate(script, words)).reshape(40, 60, 4)[..., :3] - drawn)
    assert drawn.std() > 20.0 and error.mean() < 1.5 and np.quantile(error, 0.99) < 8.0, (error.mean(), error.max())
    assert page.failures == [] and page.evaluate("window.hacked") is None and page.title() == NAME
    assert page.asked == [file.as_uri()] and page.inner_text("#said") == ""
    page.context.close()
    file.write_bytes(splat_page(b"12345", Aabb.cube(1.5), camera, "broken"))
    page = open_page(browser, file.as_uri())
    assert "a part of its splats is missing" in page.inner_text("#said") and page.failures == []
    page.context.close()


def test_nothing_leaves_the_page_and_names_stay_text(opened) -> None:
    page = opened
    assert [url for url in page.asked if not url.startswith(("file:", "blob:", "data:"))] == []
    assert page.asked[0].startswith("file:") and len([url for url in page.asked if url.startswith("file:")]) == 1
    assert page.title() == NAME and page.evaluate("window.hacked") is None
    page.click("#info")
    text = page.inner_text("#panel")
    assert NAME in text and "36.50 dB" in text and "33.25 dB" in text and "2 levels" in text and "MB" in text
    assert page.is_hidden("#error") and page.is_hidden("#progress")
    words = ["Info", "Depth", "Backdrop", "Reset", "Image", "Link", "Full"]
    assert page.locator("nav button").all_inner_texts() == words  # icons are labelled
    until(lambda: page.evaluate("performance.getEntriesByName('first-picture').length") == 1, "the first picture")
    assert 0 < page.evaluate("performance.getEntriesByName('first-picture')[0].startTime") < 1000 * PATIENCE
    page.click("#info")


SPY = """const log = window.said = [], {prototype} = WebGL2RenderingContext;
const spy = (of, name, tell) => {
    const real = of[name];
    of[name] = function (...all) { log.push(tell(all)); return real.apply(this, all); };
};
spy(prototype, "shaderSource", ([, text]) => text.includes("vec3 network(") ? "network" : "plain");
spy(HTMLCanvasElement.prototype, "getContext", () => "graphics");
const here = (index) => index.filter((value, i) => i % 4 === 3 && value === 0).length;
spy(prototype, "texSubImage3D", ([,,,,, size, ...rest]) => size === 8 ? "block" : `${here(rest.at(-1))} here`);
spy(performance, "mark", ([name]) => name);
window.requestAnimationFrame = (draw) => setTimeout(draw, 500);"""


def test_the_first_picture_waits_for_nothing_it_does_not_need(
    browser, baked: Baked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nerfturbo.export.web.baked.BLOCKS_PER_CHUNK", 16)
    path = tmp_path / "ball.html"
    write_page(path, make_result(baked), make_cameras(), PageFacts("ball", None, 1.0))
    text = path.read_text("utf-8")
    assert text.index("data:image/jpeg") < text.index('id="chunk-0"')
    assert text.index('id="chunk-1-end"') < text.index("<script>\n(() => {") < text.index('id="chunk-2"')
    page = open_page(browser, path.as_uri(), script=SPY)
    said = page.evaluate("said")
    before, after = said[: said.index("first-picture")], said[said.index("first-picture") :]
    assert before.index("still") < before.index("graphics")  # which nothing is painted beside, while they start
    assert before.count("block") == 16 and "network" not in before  # what is seen most, without reflections
    told = [word for word in said if word.endswith("here")]  # rays leap over the others
    assert told[:2] == ["0 here", "16 here"] == [word for word in before if word.endswith("here")]
    assert told[-1] == f"{baked.blocks.n_blocks} here"
    assert after.count("block") == 2 * baked.blocks.n_blocks - 16 > 16 and after.count("network") == 1
    assert page.failures == []
    page.context.close()


def test_mouse_wheel_keys_and_fingers_move_the_camera(opened) -> None:
    page = opened
    page.focus("#canvas")

    def changes(act) -> np.ndarray:
        before = np.array(camera_of(page))
        act()
        return np.array(camera_of(page)) - before

    def drag(button: str) -> None:
        page.mouse.move(160, 90)
        page.mouse.down(button=button)
        page.mouse.move(200, 110, steps=3)
        page.mouse.up(button=button)

    def pinch() -> None:
        client = page.context.new_cdp_session(page)
        # A busy browser may take the first move for a tremble of the fingers and pass it over.
        moves = [("touchMove", gap) for gap in (30, 40, 60)]
        for kind, gap in (("touchStart", 20), *moves, ("touchEnd", None)):
            points = [] if gap is None else [{"x": 160 - gap, "y": 80, "id": 0}, {"x": 160 + gap, "y": 80, "id": 1}]
            client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def distance() -> float:
        eye = np.array(camera_of(page))
        return float(np.linalg.norm(eye[:3] - eye[3:]))

    turned = changes(lambda: drag("left"))
    assert np.abs(turned[:3]).max() > 0.1 and np.abs(turned[3:]).max() < 1e-9
    shifted = changes(lambda: drag("right"))
    assert np.abs(shifted[3:]).max() > 0.05 and np.allclose(shifted[:3], shifted[3:], atol=1e-6)
    far = distance()
    page.mouse.wheel(0, -200)
    until(lambda: distance() < far, "the wheel to zoom")
    near = distance()
    pinch()
    assert distance() < near * 0.6
    assert np.abs(changes(lambda: page.keyboard.press("ArrowLeft"))[:3]).max() > 0.01
    assert np.abs(changes(lambda: page.keyboard.press("w"))[3:]).max() > 0.001
    far = distance()
    page.keyboard.press("-")
    assert distance() > far
    page.keyboard.press("r")
    assert np.allclose(camera_of(page)[:3], make_cameras().positions[0].tolist(), atol=1e-5)
    assert page.failures == []


def test_a_link_brings_the_camera_back_and_buttons_work(browser, opened, tmp_path: Path) -> None:
    page = opened
    page.evaluate("nerfturbo.page.camera.orbit(0.4, 0.2); nerfturbo.page.camera.zoom(0.8); nerfturbo.page.moved()")
    until(lambda: page.evaluate("location.hash === nerfturbo.page.camera.link"), "the link in the address")
    kept, address = camera_of(page), page.evaluate("location.href")
    again = open_page(browser, address)
    assert np.allclose(camera_of(again), kept, atol=1e-4)
    for nonsense in ("#camera=1,2", "#camera=a,b,c,d,e,f,g", "#camera=1,1,1,1,1,1,1", "#x", "#camera=" + "9" * 400):
        odd = page.evaluate("hash => nerfturbo.page.camera.follow(hash)", nonsense)
        assert odd is False and np.allclose(camera_of(page), kept)
    frames = again.evaluate("nerfturbo.page.frames")
    again.click("#depth")
    until(lambda: again.evaluate("nerfturbo.page.frames") > frames, "a frame of depth")
    assert again.evaluate("nerfturbo.page.look.depth") is True
    with again.expect_download() as waiting:
        again.click("#shot")
    waiting.value.save_as(tmp_path / "shot.png")
    from PIL import Image

    with Image.open(tmp_path / "shot.png") as image:
        assert image.size == (320, 200) and np.asarray(image.convert("RGB")).std() > 10.0
    assert page.failures == again.failures == []
    again.context.close()


def test_broken_pages_say_so(browser, file: Path, tmp_path: Path) -> None:
    text = file.read_text("utf-8")
    start = text.index('id="chunk-2">') + 200
    broken = {
        "cut off": (text[:start], "broken: expected"),
        "cut off before the script": (text[: text.index('id="chunk-1">') + 200], "incomplete"),
        "cut off in the script": (text[: text.index("class Blocks")], "incomplete"),
        "changed": (
            text[:start] + ("AAAA" if text[start : start + 4] != "AAAA" else "BBBB") + text[start + 4 :],
            "broken",
        ),
        "no header": (text.replace('"chunks":', '"x":', 1), "cannot be shown"),
    }
    for name, (content, says) in broken.items():
        path = tmp_path / "broken.html"
        path.write_text(content, "utf-8")
        page = open_page(browser, path.as_uri())
        page.wait_for_selector("#error:not([hidden])", state="visible")
        assert says in page.inner_text("#error"), (name, page.inner_text("#error"))
        page.context.close()


def test_old_browsers_are_told(browser, file: Path) -> None:
    no_webgl = "HTMLCanvasElement.prototype.getContext = () => null"
    for script, says in ((no_webgl, "no WebGL2"), ("delete window.DecompressionStream", "DecompressionStream")):
        page = open_page(browser, file.as_uri(), script=script)
        assert says in page.inner_text("#error") and page.is_hidden("#canvas")
        page.context.close()


def test_a_folder_is_served_with_its_own_files_only(browser, baked: Baked, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    size = write_page(folder, make_result(baked), make_cameras(), PageFacts("folder", None, 1.0), split=True)
    assert size == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        page = open_page(browser, address + "index.html")
        assert page.is_hidden("#error") and page.failures == []
        expected = (render_page(baked, make_cameras(24), 0).rgb * 255.0).round().numpy()
        assert np.abs(pixels(page, make_cameras(24), 0) - expected).mean() < 0.6
        assert [url for url in page.asked if not url.startswith((address, "blob:", "data:"))] == []
        page.context.close()
        (folder / "data" / "chunk-002.bin").unlink()
        page = open_page(browser, address + "index.html")
        assert "chunk-002.bin cannot be read: 404" in page.inner_text("#error")
        page.context.close()
    finally:
        server.shutdown()
    page = open_page(browser, (folder / "index.html").as_uri())
    page.wait_for_selector("#error:not([hidden])", state="visible")
    assert "Serve the folder" in page.inner_text("#error")
    page.context.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        pass


def test_a_picture_at_rest_is_whole_though_frames_were_slow_while_loading(opened) -> None:
    script = """async () => {
        const scales = [], {pace} = nerfturbo.page;
        const spent = (scale) => own.hurried ? 400 : 20 * scale ** 2;
        const draw = (scale, done) => { scales.push(scale); setTimeout(() => done(spent(scale))); };
        const own = new pace.constructor(draw);
        own.hurried = true;
        own.want();
        await new Promise((resolve) => setTimeout(resolve, 200));
        own.hurried = false;
        own.want(true);
        await new Promise((resolve) => setTimeout(resolve, 1000));
        return [scales[0], scales.at(-1), own.busy];
    }"""
    first, last, busy = opened.evaluate(script)
    assert first < 0.2 and last == 1 and not busy


def test_the_phone_shows_it_too(opened) -> None:
    page = opened
    page.set_viewport_size({"width": 350, "height": 560})
    boxes = page.locator("nav button").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
    assert len(boxes) == 7 and all(box["left"] >= 0 and box["right"] <= 350 and box["bottom"] <= 560 for box in boxes)
    assert all(box["width"] >= 44 and box["height"] >= 44 for box in boxes)  # for a thumb
    fits = page.locator("nav button").evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)")
    assert fits, "a label is wider than its button"
    view = page.evaluate("nerfturbo.page.camera.view(350, 560)")
    wide = page.evaluate("nerfturbo.page.camera.fieldOfView")
    assert view["lens"][0] == pytest.approx(175.0 / np.tan(0.5 * wide))  # the whole scene fits the shorter side


def test_a_still_of_the_first_view_stands_there_until_the_page_draws(browser, file: Path) -> None:
    """It covers the window as the page's own picture does, and goes when that comes. A link asks for another view."""
    never = "window.requestAnimationFrame = () => 0;"  # graphics that take their time
    once = "let left = 1, real = requestAnimationFrame; window.requestAnimationFrame = (f) => left-- > 0 ? real(f) : 0;"
    page = open_page(browser, file.as_uri(), script=once)
    still = page.locator("#still")
    still.wait_for(state="visible")
    box, window = still.bounding_box(), page.viewport_size
    assert box["width"] == box["height"] == pytest.approx(1.8 * min(window["width"], window["height"]), abs=1)
    assert box["x"] + box["width"] / 2 == pytest.approx(window["width"] / 2, abs=1)
    assert page.evaluate("document.getElementById('still').naturalWidth") == 192
    page.context.close()
    page = open_page(browser, file.as_uri() + "#camera=1,2,3,0,0,0,0.7", script=never)
    page.wait_for_function("window.nerfturbo?.page")
    assert not page.locator("#still").is_visible()
    page.context.close()


def test_the_still_goes_when_there_is_a_picture(opened) -> None:
    assert opened.evaluate("nerfturbo.page.hasTexels") and opened.locator("#still").count() == 0
