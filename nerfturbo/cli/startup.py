"""Starting up: the GPU wakes and kernels compile while other things are read; and `nerfturbo warmup`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .common import backend_on, open_data
from .flags import Device, SceneSource, parse
from .progress import Display, duration, showing
from .settings import check_source, resolve_device, starting_config

if TYPE_CHECKING:
    from ..config import Config
    from ..data.scene import Scene
    from ..evaluation.evaluate import Preview
    from ..training.trainer import Trainer

CPU_KERNELS = "nerfturbo.ops._cpu.warmup"


@dataclass(frozen=True)
class WarmupArgs:
    """Compile the kernels of a preset on a device into the cache; what is cached already is only loaded. Kernels depend
    on the kind of scene (levels of the grid, alpha, lenses): name a folder to compile for it."""

    scene: SceneSource = "builtin:toybox"
    preset: str = "auto"  # What is to be trained; auto chooses by device.
    device: Device = "auto"


def warmup(argv: Sequence[str]) -> int:
    start = starting_config(argv)
    args = parse(WarmupArgs, argv, "warmup")
    check_source(args.scene)
    device = resolve_device(args.device)
    from ..data.scene_defaults import fitted_config
    from ..evaluation.evaluate import Preview
    from ..training.trainer import Trainer

    begun = time.perf_counter()
    with showing() as display:
        config = replace(start, data=replace(start.data, source=args.scene))
        with compiling_early(device, args.scene) as helper:
            display.phase(f"opening {args.scene}")
            train, test = open_data(config.data)
            config, _ = fitted_config(config, train, auto=start if args.preset == "auto" else None)
            backend = warm_up(config, train, device, display, helper)
        if device != "cpu":
            trainer = Trainer(config, train, device=device)
            compile_ahead(trainer, Preview(test), display)
            trainer.stepper.prepare()
            trainer.model.render_image(test.cameras, 0)
    print(f"kernels of {config.preset} for {backend} on {device} are ready, {time.perf_counter() - begun:.1f} s")
    return 0


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """Around the first imports of a command: what they make stays, and no time goes into seeking garbage in it."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def wake_gpu(device: str | None) -> None:
    """Start the driver of the first GPU in a thread while torch is imported: a second or two that need no Python."""
    if device in (None, "auto", "cuda", "cuda:0") and os.path.exists("/dev/nvidiactl"):
        threading.Thread(target=_start_driver, daemon=True).start()


def _start_driver() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # The primary context: the one that torch uses later. What fails here fails again there, and is reported there.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def starting_device(device: str) -> contextlib.AbstractContextManager[None]:
    """Around the reading of a scene: a thread starts the GPU and imports Triton, about a second each."""
    import torch

    def start() -> None:
        torch.zeros(1, device=device)
        with contextlib.suppress(ImportError):  # its absence is reported where it is needed
            importlib.import_module("triton")

    return _thread_joined(start) if torch.device(device).type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _thread_joined(work: Any) -> Iterator[None]:
    """Work in a thread, which is waited for where the block ends by itself."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


@contextlib.contextmanager
def compiling_early(device: str, source: str) -> Iterator[Any]:
    """Around the reading of a scene: a second process compiles meanwhile, where a cold start has work for two. Only
    before a built-in scene, whose own renderer is compiled on one core in that time, and if nothing is cached."""
    from ..data.scene import is_builtin

    module = importlib.import_module(CPU_KERNELS) if backend_on(device) == "cpu" and is_builtin(source) else None
    if module is None or module.is_cached():
        yield None
        return
    with module.CompileHelper(names=module.HELPED_EARLY) as helper:
        yield helper


def compile_ahead(trainer: Trainer, preview: Preview, display: Display) -> None:
    """On a GPU: the kernels of a step and of a preview, all at once; cached ones are only read."""
    if trainer.device.type == "cuda":
        from ..ops._dispatch import compile_only

        display.phase("loading GPU kernels, compiling those not cached (half a minute at the first run)")
        with compile_only(trainer.device):
            trainer.stepper.compile()
            preview.compile(trainer.model)


def compile_note(device: str) -> str:
    """The first words of an estimate, where the CPU's kernels are not compiled yet."""
    from ..data import speed

    if backend_on(device) != "cpu" or importlib.import_module(CPU_KERNELS).is_cached():
        return ""
    return f"about {duration(speed.COMPILE_SECONDS / speed.machine_speed())} of compiling kernels (first run only), "


def warm_up(config: Config, scene: Scene, device: str, display: Display, helper: Any = None) -> str:
    """Compile what is not cached yet and return the backend that runs on the device. A GPU's kernels are compiled by
    the trainer, which records its step before its own clock starts."""
    backend = backend_on(device)
    if backend == "cpu":
        module = importlib.import_module(CPU_KERNELS)
        note = compile_note(device)
        display.phase("compiling CPU kernels (first run only)" if note else "loading CPU kernels")

        def report(name: str) -> None:
            if note:
                display.phase(f"compiling CPU kernels (first run only): {name}")

        module.warmup(report, helper=helper)
        _run_once(config, scene, device)
    return backend


def _run_once(config: Config, scene: Scene, device: str) -> None:
    """One step, both kinds of grid update and a few rendered rays with a throw-away model over a coarse grid."""
    import torch

    from ..data.batches import PixelSampler
    from ..rendering.image import render_image
    from ..rendering.model import NerfModel, SceneBounds
    from ..training.optim import Optimizer
    from ..training.step import TrainingStep

    config = replace(config, grid=replace(config.grid, resolution=16), train=replace(config.train, max_rays=64))
    model = NerfModel(config, SceneBounds.of(scene)).to(device)
    stepper = TrainingStep(model, PixelSampler(scene, device, config.train.seed), Optimizer(model, config.optim))
    model.grid.update(stepper.advance(0, 1).step, model.field.density, all_cells=False)
    some = torch.arange(64.0, device=device)
    rays = scene.cameras.to(device).rays(torch.zeros(64, dtype=torch.int64, device=device), some, some)
    render_image(model.field, model.estimator, rays, height=1, width=len(rays), settings=model.settings)
