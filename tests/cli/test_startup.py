"""What `nerfturbo train` does before its first step: it imports what is needed, once, beside the GPU's own start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nerfturbo.cli import startup
from nerfturbo.cli.progress import Display
from nerfturbo.ops import _dispatch

# Not before the first step: compilers of torch, what other verbs draw, plot, serve or score with, other loops.
LATER = "lightning lpips matplotlib numba onnx pandas safetensors scipy sklearn torchmetrics torchvision triton viser"
LATER_OF_TORCH = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.onnx", "torch.utils.tensorboard")

PROBE = """
import gc, json, sys
passes = []
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if "torch" in sys.modules else None)
from nerfturbo.cli.main import main
code = main(["train", "toybox", "--device", "cpu", "--output", "."])
print(json.dumps([code, passes.count(2), gc.isenabled(), gc.get_freeze_count(), sorted(sys.modules)]))
"""


def test_training_imports_little_and_looks_for_no_garbage_in_it(tmp_path: Path) -> None:
    """Of a command that ends where it would open the scene: by then everything is imported."""
    (tmp_path / "somebodys.txt").write_text("not a run")
    run = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True)
    code, passes, enabled, frozen, modules = json.loads(run.stdout)
    assert code == 2 and "expected a new or empty output folder" in run.stderr, run.stderr
    assert "nerfturbo.training.trainer" in modules
    assert passes == 0 and enabled and frozen > 100_000
    assert not {*LATER.split(), *LATER_OF_TORCH} & set(modules)


def test_kernels_of_steps_and_previews_compile_together(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def compile_only(device: torch.device) -> Iterator[bool]:
        events.append(f"begin {device}")
        yield True
        events.append("end")

    monkeypatch.setattr(_dispatch, "compile_only", compile_only)
    stepper, preview = (SimpleNamespace(compile=lambda *_, name=name: events.append(name)) for name in ("step", "look"))
    trainer = SimpleNamespace(device=torch.device("cuda"), stepper=stepper, model=None)
    startup.compile_ahead(cast(Any, trainer), cast(Any, preview), Display())
    assert events == ["begin cuda", "step", "look", "end"]
