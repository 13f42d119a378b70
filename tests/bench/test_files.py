"""The measurements that are kept: the readme's say what they are, and none names a folder of somebody's machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.json"))
OF_SOMEBODY = re.compile(r"(?:^|[\s\"'=])(?:/(?:tmp|home|root|work|mnt|Users)/|[A-Z]:\\\\)")


def in_readme() -> list[str]:
    return sorted(set(re.findall(r"\(benchmarks/(\w+\.json)\)", (ROOT / "README.md").read_text())))


@pytest.mark.parametrize("name", in_readme())
def test_a_number_of_the_readme_can_be_repeated(name: str) -> None:
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())
    for key in ("what", "command", "commit", "protocol"):
        assert record.get(key), f"{name} has no {key}"
    assert isinstance(record["seed"], int) and record["values"]
    assert record["machine"]["processor"] and record["machine"]["versions"]["torch"]
    assert ("gpu" in record["machine"]) == name.startswith("h200"), name


def test_no_file_names_a_folder_of_the_machine_it_was_made_on() -> None:
    named = {path.name: OF_SOMEBODY.findall(path.read_text()) for path in FILES}
    assert len(FILES) > 20 and not {name: found for name, found in named.items() if found}
    assert OF_SOMEBODY.search('"quality.py /tmp/lego --seed 0"') and OF_SOMEBODY.search('"--out=/work/a.json"')
