"""`benchmarks/ablation.py` on a tiny scene: what it writes and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ablation import ablation_cases
from nerfturbo.bench.record import KEYS
from nerfturbo.presets import preset

from ..tiny import TINY_FLAGS
from .conftest import Study

FLAGS = [word for word in TINY_FLAGS if word not in ("--turntable", "0", "--backend", "reference")]


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_BACKEND", "cpu")


def test_ablation_changes_one_thing_at_a_time(study: Study, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    flags = ["--steps", 3, "--only", "grid", "white", "--device", "cpu", "--output", output]
    done = study("ablation", scene, *FLAGS, *flags)
    assert done.code == 0 and "no occupancy grid" in done.out
    record = json.loads(output.read_text())
    assert set(record) == set(KEYS)
    names = [row["name"] for row in record["values"]["rows"]]
    assert names == ["as configured", "no occupancy grid", "no grid, no visibility pass", "white background"]
    assert all(row["psnr"] > 0.0 and row["seconds"] > 0.0 for row in record["values"]["rows"])
    assert output.with_suffix(".svg").read_text().startswith("<svg")
    assert study("ablation", scene, *FLAGS, "--only", "magic").code == 2


def test_every_technique_has_its_row() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for name, device in (("ngp-cpu", cpu), ("vanilla", cpu), ("ngp", gpu), ("proposal-cpu", cpu)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
            cases = ablation_cases(preset(name), device)
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert all(case.config != cases[0].config or case.init_from or case.validate for case in cases[1:])
        words = [
            "occupancy grid",
            "early stop",
            "coarse and fine",
            "coarse pictures",
            "accumulation",
        ]
        words += ["background", "host memory", "warm-up", "cosine", "multistep", "constant", "early more often"]
        words += ["bf16"] if name == "proposal-cpu" else ["bf16", "alpha threshold", "visibility pass"]
        words += ["begun from zoo:"] if name == "ngp-cpu" else []
        words += ["gradient checkpointing"] if name == "vanilla" else []
        words += ["no CUDA graph", "fp32"] if device == gpu else ["fp16"]
        assert [word for word in words if not any(word in found for found in names)] == []


def test_ablation_begins_from_a_run_and_scores_on_the_way(
    study: Study, scene: Path, run_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "ablation.json"
    flags = ["--steps", 3, "--only", "begun", "early more", "--init-from", run_folder, "--device", "cpu"]
    done = study("ablation", scene, *FLAGS, *flags, "--output", output)
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in json.loads(output.read_text())["values"]["rows"]}
    first, *others = rows
    assert others == [
        f"+ begun from {run_folder.name}",
        f"+ begun from the networks of {run_folder.name}",
        "+ a view scored 8 times, early more often",
    ]
    assert all(row["error"] == "" for row in rows.values())
    scores = [rows[name]["psnr"] for name in (first, *others[:2])]
    assert len({round(score, 3) for score in scores}) == 3  # it mattered where they began
    assert rows[others[2]]["psnr"] == pytest.approx(rows[first]["psnr"], abs=1e-6)  # looking changes nothing
    missing = study("ablation", scene, *FLAGS, "--init-from", tmp_path / "none", "--output", tmp_path / "b.json")
    assert missing.code == 2 and "no such file" in missing.err and not (tmp_path / "b.json").exists()
