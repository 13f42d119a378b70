"""Launching past Triton's checks: the same kernels with the same arguments, told apart as Triton tells them apart."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nerfturbo.ops.kernels._launch import cdiv, next_power_of_2

from .compile_kernels import kernel_files

SCRIPT = Path(__file__).with_name("launch_kernels.py")


def test_launches_are_tritons() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.split()) == 5, run.stdout


@pytest.mark.parametrize("module", sorted(kernel_files()))
def test_pointers_and_nothing_else_are_named_as_pointers(module: str) -> None:
    for case in importlib.import_module(f"nerfturbo.ops.kernels.{module}").COMPILE_CASES:
        for name, kind in case.signature.items():
            assert name.startswith("p_") == (isinstance(kind, str) and kind.startswith("*")), f"{name}: {kind}"


def test_whole_numbers() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 64)] == [1, 2, 4, 4, 8, 64]
