"""The step benchmark refuses to time a wrong result, starts every block from one state, and names its protocol."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from nerfturbo.bench import step as module
from nerfturbo.bench.step import StepBudget, compare_steps, run_step_benchmark, step_record
from nerfturbo.ops._dispatch import available

from ..tiny import ball_scene, tiny_config

BUDGET = StepBudget(warm_steps=2, steps=2, blocks=1)


def test_the_gate_finds_wrong_values_and_wrong_names() -> None:
    truth = {"loss": torch.tensor(0.5), "table": torch.tensor([1.0, -2.0])}
    assert compare_steps(truth, truth) == "passed"
    assert compare_steps(truth | {"table": torch.tensor([1.0, -2.001])}, truth) == "passed"
    assert "table differs by" in compare_steps(truth | {"table": torch.tensor([1.0, -2.1])}, truth)
    assert "loss differs by" in compare_steps(truth | {"loss": torch.tensor(float("nan"))}, truth)
    assert "other parameters" in compare_steps({"loss": truth["loss"]}, truth)


def test_the_reference_alone_has_the_ratio_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backends", lambda device: ["reference"])
    (timing,) = run_step_benchmark(tiny_config(), ball_scene(), budget=BUDGET)
    assert timing.backend == "reference" and timing.ratio == 1.0 and timing.rays_per_step == 64.0
    assert timing.step_ms is not None and timing.step_ms > 0.0
    record = step_record([timing], tiny_config(), ball_scene(), device="cpu", budget=BUDGET)
    document = json.loads(json.dumps(asdict(record)))
    assert set(document) == {"what", "command", "commit", "machine", "protocol", "seed", "values"}
    assert "2 steps of training" in document["protocol"]


def test_a_backend_that_fails_its_gate_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not available("numba"):
        pytest.skip("numba is not installed")
    first_step = module._first_step

    def wrong(config, scene, device, backend):  # type: ignore[no-untyped-def]
        found = first_step(config, scene, device, "reference")
        return found if backend == "reference" else found | {"loss": found["loss"] * 2.0}

    monkeypatch.setattr(module, "_first_step", wrong)
    reference, cpu = run_step_benchmark(tiny_config(), ball_scene(), budget=BUDGET)
    assert reference.gate == "passed" and reference.step_ms is not None
    assert "loss differs" in cpu.gate and cpu.step_ms is None and cpu.ratio is None


def test_cpu_and_reference_pass_the_gate_on_the_same_work() -> None:
    if not available("numba"):
        pytest.skip("numba is not installed")
    reference, cpu = run_step_benchmark(tiny_config(), ball_scene(), budget=BUDGET)
    assert (reference.gate, cpu.gate) == ("passed", "passed")
    assert reference.rays_per_step == cpu.rays_per_step
    assert reference.samples_per_step == pytest.approx(cpu.samples_per_step, rel=0.02)
