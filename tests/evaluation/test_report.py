"""The report: one file, no request outside itself, true numbers, and nothing in the data can break out of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import torch

from nerfturbo.data.images import save_image
from nerfturbo.errors import InputError
from nerfturbo.evaluation.images import ERROR_AT_FULL, comparison, error_colors, load_comparison
from nerfturbo.evaluation.report import (
    MAX_IMAGES,
    MAX_POINTS,
    _views_with_images,
    renew_links,
    report_data,
    write_report,
)
from nerfturbo.evaluation.run_folder import RunFolder, create_run

from ..conftest import IN_CI
from ..tiny import tiny_config, write_video
from ..viewer.test_browser import FLAGS, find_browser

HOSTILE = "</script><img src=http://example.invalid/x.png onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = create_run(tmp_path / "run", tiny_config())
    generator = torch.Generator().manual_seed(0)
    for index in range(2):
        truth = torch.rand(20, 30, 3, generator=generator)
        save_image(made.view_file(index), comparison((truth + 0.1 * index).clamp(0, 1), truth))
    write_video(made.turntable_file("gif"), [torch.zeros(8, 8, 3, dtype=torch.uint8)] * 2)
    records = [
        {"kind": "step", "step": s, "seconds": s / 10, "loss": 1 / s, "psnr": 20.0, "rays_per_second": 5}
        for s in range(1, 2000)
    ]
    records.append({"kind": "preview", "step": 50, "seconds": 5.0, "psnr": 21.0})
    made.log_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    views = [{"index": i, "psnr": 30.0 - i, "ssim": 0.9, "seconds": 0.1} for i in range(2)]
    protocol = {"split": "test", "n_views": 2, "background": "white", "resolution": [30, 20]}
    (made.path / "my mesh.glb").touch()
    made.write_metrics(
        {
            "command": "nerfturbo train toybox",
            "seconds_by_stage": {f"opening /photos/{'folder_' * 12}": 3.0, "training": 9.0},
            "scene": HOSTILE,
            "psnr": 29.5,
            "ssim": 0.9,
            "per_view": views,
            "protocol": protocol,
            "ranks": [
                {"step_ms": 0.8, "data_ms": 0.02, "data_share": 0.025, "gpu_utilisation": 97.0},
                {"step_ms": 0.9, "data_ms": 0.03, "data_share": 0.033, "gpu_utilisation": None},
            ],
        }
    )
    write_report(made)
    return made


def test_the_page_asks_nothing_of_the_network(run: RunFolder) -> None:
    page = run.report_file.read_text()
    assert "default-src 'none'" in page  # and the browser is told to forbid it
    for pattern in (
        r"""(?:src|href)\s*=\s*["']?\s*(?!data:)[a-z]+:""",
        r"url\(\s*['\"]?(?!data:)",
        r"@import",
        r"<link",
    ):
        assert not re.search(pattern, page.replace(json_text(page), ""), re.IGNORECASE), pattern
    named = set(re.findall(r"https?://[^\s\"'<>\\)]+", page))
    assert named <= {"http://www.w3.org/2000/svg", "http://example.invalid/x.png"}  # a name, and our own bait


def json_text(page: str) -> str:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_data_comes_back_whole_and_cannot_end_its_element(run: RunFolder) -> None:
    page = run.report_file.read_text()
    assert HOSTILE not in page
    data = json.loads(json_text(page))
    assert data["metrics"]["scene"] == HOSTILE and data["metrics"]["psnr"] == 29.5
    assert [view["index"] for view in data["views"]] == [1, 0]  # worst first
    assert all(
        view[name].startswith("data:image/webp;base64,") for view in data["views"] for name in ("truth", "error")
    )
    assert data["turntable"].startswith("data:image/gif;base64,")
    assert data["config"]["grid"]["resolution"] == 8 and data["metrics"]["command"] == "nerfturbo train toybox"
    assert data["beside"] == ["config.json", "metrics.json", "my mesh.glb", "turntable.gif"]


def test_long_curves_are_thinned_but_keep_their_ends(run: RunFolder) -> None:
    curves = report_data(run)["curves"]
    assert len(curves["step"]) == MAX_POINTS == len(curves["psnr"])
    assert (curves["step"][0], curves["step"][-1]) == (1, 1999)


def test_many_views_show_the_worst_and_the_best() -> None:
    assert _views_with_images(5) == set(range(5))
    chosen = _views_with_images(200)
    assert len(chosen) == MAX_IMAGES and {0, 1, 2, 199} <= chosen


def test_a_run_without_scores_still_has_a_page(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", tiny_config())
    write_report(run)
    assert json.loads(json_text(run.report_file.read_text()))["views"] == []


def test_error_colors_are_dark_where_equal_and_light_where_far_off() -> None:
    truth = torch.zeros(1, 2, 3)
    render = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]]) * ERROR_AT_FULL
    colors = error_colors(render, truth)
    assert float(colors[0, 0].sum()) < 0.1 and float(colors[0, 1].sum()) > 2.5


def test_a_comparison_comes_apart_again(tmp_path: Path) -> None:
    import io

    from PIL import Image

    save_image(tmp_path / "a.png", comparison(torch.ones(10, 7, 3), torch.zeros(10, 7, 3)))
    parts = [Image.open(io.BytesIO(content)) for content in load_comparison(tmp_path / "a.png")]
    assert [part.size for part in parts] == [(7, 10)] * 3
    assert parts[0].getpixel((3, 5)) == (0, 0, 0) and parts[1].getpixel((3, 5)) == (255, 255, 255)
    parts[0].save(tmp_path / "a.png", "EPS")  # of a run from elsewhere; Pillow would start Ghostscript
    with pytest.raises(InputError, match=r"a\.png: .* got a file of EPS"):
        load_comparison(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(InputError, match=r"a\.png"):
        load_comparison(tmp_path / "a.png")


def test_what_is_made_beside_a_report_is_linked(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "scene.html").touch()
    renew_links(run, [tmp_path / "elsewhere.ply"])
    assert "scene.html" not in run.report_file.read_text()
    renew_links(run, [run.path / "scene.html"])
    assert "scene.html" in json.loads(json_text(run.report_file.read_text()))["beside"]


@pytest.mark.slow
def test_a_phone_shows_tables_whole_and_links_lead_to_files(run: RunFolder) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(run.report_file.as_uri())
        tables = "[...document.querySelectorAll('.scroll, body')].map((each) => each.scrollWidth - each.clientWidth)"
        assert max(page.evaluate(tables)) <= 0
        links = page.evaluate("[...document.querySelectorAll('a')].map((link) => link.href)")
        assert "nerfturbo train toybox" in page.inner_text("#command")
        browser.close()
    assert links and all(Path(url2pathname(urlsplit(link).path)).is_file() for link in links)


@pytest.mark.slow
def test_the_page_draws_itself_in_a_browser(run: RunFolder, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        if IN_CI:
            pytest.fail("CI installs Chromium, and it is not there")
        pytest.skip("no Chromium to open the page with")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [browser, *flags, run.report_file.as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "29.50" in page and page.count('<path d="M') >= 3 and page.count("<tr") == 3
    assert 'id="stage" hidden' not in page and 'id="stages" hidden' not in page
    assert "0.800 ms, 0.020 ms of data loading (2.5%), GPU busy 97%" in page and page.count("GPU busy") == 2
    assert "rank 1" in page and "0.030 ms of data loading (3.3%)<" in page
