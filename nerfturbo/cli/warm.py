"""Kernels are compiled before the clock starts, saying so: otherwise the first step would seem to hang."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace

import torch

from ..config import Config
from ..data.batches import PixelSampler
from ..data.scene import Scene
from ..ops._dispatch import resolve
from ..rendering.image import render_image
from ..rendering.model import NerfModel, SceneBounds
from ..training.optim import Optimizer
from ..training.step import TrainingStep
from .progress import Display

WARMUP_MODULE = "nerfturbo.ops.cpu._warmup"


def warm_up(config: Config, scene: Scene, device: str, display: Display) -> str:
    """Compile what is not cached yet and return the backend that runs on the device.

    A GPU's kernels are compiled by the trainer, which records its step before its own clock starts.
    """
    backend = resolve(torch.empty(0, device=device))
    if backend == "cpu":
        display.phase("loading CPU kernels, compiling those not cached (first run only)")
        if importlib.util.find_spec(WARMUP_MODULE) is not None:
            module = importlib.import_module(WARMUP_MODULE)
            module.warmup(lambda name: display.phase(f"compiling CPU kernels (first run only): {name}"))
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
    rays = scene.cameras.image_rays(0)[slice(0, 64)].to(device)
    render_image(model.field, model.grid, rays, height=1, width=len(rays), settings=model.settings)
