"""`nerfturbo warmup`: compile every kernel that training and rendering need, so that the first run starts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from .parse import parse
from .settings import resolve_device, starting_config


@dataclass(frozen=True)
class WarmupArgs:
    """Compile the kernels of a preset on a device into the cache; what is cached already is only loaded.

    Kernels depend on the kind of scene (levels of the grid, alpha, lenses): name a folder to compile for it.
    """

    scene: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")] = "builtin:toybox"
    """A scene folder, or a built-in scene by name."""
    preset: str = "auto"
    """What is to be trained; auto chooses by device."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""


def main(argv: Sequence[str]) -> int:
    """Compile, and say how long it took."""
    start = starting_config(argv)
    args = parse(WarmupArgs, argv, "warmup")
    device = resolve_device(args.device)
    from .progress import showing

    begun = time.perf_counter()
    with showing() as display:
        from ..data.fitting import fitted_config
        from ..evaluation.evaluate import Preview
        from ..ops._dispatch import resolve
        from ..training.trainer import Trainer
        from .scenes import open_scenes
        from .warm import compile_ahead, compiling_early, torch, warm_up

        backend = resolve(torch.empty(0, device=device))
        config = replace(start, data=replace(start.data, source=args.scene))
        with compiling_early(device, args.scene) as helper:
            display.phase(f"opening {args.scene}")
            scenes = open_scenes(args.scene, config.data.downscale)
            config, _ = fitted_config(config, scenes[0], auto=start if args.preset == "auto" else None)
            warm_up(config, scenes[0], device, display, helper)
        if device != "cpu":
            trainer, preview = Trainer(config, scenes[0], device=device), Preview(scenes[1])
            compile_ahead(trainer, preview, display)
            trainer.stepper.prepare()
            trainer.model.render_image(scenes[1].cameras, 0)
    print(f"kernels of {config.preset} for {backend} on {device} are ready, {time.perf_counter() - begun:.1f} s")
    return 0
