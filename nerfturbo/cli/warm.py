"""Kernels are compiled before the clock starts, saying which: otherwise the first step would seem to hang."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from ..ops._dispatch import resolve
from .progress import Display


def warm_up(device: str, display: Display) -> str:
    """Compile what is not cached yet and return the backend that runs on the device."""
    backend = resolve(torch.empty(0, device=device))
    if backend == "cpu" and importlib.util.find_spec("nerfturbo.ops.cpu._warmup") is not None:
        display.phase("loading CPU kernels")
        module = importlib.import_module("nerfturbo.ops.cpu._warmup")
        module.warmup(lambda name: display.phase(f"compiling CPU kernels (first run only): {name}"))
    return backend
