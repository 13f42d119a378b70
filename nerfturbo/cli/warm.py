"""Kernels are compiled before the clock starts, saying so: otherwise the first step would seem to hang."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..config import Config
from ..data.batches import PixelSampler
from ..data.scene import Scene, is_builtin
from ..evaluation.evaluate import Preview
from ..ops._dispatch import resolve
from ..rendering.image import render_image
from ..rendering.model import NerfModel, SceneBounds
from ..training.optim import Optimizer
from ..training.step import TrainingStep
from ..training.trainer import Trainer
from .progress import Display

WARMUP_MODULE = "nerfturbo.ops._cpu.warmup"
POLITE_SWITCH_SECONDS = 5e-5


@contextlib.contextmanager
def compiling_early(device: str, source: str) -> Iterator[Any]:
    """Around the reading of a scene: a second process compiles meanwhile, where a cold start has work for two.

    Only before a built-in scene, whose own renderer is compiled on one core in that time, and if nothing is cached.
    """
    if resolve(torch.empty(0, device=device)) != "cpu" or not is_builtin(source):
        yield None
        return
    module = importlib.import_module(WARMUP_MODULE)
    if module.is_cached():
        yield None
        return
    with module.CompileHelper(names=module.HELPED_EARLY) as helper:
        yield helper


@contextlib.contextmanager
def starting_device(device: str) -> Iterator[None]:
    """Around the reading of a scene: a thread starts the GPU and imports Triton, about a second each."""
    if torch.device(device).type != "cuda":
        yield
        return

    def start() -> None:
        torch.zeros(1, device=device)
        with contextlib.suppress(ImportError):  # its absence is reported where it is needed
            importlib.import_module("triton")

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    yield
    thread.join()


@contextlib.contextmanager
def import_meanwhile(device: torch.device, module: str) -> Iterator[None]:
    """Around the training: import in a thread what is needed after it, where the device works and the host waits.

    The block ends when the import has: two threads that import a package whose modules import each other both fail.
    """
    if device.type != "cuda" or importlib.util.find_spec(module.partition(".")[0]) is None:
        yield
        return
    thread = threading.Thread(target=_import_politely, args=(module,), daemon=True)
    thread.start()
    yield
    thread.join()


def _import_politely(module: str) -> None:
    """Import, giving the interpreter's lock back at once when the loop wants it: by default it waits 5 ms each time,
    longer than several steps take, and the GPU would stand still for half of the import's seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(POLITE_SWITCH_SECONDS)
    try:
        with contextlib.suppress(Exception):  # whoever needs it imports it again, and meets the reason
            importlib.import_module(module)
    finally:
        sys.setswitchinterval(before)


def compile_ahead(trainer: Trainer, preview: Preview, display: Display) -> None:
    """On a GPU: the kernels of a step and of a preview, all at once; cached ones are only read."""
    if trainer.device.type == "cuda":
        display.phase("loading GPU kernels, compiling those not cached (half a minute at the first run)")
        trainer.stepper.compile()
        preview.compile(trainer.model)


def warm_up(config: Config, scene: Scene, device: str, display: Display, helper: Any = None) -> str:
    """Compile what is not cached yet and return the backend that runs on the device.

    A GPU's kernels are compiled by the trainer, which records its step before its own clock starts.
    """
    backend = resolve(torch.empty(0, device=device))
    if backend == "cpu":
        module = importlib.import_module(WARMUP_MODULE)
        cached = module.is_cached()
        display.phase("loading CPU kernels" if cached else "compiling CPU kernels (first run only)")

        def report(name: str) -> None:
            if not cached:
                display.phase(f"compiling CPU kernels (first run only): {name}")

        module.warmup(report, helper=helper)
        _run_once(config, scene, device)
    return backend


def _run_once(config: Config, scene: Scene, device: str) -> None:
    """One step, both kinds of grid update and a few rendered rays with a throw-away model over a coarse grid."""
    config = replace(
        config, grid=replace(config.grid, resolution=16), train=replace(config.train, initial_rays=64, max_rays=64)
    )
    model = NerfModel(config, SceneBounds.of(scene)).to(device)
    stepper = TrainingStep(model, PixelSampler(scene, device, config.train.seed), Optimizer(model, config.optim))
    record = stepper.advance(0, 1)
    model.grid.update(record.step, model.field.density, all_cells=False)
    some = torch.arange(64.0, device=device)
    rays = scene.cameras.to(device).rays(torch.zeros(64, dtype=torch.int64, device=device), some, some)
    render_image(model.field, model.estimator, rays, height=1, width=len(rays), settings=model.settings)
