"""Pixels in host memory against pixels on the device: a step of each, in one run, and what the pieces cost.

    python benchmarks/host_pixels.py DATA --output benchmarks/results/h200/host_pixels.json
    python benchmarks/host_pixels.py builtin:toybox --device cpu --steps 32 --warm-steps 32 --downscale 4   # to try it

Gate first: the draws of both must be the same bytes. Then `--rounds` of both trainings in turn, timed as they run (on
a GPU a recorded graph), after `--warm-steps`; the ratio is that of the medians. The pieces: the colours of one step
gathered on the host, and on a GPU the same through the bus, from memory that is registered where it lies, or copied
into pinned memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.bench.tune import peak_memory
from nerfturbo.data.batches import HostPixels, PixelSampler, map_pixels
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.training.trainer import Trainer

PLACES = ("device", "host")


def check_draws(scene: Scene, device: torch.device) -> str:
    """ "passed", or the first step whose colours are others."""
    here, there = (PixelSampler(scene, device, 0, pixels=place) for place in PLACES)
    for step in (0, 1, 7):
        if not torch.equal(here.draw(step, 4097).rgba, there.draw(step, 4097).rgba):
            return f"step {step} shows other colours"
    return "passed"


def timed(function: Callable[[], Any], device: torch.device, repeats: int = 30) -> float:
    """Microseconds of a call, the median."""
    found = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(found[3:])


def pieces(scene: Scene, n_rays: int, device: torch.device) -> dict[str, float]:
    """Microseconds of one step's colours: gathered by the host, copied, and read through the bus."""
    host = HostPixels(scene.images, scene.images.mask, 0)
    steps = iter(range(1, 1 << 20))
    found = {"gathered on the host": timed(lambda: host.fetch(next(steps), n_rays), torch.device("cpu"))}
    if device.type != "cuda":
        return found
    slot = host.fetch(0, n_rays).pin_memory()
    there = slot.to(device)
    found["copied to the device"] = timed(lambda: there.copy_(slot, non_blocking=True), device)
    pixels = scene.images.pixels
    indices = torch.randint(0, scene.images.n_pixels, (64, n_rays), device=device)
    views = {"read on the device": pixels.to(device), "read through the bus": map_pixels(pixels, device)}
    views["read through the bus, pinned copy"] = map_pixels(pixels.pin_memory(), device)
    for name, view in views.items():
        if view is None:
            print(f"{name}: this GPU cannot", flush=True)
            continue
        words = view.view(torch.int32) if view.shape[1] == 4 else view
        found[name] = timed(lambda words=words: words[indices[next(steps) % 64]], device)
    return found


class Place:
    """One training, timed block by block."""

    def __init__(self, place: str, config: Any, scene: Scene, device: torch.device) -> None:
        with peak_memory(device) as peak:
            changed = replace(config, data=replace(config.data, pixels=place))
            self.trainer = Trainer(changed, scene, device=device)
            self.trainer.fit()
        self.peak, self.times = peak.n_bytes, []

    def block(self, n_steps: int) -> None:
        trainer, step = self.trainer, self.trainer.step
        trainer.stepper.finish()
        begun = time.perf_counter()
        while step < self.trainer.step + n_steps:
            step = trainer.stepper.advance(step, self.trainer.step + n_steps - step).step
        trainer.stepper.finish()
        self.times.append(1e3 * (time.perf_counter() - begun) / n_steps)
        trainer.step = step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm-steps", type=int, default=1504)
    parser.add_argument("--steps", type=int, default=640, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("host_pixels.json"))
    args = parser.parse_args()
    device = torch.device(args.device)
    scene, test = (load_scene(args.data, split, downscale=args.downscale) for split in ("train", "test"))
    config, _ = fitted_config(preset(args.preset, device.type), scene)
    config = replace(config, train=replace(config.train, steps=args.warm_steps, time_limit=None))
    values: dict[str, Any] = {"scene": scene.name, "preset": config.preset, "gate": check_draws(scene, device)}
    values["microseconds"] = pieces(scene, config.train.max_rays, device)
    print(values, flush=True)
    places = {name: Place(name, config, scene, device) for name in PLACES}
    for _ in range(args.rounds):
        for place in places.values():
            place.block(args.steps)
    chosen, first = choose_views(len(test), args.views), places["device"]
    for name, place in places.items():
        own = statistics.median(place.times)
        row = {"step_ms": own, "ratio": own / statistics.median(first.times), "rounds": place.times}
        row |= {"peak_bytes": place.peak, "psnr": evaluate(place.trainer.model, test, views=chosen).psnr}
        values[name] = row
        print(name, row, flush=True)
    protocol = (
        f"gate: both draw the same bytes; {args.warm_steps} steps, then {args.rounds} rounds of {args.steps} steps of "
        "each in turn, the median; peak: the allocator's, pictures on the device included"
    )
    record = Record("pixels in host memory", protocol, 0, values, machine=machine(args.device))
    print(write_json(args.output, record))


if __name__ == "__main__":
    main()
