"""Results say what they are; those of the readme name command, commit, machine, protocol and seed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import records
from nerfturbo.bench import record as package
from records import read_record

from ..cli.conftest import Nerfturbo

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


def lego(psnr: tuple[float, ...], ms: float, what: str = "lego") -> dict[str, Any]:
    runs = [{"seed": seed, "marks": [{"psnr": value, "step": 100}]} for seed, value in enumerate(psnr)]
    return {"what": what, "values": {"scene": "lego", "runs": runs, "timings": [{"way": "frame", "wall_ms": ms}]}}


@pytest.mark.parametrize(
    ("psnr", "ms", "verdicts", "code"),
    [
        ((36.0, 36.4, 36.1), 2.55, ["same", "same"], 0),  # 2.5 ms and 3%
        ((36.0, 36.4, 36.3), 2.3, ["same", "better"], 0),  # the seeds of the first lie 0.4 apart
        ((36.6, 36.6, 36.6), 2.6, ["better", "worse"], 1),
        ((35.7, 35.8, 35.6), 2.5, ["worse", "same"], 1),
    ],
)
def test_two_results_are_compared_beyond_their_noise(
    nerfturbo: Nerfturbo, tmp_path: Path, psnr: tuple[float, ...], ms: float, verdicts: list[str], code: int
) -> None:
    files = [str(tmp_path / name) for name in ("old.json", "new.json")]
    package.write_json(files[0], lego((36.0, 36.4, 36.2), 2.5))
    package.write_json(files[1], lego(psnr, ms))
    result = nerfturbo("bench", "compare", *files, "--json")
    changes = json.loads(result.out)["changes"]
    assert [change["name"] for change in changes] == ["runs marks 0 psnr", "timings 0 frame wall_ms"]
    assert [change["verdict"] for change in changes] == verdicts and result.code == code
    assert (changes[0]["old"], changes[1]["old"], changes[1]["new"]) == (36.2, 2.5, ms)
    assert changes[0]["noise"] == pytest.approx(0.2) and changes[1]["noise"] == pytest.approx(0.075)
    table = nerfturbo("bench", "compare", *files).out
    assert all(verdict in table for verdict in verdicts)
    loose = json.loads(nerfturbo("bench", "compare", *files, "--noise", "0.1", "--json").out)["changes"]
    assert [change["verdict"] for change in loose] == [verdicts[0], "same"]


def test_more_rays_a_second_are_better_and_more_bytes_are_worse() -> None:
    old, new = ({"values": {"rays_per_second": rate, "peak_bytes": size}} for rate, size in ((40e6, 5e8), (50e6, 6e8)))
    assert [change.verdict for change in package.compare_records(old, new, 0.03)] == ["better", "worse"]
    assert [change.verdict for change in package.compare_records(new, old, 0.03)] == ["worse", "better"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected valid JSON, got"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "expected the JSON of a benchmark, got another JSON"),
        (json.dumps(lego((1.0,), 1.0, what="mic")), "a result of the same benchmark (lego), got mic"),
        ('{"what": "lego", "values": {"n": 3}}', "times, sizes or scores that"),
        (None, "expected the JSON of a benchmark, got no such file"),
    ],
)
def test_what_cannot_be_compared_is_named(nerfturbo: Nerfturbo, tmp_path: Path, text: str | None, said: str) -> None:
    package.write_json(tmp_path / "old.json", lego((36.0,), 2.5))
    if text is not None:
        (tmp_path / "new.json").write_text(text)
    result = nerfturbo("bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
    assert result.code == 2 and said in " ".join(result.err.split()) and "new.json" in result.err
