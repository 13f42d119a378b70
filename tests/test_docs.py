"""The readme and the pages are short, their links lead somewhere, their tables are their JSON's, their fields train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.training.trainer import Trainer

from .tiny import ball_scene, tiny_config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MADE = {"studies", "api", "ops"}  # from JSON, from docstrings, and what stands beside these
USER_PAGES = [page for page in PAGES if not MADE & set(page.relative_to(DOCS).parts)]
LETTERS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


def test_what_a_person_reads_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    long = {page.name: n for page in PAGES if (n := len(page.read_text().splitlines())) > 160}
    assert not long
    assert sum(len(page.read_text().split()) for page in USER_PAGES) <= 15_000


def test_every_page_is_in_one_of_four_groups() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert re.findall(r"^  - ([\w ]+):$", nav, re.MULTILINE) == ["Start", "Tasks", "Own code", "Reference"]
    listed = re.findall(r": ([\w/]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [*LETTERS, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


def test_files_that_are_named_exist() -> None:
    """Pages that code names, and files of the repository that pages name."""
    wrong = []
    code = [
        path for folder in ("nerfturbo", "benchmarks", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*code, *LETTERS]:
        wrong += [
            (path.name, name) for name in re.findall(r"docs/[\w/]+\.md", path.read_text()) if not (ROOT / name).exists()
        ]
    for page in [*LETTERS, *PAGES]:
        named = re.findall(r"\b(?:examples|benchmarks|scripts|tests)/[\w/]+\.(?:py|sh|json)", page.read_text())
        wrong += [(page.name, name) for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert not wrong


def test_tables_are_those_of_their_json() -> None:
    command = [sys.executable, ROOT / "scripts" / "bench_table.py", "--check"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"python scripts/bench_table.py --write renews them\n{found.stderr}"


@pytest.mark.parametrize("page", ["README.md", "docs/own_field.md"])
def test_the_field_of_a_page_trains(page: str) -> None:
    source = next(
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "MyField(" in block
    )
    assert sum(bool(line.strip()) for line in source.splitlines()) <= (15 if page == "README.md" else 40)
    names: dict[str, Any] = {}
    exec(source, names)  # a page of ours
    torch.manual_seed(0)
    scene = ball_scene("train")
    trainer = Trainer(tiny_config(steps=120), scene, field=names["MyField"](scene.aabb))
    losses: list[float] = []
    trainer.callbacks.append(lambda _, record: losses.append(float(record.loss)))
    trainer.fit()
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
