"""Where the time and the memory of training steps go, by stage in our words, and a trace for the browser.

The steps run eagerly, one stage after the other, each waited for: what a stage takes by itself. A recorded step
overlaps and has no host time; it is timed as a whole beside them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from ..config import Config
from ..data.scene import Scene
from ..training.trainer import Trainer
from .record import Record, machine
from .timed_step import PREFIX, StageClock, step_timed

MEANING = {
    "rays": "drawing pixels, their rays as the cameras are corrected, colours, the background",
    "march": "walking the grid and the visibility pass over the density, or the proposals",
    "field": "encoding and networks, forward",
    "composite": "colours, compositing and every loss, that of depths too, forward",
    "backward": "all gradients",
    "optimizer": "checking, unscaling, Adam, loss scale",
    "grid": "refreshing the occupancy grid, spread over the steps",
    "host": "Python and everything between the stages",
}


@dataclass(frozen=True)
class StageCost:
    """One stage, per step."""

    stage: str
    milliseconds: float
    share: float
    peak_bytes: int | None  # beyond what was in use when it began; on a CPU: of tensors


@dataclass(frozen=True)
class Profile:
    """What N steps cost."""

    steps: int
    step_ms: float  # of the profiled, eager steps
    native_ms: float  # of a step as training runs it: recorded, on a GPU
    stages: tuple[StageCost, ...]
    operators: tuple[tuple[str, float, int], ...]  # name, milliseconds in all, calls


def profile_steps(
    config: Config, scene: Scene, *, device: torch.device, steps: int, warm_steps: int, trace: Path | None
) -> Profile:
    """Train `warm_steps`, then profile `steps` of them; the Chrome trace goes to `trace` where given."""
    config = replace(config, train=replace(config.train, steps=warm_steps + 2 * steps + 1, time_limit=None))
    trainer = Trainer(config, scene, device=device)
    native = _native(trainer, warm_steps, steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step_timed(trainer, StageClock(device), 1)  # eager kernels compile outside the clock
    clock = StageClock(device)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        begun = time.perf_counter()
        step_timed(trainer, clock, steps)
        total = time.perf_counter() - begun
    if device.type == "cpu":
        clock.peaks = _peaks_of_tensors(profiler)
    clock.seconds["host"] = max(0.0, total - sum(clock.seconds.values()))
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    costs = [
        StageCost(name, 1e3 * seconds / steps, seconds / total, clock.peaks.get(name))
        for name, seconds in clock.seconds.items()
    ]
    return Profile(steps, 1e3 * total / steps, native, tuple(costs), _operators(profiler, device))


def _peaks_of_tensors(profiler: torch.profiler.profile) -> dict[str, int]:
    """The same for a CPU, which keeps no peaks: from the profiler's list of what was allocated and freed, and when."""
    results = getattr(profiler.profiler, "kineto_results", None)
    events = [] if results is None else results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    totals = [0, *accumulate(size for _, size in changes)]  # after as many changes
    peaks: dict[str, int] = {}
    for event in events:
        if not changes or not event.name().startswith(PREFIX):
            continue
        begun = bisect_left(changes, (event.start_ns(),))
        ended = bisect_left(changes, (event.start_ns() + event.duration_ns(),))
        name = event.name().removeprefix(PREFIX)
        peaks[name] = max(peaks.get(name, 0), max(totals[begun : ended + 1]) - totals[begun])
    return peaks


def _native(trainer: Trainer, warm_steps: int, steps: int) -> float:
    """Milliseconds of a step as training runs it."""
    trainer.stepper.prepare()
    while trainer.step < warm_steps:
        trainer.advance(warm_steps - trainer.step)
    trainer.stepper.finish()
    begun, first = time.perf_counter(), trainer.step
    while trainer.step < warm_steps + steps:
        trainer.advance(warm_steps + steps - trainer.step)
    trainer.stepper.finish()
    return 1e3 * (time.perf_counter() - begun) / (trainer.step - first)


def _operators(profiler: torch.profiler.profile, device: torch.device) -> tuple[tuple[str, float, int], ...]:
    """The twelve that take most of the device's time."""
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if not event.key.startswith((PREFIX, "Profiler"))]
    events.sort(key=lambda event: getattr(event, name), reverse=True)
    return tuple((event.key[:80], getattr(event, name) / 1e3, int(event.count)) for event in events[:12])


def profile_record(found: Profile, config: Config, scene: Scene, *, device: str) -> Record:
    """The profile as a benchmark file."""
    values = {"scene": scene.name, "preset": config.preset, **asdict(found), "meaning": MEANING}
    text = (
        "eager steps with every stage waited for, from one trained state; milliseconds per step; native_ms is a step "
        "as training runs it, recorded as a graph on a GPU"
    )
    return Record(f"{scene.name}: where a step goes", text, config.train.seed, values, machine=machine(device))
