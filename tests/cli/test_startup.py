"""What `nerfturbo train` does before its first step: it imports what is needed, once, beside the GPU's own start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
