"""The measurements of the readme say what they are: command, commit, machine, protocol and seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def in_readme() -> list[str]:
    return sorted(set(re.findall(r"\(benchmarks/results/(\w+/\w+\.json)\)", (ROOT / "README.md").read_text())))


@pytest.mark.parametrize("name", in_readme())
def test_a_number_of_the_readme_can_be_repeated(name: str) -> None:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    for key in ("what", "command", "commit", "protocol"):
        assert record.get(key), f"{name} has no {key}"
    assert isinstance(record["seed"], int) and record["values"]
    assert record["machine"]["processor"] and record["machine"]["versions"]["torch"]
    assert ("gpu" in record["machine"]) == name.startswith("h200/"), name
