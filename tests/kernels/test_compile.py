"""Every kernel compiles for every supported GPU generation, within its registers and shared memory. Needs no GPU.

Kernels that multiply on tensor cores are not launched on Turing, and not compiled for it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .compile_kernels import SHARED, capabilities, kernel_files

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; it has no build for this platform")
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["job"]: line["cases"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "capability"), [(module, one) for module in sorted(kernel_files()) for one in capabilities(module)]
)
def test_compiles_within_limits(compiled: dict[str, list[dict]], module: str, capability: int):
    cases = compiled[f"{module}/{capability}"]
    assert cases, f"{module} lists no kernel"
    problems = []
    for case in cases:
        if "error" in case:
            problems.append(f"{case['case']}: {case['error']}")
        elif case["spills"] > case["max_spills"] + (16 if capability == 100 else 0):  # its older instructions take more
            problems.append(f"{case['case']}: {case['spills']} bytes spilled, allowed {case['max_spills']}")
        elif case["shared"] > SHARED[capability]:
            problems.append(f"{case['case']}: {case['shared']} bytes shared, the device has {SHARED[capability]}")
    assert not problems, "\n".join(problems)
