"""Results say what they are; those of the readme name command, commit, machine, protocol and seed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import records
from nerfturbo.bench import record as package
from records import read_record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def in_readme() -> list[str]:
    return sorted(set(re.findall(r"\(benchmarks/results/(\w+/\w+\.json)\)", (ROOT / "README.md").read_text())))


def test_the_readme_shows_results() -> None:
    assert len(in_readme()) >= 10


@pytest.mark.parametrize("name", in_readme())
def test_a_number_of_the_readme_can_be_repeated(name: str) -> None:
    record = read_record(RESULTS / name)
    for key in ("what", "command", "commit", "protocol"):
        assert record[key], f"{name} has no {key}"
    assert isinstance(record["seed"], int) and record["values"]
    assert record["machine"]["processor"] and record["machine"]["versions"]["torch"]
    assert ("gpu" in record["machine"]) == name.startswith("h200/"), name


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_result_is_read(path: Path) -> None:
    record = read_record(path)
    assert set(record) == {*package.KEYS, "note"} and record["what"] and record["values"]
    assert isinstance(record["command"], list) and isinstance(record["commit"], list)
    assert path.parent.name == "h200" or "gpu" not in record["machine"]


def test_there_is_one_schema(tmp_path: Path) -> None:
    assert records.KEYS == package.KEYS
    written = package.write_json(tmp_path / "a.json", package.Record("what", "how", 3, [1]))
    record = read_record(written)
    assert (record["what"], record["protocol"], record["seed"], record["values"]) == ("what", "how", 3, [1])
    assert len(record["command"]) == 1 and record["machine"]["processor"]


@pytest.mark.parametrize("name", ["h200/ablation", "h200/precision_hierarchy", "cpu/trainers"])
def test_tables_for_the_documentation(name: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "bench_table.py", RESULTS / f"{name}.json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("| ") and printed.count("\n|") >= 3


def test_the_page_about_trainers_is_short_and_has_the_measured_table() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    command = [sys.executable, ROOT / "scripts" / "bench_table.py", RESULTS / "h200/trainers.json"]
    assert len(page.splitlines()) <= 80
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout in page
