"""`tune` and `profile` on a tiny scene: what they write and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nerfturbo.bench.tune import try_batch
from nerfturbo.training.trainer import Trainer

from ..tiny import TINY_FLAGS, ball_scene, tiny_config
from .conftest import Nerfturbo

FLAGS = [word for word in TINY_FLAGS if word not in ("--turntable", "0", "--backend", "reference")]


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_BACKEND", "cpu")


def test_tune_writes_a_config_that_train_takes(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "tuned.json"
    flags = ["--steps", 6, "--device", "cpu", "--output", output]  # on a CPU at most 4 x the config's 512 samples
    done = nerfturbo("tune", scene, *FLAGS, *flags, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["batch_samples"] == 2048 and [trial["fits"] for trial in found["batches"]] == [True, True]
    assert found["lr"] in [candidate["learning_rate"] for candidate in found["candidates"]]
    assert found["lr"] == min(found["candidates"], key=lambda candidate: candidate["mse"])["learning_rate"]
    trained = nerfturbo("train", "--config", output, "--steps", 2, "--turntable", 0, "--output", tmp_path / "run")
    assert trained.code == 0, trained.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["train"]["batch_samples"], config["optim"]["lr"]) == (2048, found["lr"])
    assert config["field"]["width"] == 16
    few = nerfturbo("tune", scene, *FLAGS, *flags, "--max-batch", 100)
    assert few.code == 2 and "--max-batch: expected at least 1024 samples, got 100" in few.err
    assert nerfturbo("train", "--config", output, "--preset", "ngp").code == 2
    assert nerfturbo("train", "--config", tmp_path / "missing.json").code == 2
    (tmp_path / "other.json").write_text("{}")
    assert nerfturbo("train", "--config", tmp_path / "other.json").code == 2


def test_a_batch_that_does_not_fit_is_survived(scene: Path, tmp_path: Path) -> None:
    # In a process of its own: one that ran other tests reuses what they freed and need not grow.
    flags = ["--steps", 2, "--device", "cpu", "--output", tmp_path / "tuned.json", "--memory", 1e-3, "--json"]
    command = [str(word) for word in (sys.executable, "-m", "nerfturbo", "tune", scene, *FLAGS, *flags)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batch_samples"] == 512  # the config's own
    first = found["batches"][0]
    assert first["fits"] is False and first["n_bytes"] > 1e6 and first["why"].startswith("took")


@pytest.mark.parametrize("kind", ["ngp", "vanilla"])
def test_profile_names_every_stage_and_writes_a_trace(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "new" / "profile.json"
    flags = ["--steps", 3, "--warm-steps", 2, "--device", "cpu", "--output", output, "--field", kind]
    own = FLAGS if kind == "ngp" else [*FLAGS[:2], *FLAGS[FLAGS.index("--field.width") :], "--field.depth", 2]
    done = nerfturbo("profile", scene, *own, *flags)
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    costs = {cost["stage"]: cost["milliseconds"] for cost in values["stages"]}
    assert set(costs) == {"rays", "march", "field", "composite", "backward", "optimizer", "grid", "host"}
    assert sum(costs.values()) == pytest.approx(values["step_ms"], rel=0.02)
    assert min(costs[name] for name in ("rays", "march", "field", "composite", "backward", "optimizer")) > 0.0
    peaks = {cost["stage"]: cost["peak_bytes"] for cost in values["stages"]}
    n_rays, bytes_of_a_ray = 64, 4 * (3 + 3)  # origins and directions at least
    assert peaks["rays"] >= n_rays * bytes_of_a_ray and peaks["backward"] > 0
    assert peaks["field"] < 64 << 20  # of a tiny batch, not of all that was ever allocated
    names = {event.get("name") for event in json.loads(output.with_suffix(".trace.json").read_text())["traceEvents"]}
    assert "nerfturbo: backward" in names and str(output.with_suffix(".trace.json")) in done.out


def test_a_batch_that_the_machine_refuses_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(trainer: Trainer) -> None:
        torch.empty(1 << 55)  # no machine has this much

    monkeypatch.setattr(Trainer, "advance", hungry)
    trial = try_batch(tiny_config(), ball_scene(), 1024, device=torch.device("cpu"), budget=1 << 40)
    assert trial.fits is False and trial.why.startswith("out of memory: ")
