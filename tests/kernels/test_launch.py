"""Launching past Triton's checks: the same kernels with the same arguments, told apart as Triton tells them apart."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nerfturbo.ops._triton.launch import cdiv, next_power_of_2

from .compile_kernels import kernel_files

SCRIPT = Path(__file__).with_name("launch_kernels.py")
COUNT = Path(__file__).with_name("count_binaries.py")


def test_launches_are_tritons() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.split()) == 6, run.stdout


def test_a_loop_with_any_number_of_samples_compiles_each_kernel_once() -> None:
    """Numbers divisible by 4, 16, 64 or by none ask for the same binaries, so that no step stops to compile."""
    run = subprocess.run([sys.executable, str(COUNT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    asked = json.loads(run.stdout.splitlines()[-1])
    every = {1601, 1602, 1604, 1600, 1616, 1664, 3201, 1}
    assert {"ngp._forward_kernel", "composite._backward_kernel", "packed._compact_kernel"} <= asked.keys()
    for kernel, variants in asked.items():
        for numbers in variants:
            if kernel in ("composite._forward_kernel", "composite._backward_kernel", "mlp._backward_kernel"):
                # Behind a function of torch's a single row has strides of its own.
                assert set(numbers) in (every, every - {1}, {1}), f"{kernel}: {numbers}"
            else:
                assert set(numbers) == every, f"{kernel}: {numbers}"


@pytest.mark.parametrize("module", sorted(kernel_files()))
def test_pointers_and_nothing_else_are_named_as_pointers(module: str) -> None:
    for case in importlib.import_module(f"tests.kernels.compile_cases.{module}").COMPILE_CASES:
        for name, kind in case.signature.items():
            assert name.startswith("p_") == (isinstance(kind, str) and kind.startswith("*")), f"{name}: {kind}"


def test_whole_numbers() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 64)] == [1, 2, 4, 4, 8, 64]
