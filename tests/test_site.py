"""The built pages in a browser, from a folder and a server: search answers; desk or phone, nothing is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from .viewer.test_browser import find_browser

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PAGES = ["index.html", "own_field.html", "cli.html", "studies/techniques.html", "api/config.html"]
WIDTHS = [1400, 390]
CUT_OFF = """() => [...document.querySelectorAll(".md-content pre code, .md-content p, .md-content img")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth + 1)
    .map((e) => (e.innerText || e.src).slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert not page.evaluate(CUT_OFF), name
    assert not [url for url in asked if url.startswith("http")], "a page asks another server"


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site on a plain web server, as `python -m http.server` is one."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("where", ["folder", "server"])
@pytest.mark.parametrize("width", WIDTHS)
def test_search_answers(site: Path, served: str, browser: Any, width: int, where: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{site.as_uri() if where == 'folder' else served}/studies/speed.html")
    if width < 1000:
        page.click("label[for=__search]")
    field = page.locator(".md-search__input")
    field.click()
    assert field.bounding_box()["width"] > 150
    field.press_sequentially("floaters", delay=50)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    links = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert any("unbounded.html" in link for link in links)
