"""The kernels that multiply on tensor cores compile from Ampere on, within registers and shared memory. Needs no GPU.

On Turing they are not launched (torch's own products run there instead), so unlike the other kernels they are
not compiled for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
PROGRAM = """
import importlib, json, sys
from tests.kernels.compile_kernels import compile_case
module, capability = sys.argv[1:]
for case in importlib.import_module(f"tests.kernels.compile_cases.{module}").TENSOR_CORE_CASES:
    print(json.dumps({"case": case.name, **compile_case(case, int(capability))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("module", ["mlp", "ngp"])
def test_compiles_within_limits(module: str, capability: int) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; it has no build for this platform")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # interpreted kernels do not compile
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, str(capability)],
        capture_output=True, text=True, timeout=600, cwd=REPOSITORY, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    cases = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert cases
    for case in cases:
        assert case["spills"] <= case["max_spills"], f"{case['case']}: {case['spills']} bytes spilled"
        assert case["shared"] <= SHARED[capability], f"{case['case']}: {case['shared']} bytes of shared memory"
