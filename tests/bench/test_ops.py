"""The op benchmark: nothing wrong is timed, every number is there, and the file says how it came about."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nerfturbo.bench.gate import gate
from nerfturbo.bench.record import Record, command, commit, machine, write_json
from nerfturbo.errors import InputError
from nerfturbo.ops import _dispatch
from nerfturbo.ops.packed import cpu as packed
from op_cases import op_cases
from ops import ops_record, render_table, run_ops_benchmark

from .conftest import Study

CHOSEN = ["packed_sum", "compact"]


def test_times_each_backend_against_the_reference():
    timings = run_ops_benchmark("cpu", CHOSEN, quick=True)
    assert [(t.op, t.backend) for t in timings] == [(op, backend) for op in CHOSEN for backend in ("reference", "cpu")]
    for timing in timings:
        assert timing.gate == "passed"
        assert timing.forward_ms is not None and timing.forward_ms > 0.0
        assert timing.total_ms is not None and timing.total_ms >= 0.5 * timing.forward_ms
    assert timings[0].forward_ratio == timings[0].total_ratio == 1.0


def test_a_wrong_backend_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch):
    right = packed.linear
    monkeypatch.setattr(packed, "linear", lambda *arguments: right(*arguments) * 1.001)
    reference, wrong = run_ops_benchmark("cpu", ["packed_sum"], quick=True)
    assert reference.gate == "passed"
    assert wrong.gate.startswith("result 0:")
    assert wrong.forward_ms is wrong.total_ms is wrong.total_ratio is None
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_table([reference, wrong]))
    assert "not timed" in console.export_text()


def test_a_backend_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(packed, "linear", fail)
    _, wrong = run_ops_benchmark("cpu", ["packed_sum"], quick=True)
    assert wrong.gate == "RuntimeError: broken"


def test_every_op_has_a_case_that_passes_its_gate(monkeypatch: pytest.MonkeyPatch):
    """At a sixteenth of the size, on inputs of another seed. Every function that a backend implements is called."""
    called, load = set(), _dispatch._load

    def spy(package: str, op: str, function: str) -> object:
        called.add((op, function))
        return load(package, op, function)

    monkeypatch.setattr(_dispatch, "_load", spy)
    cases = list(op_cases(seed=3, quick=True))
    for case in cases:
        assert gate(case, "cpu", torch.device("cpu")) == "passed", f"{case.op}, {case.size}"
    contracts = "".join(path.read_text() for path in Path(_dispatch.__file__).parent.glob("*/__init__.py"))
    known = set(re.findall(r'implementation\("(\w+)", "(\w+)"', contracts))
    assert len(known) > 35
    on_gpus = {case.op for case in cases}  # what has kernels alone, and elsewhere is made of other ops
    assert {(op, function) for op, function in known - called if function not in on_gpus} == set()


def test_file_says_how_the_numbers_came_about(tmp_path: Path):
    timings = run_ops_benchmark("cpu", ["compact"], quick=True, seed=5)
    path = write_json(tmp_path / "folder" / "ops.json", ops_record(timings, device="cpu", seed=5))
    content = json.loads(path.read_text())
    assert list(content) == ["what", "command", "commit", "machine", "protocol", "seed", "values"]
    assert content["seed"] == 5
    assert content["values"][1]["backend"] == "cpu"
    assert {"processor", "cores", "threads", "versions"} <= set(content["machine"])
    assert [p.name for p in path.parent.iterdir()] == ["ops.json"]  # no temporary file stays


def test_unknown_op_is_an_input_error():
    with pytest.raises(InputError, match=r"ops: expected names among .*, got 'nonsense'"):
        run_ops_benchmark("cpu", ["nonsense"], quick=True)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path):
    path = write_json(tmp_path / "x.json", Record("one", "none", 0, [1]))
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, Record("two", "none", 0, [float("nan")]))
    assert json.loads(path.read_text())["what"] == "one"
    with pytest.raises(InputError, match="output: expected a path that can be written"):
        write_json(path / "below-a-file.json", {"what": 1})


def test_facts_about_the_run():
    assert machine()["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert "/" not in command().split()[0]
    found = commit()
    assert found is None or len(found.rstrip("+")) == 40


def test_the_script_writes_its_table_its_file_and_its_plot(study: Study, tmp_path: Path):
    output = tmp_path / "ops.json"
    done = study("ops", "--ops", "compact", "--device", "cpu", "--quick", "--output", output)
    assert done.code == 0 and "compact" in done.out, done.err
    assert [row["backend"] for row in json.loads(output.read_text())["values"]] == ["reference", "cpu"]
    assert output.with_suffix(".svg").is_file()
    refused = study("ops", "--ops", "nonsense", "--device", "cpu", "--quick", "--output", output)
    assert refused.code == 2 and "ops: expected names among" in refused.err
