"""Studies that are cut short: what was measured is in the file, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fine_samples
from nerfturbo.training.trainer import Trainer
from precision_page import renders_file

from ..tiny import TINY_FLAGS
from .conftest import Study

ROOT = Path(__file__).parents[2]
FLAGS = [word for word in TINY_FLAGS if word not in ("--turntable", "0", "--backend", "reference")]
FLAGS += ["--steps", "3", "--eval-views", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_BACKEND", "cpu")


class Interrupting:
    """Ctrl-C in the middle of one of the trainings that have this many steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: int) -> None:
        self.trained: list[Trainer] = []
        advance = Trainer.advance

        def watched(trainer: Trainer, *arguments: Any) -> Any:
            if trainer.config.train.steps == 3 and trainer not in self.trained:
                self.trained.append(trainer)
            if len(self.trained) == training and trainer.step == 1:
                raise KeyboardInterrupt
            return advance(trainer, *arguments)

        monkeypatch.setattr(Trainer, "advance", watched)


def values(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["values"]


def test_an_ablation_goes_on_where_it_was_cut_short(
    study: Study, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "ablation.json"
    command = ["ablation", scene, *FLAGS, "--output", output, "--only"]
    with monkeypatch.context() as patch:
        Interrupting(patch, 4)  # the warm-up, the baseline, one case, and then
        cut = study(*command, "grid", "white")
    assert cut.code == 130 and "2 finished trainings are in" in cut.err and "Traceback" not in cut.err
    first = values(output)
    assert [row["name"] for row in first["rows"]] == ["as configured", "no occupancy grid"]
    assert first["unfinished"] == ["no grid, no visibility pass", "white background"]
    assert output.with_suffix(".svg").is_file()

    with monkeypatch.context() as patch:
        watch = Interrupting(patch, 99)
        done = study(*command, "grid", "white")
        assert len(watch.trained) == 3  # one warm-up and what was missing
    assert done.code == 0, done.err
    second = values(output)
    assert second["unfinished"] == [] and len(second["rows"]) == 4
    assert second["rows"][:2] == first["rows"]

    assert study(*command, "no visibility").code == 0  # other cases of the same settings are added in their place
    names = [row["name"] for row in values(output)["rows"]]
    assert names == [
        "as configured",
        "no occupancy grid",
        "no visibility pass",
        "no grid, no visibility pass",
        "white background",
    ]


def test_other_settings_do_not_mix(study: Study, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "ablation.json"
    command = ["ablation", scene, *FLAGS, "--output", output, "--only", "white"]
    with monkeypatch.context() as patch:
        Interrupting(patch, 3)
        assert study(*command).code == 130
    before = output.read_text()
    refused = study(*command, "--optim.lr", 0.003)
    assert refused.code == 2 and "another config" in refused.err and "--fresh" in refused.err
    assert output.read_text() == before
    assert study(*command, "--optim.lr", 0.003, "--fresh").code == 0
    assert values(output)["config"]["optim"]["lr"] == 0.003 and values(output)["unfinished"] == []


def test_precisions_survive_a_signal_and_go_on(study: Study, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    flags = ["--memory-budget", "none", "--only", "fp32", "fp16", "--output", output]
    words = [scene, *FLAGS, *flags, "--seeds"]
    command = [sys.executable, ROOT / "benchmarks" / "precision.py", *map(str, [*words, *range(500)])]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    deadline = time.monotonic() + 120.0
    while not renders_file(output).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    held = values(output)
    assert 1 <= len(held["runs"]) < 1000 and len(held["runs"]) + len(held["unfinished"]) == 1000
    assert held["unfinished"][-1] == "fp16, seed 499"
    assert output.with_suffix(".html").is_file()

    n_seeds = len(held["runs"]) // 2 + 1
    done = study("precision", *words, *range(n_seeds))
    assert done.code == 0, done.err
    found = values(output)
    assert found["unfinished"] == [] and len(found["runs"]) == 2 * n_seeds
    assert found["runs"][: len(held["runs"])] == held["runs"]
    assert "|fp16 - fp32|" in output.with_suffix(".html").read_text()
    assert not renders_file(output).exists()


def test_fine_samples_in_fp32s_time_go_on_where_they_were_cut_short(
    study: Study, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "precision.json"
    two = ["--sampler", "hierarchy", "--sampler.coarse-samples", 4, "--sampler.n-samples", 4, "--max-fine", 8]
    two += ["--memory-budget", "none"]
    command = ["precision", scene, *FLAGS, *two, "--only", "fp32", "fp16", "--output", output]
    monkeypatch.setattr(fine_samples, "BLOCK_SECONDS", 0.01)
    searched: list[str] = []
    search = fine_samples.time_passes

    def watched(*arguments: Any, **options: Any) -> Any:
        searched.append(arguments[2].name)
        return search(*arguments, **options)

    monkeypatch.setattr(fine_samples, "time_passes", watched)
    with monkeypatch.context() as patch:
        advance = Trainer.advance

        def cut(trainer: Trainer, *arguments: Any) -> Any:
            if trainer.config.train.time_limit is not None and trainer.config.train.precision == "fp16":
                raise KeyboardInterrupt
            return advance(trainer, *arguments)

        patch.setattr(Trainer, "advance", cut)
        stopped = study(*command)
    assert stopped.code == 130 and "3 finished trainings are in" in stopped.err
    first = values(output)
    assert first["unfinished"] == ["fp16, seed 0, in fp32's time"] and searched == ["fp32", "fp16"]
    assert [run["part"] for run in first["runs"]] == ["same_batch", "same_batch", "same_time"]
    assert "Saved time spent on fine samples" in output.with_suffix(".html").read_text()

    done = study(*command)
    assert done.code == 0, done.err
    second = values(output)
    assert searched == ["fp32", "fp16"] and second["fine_samples"] == first["fine_samples"]
    assert second["runs"][:3] == first["runs"] and second["unfinished"] == []
    measure, last = second["runs"][0], second["runs"][3]
    assert (last["kind"], last["part"]) == ("fp16", "same_time")
    assert last["fine_samples"] == second["fine_samples"][1]["fine_samples"]
    assert last["seconds"] >= measure["seconds"] and second["runs"][2]["seconds"] >= measure["seconds"]
    assert len(second["in_words"]) == 1 and " dB" in second["in_words"][0]
