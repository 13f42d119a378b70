"""`nerfturbo compare`: a table, a page, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from nerfturbo.config import NO_STEP_LIMIT
from nerfturbo.evaluation.report import write_report
from nerfturbo.evaluation.run_folder import open_run

from ..conftest import IN_CI
from .conftest import Nerfturbo


@pytest.fixture
def runs(run_folder: Path, tmp_path: Path) -> list[Path]:
    other = shutil.copytree(run_folder, tmp_path / "other" / "run")
    config = json.loads((other / "config.json").read_text())
    config["config"]["optim"]["lr"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    (other / "metrics.json").unlink()
    return [run_folder, other]


def test_a_table_and_the_settings_that_differ(nerfturbo: Nerfturbo, runs: list[Path]) -> None:
    result = nerfturbo("compare", *runs)
    assert result.code == 0 and "optim.lr" in result.out and "not scored" in result.out
    found = nerfturbo("compare", *runs, "--json").json
    assert [row["name"] for row in found["settings"]] == ["optim.lr"]
    assert found["runs"][0]["psnr"] > 0 and found["runs"][1]["psnr"] is None
    assert len({run["name"] for run in found["runs"]}) == 2
    again = nerfturbo("compare", *runs)
    assert again.code == 2 and "--overwrite" in again.err


def test_a_run_without_a_limit_of_steps_says_so_in_words(nerfturbo: Nerfturbo, runs: list[Path]) -> None:
    config = json.loads((runs[1] / "config.json").read_text())
    config["config"]["train"] |= {"steps": NO_STEP_LIMIT, "time_limit": 30.0}
    (runs[1] / "config.json").write_text(json.dumps(config))
    result = nerfturbo("compare", *runs)
    assert "train.steps: 12, until the time limit" in result.out and str(NO_STEP_LIMIT) not in result.out
    write_report(open_run(runs[1]))
    for page in (Path("compare.html"), runs[1] / "report.html"):
        text = page.read_text()
        assert "until the time limit" in text and str(NO_STEP_LIMIT) not in text


def test_bad_input(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    assert nerfturbo("compare", run_folder).code == 2
    assert nerfturbo("compare", run_folder, "nowhere").code == 2
    assert nerfturbo("compare", run_folder, run_folder, "--output", "a.pdf").code == 2
    assert not list(Path(".").iterdir())


@pytest.mark.slow
def test_the_page_draws_itself_in_a_browser(nerfturbo: Nerfturbo, runs: list[Path], tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        if IN_CI:
            pytest.fail("CI installs Chromium, and it is not there")
        pytest.skip("no Chromium to open the page with")
    assert nerfturbo("compare", *runs, "--output", "c.html").code == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [browser, *flags, Path("c.html").resolve().as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert page.count('<path d="M') >= 6 and "optim.lr" in page and "default-src 'none'" in page
