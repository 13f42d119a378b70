"""Where the time and the memory of training steps go, by stage, and a trace for the browser. Eager steps run, each
stage waited for, so that the stages and the rest add up; a step as trained is timed as a whole beside them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..config import Config
from ..data.scene import Scene
from ..rendering.model import NerfModel
from ..training.step import TrainingStep
from ..training.trainer import Trainer
from .record import Record, machine
from .scene import run_steps

PREFIX = "nerfturbo: "  # of the stages' names in a trace
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
STAGES = tuple(MEANING)


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
    config: Config, scene: Scene, *, device: torch.device, steps: int, warm_steps: int, trace: Path
) -> Profile:
    """Train `warm_steps`, then profile `steps` of them; the Chrome trace goes to `trace`."""
    config = replace(config, train=replace(config.train, steps=warm_steps + 2 * steps + 1, time_limit=None))
    trainer = Trainer(config, scene, device=device)
    trainer.stepper.prepare()
    run_steps(trainer, warm_steps)
    native = 1e3 * run_steps(trainer, steps)
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU]
    step_timed(trainer, StageClock(device), 1)  # eager kernels compile outside the clock
    clock = StageClock(device)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        begun = time.perf_counter()
        step_timed(trainer, clock, steps)
        total = time.perf_counter() - begun
    if device.type == "cpu":
        clock.peaks = _peaks_of_tensors(profiler)
    clock.seconds["host"] = max(0.0, total - sum(clock.seconds.values()))
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    costs = [
        StageCost(name, 1e3 * seconds / steps, seconds / total, clock.peaks.get(name))
        for name, seconds in clock.seconds.items()
    ]
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if not event.key.startswith((PREFIX, "Profiler"))]
    events.sort(key=lambda event: getattr(event, name), reverse=True)
    operators = tuple((event.key[:80], getattr(event, name) / 1e3, int(event.count)) for event in events[:12])
    return Profile(steps, 1e3 * total / steps, native, tuple(costs), operators)


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


def profile_record(found: Profile, config: Config, scene: Scene, *, device: str) -> Record:
    """The profile as a benchmark file."""
    values = {"scene": scene.name, "preset": config.preset, **asdict(found), "meaning": MEANING}
    text = (
        "eager steps with every stage waited for, from one trained state; milliseconds per step; native_ms is a step "
        "as training runs it, recorded as a graph on a GPU"
    )
    return Record(f"{scene.name}: where a step goes", text, config.train.seed, values, machine=machine(device))


class StageClock:
    """Sums time and peak memory by stage. A stage inside another stops the outer one for as long as it lasts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.peaks: dict[str, int] = {}
        self.now: str | None = None
        self._range: torch.profiler.record_function | None = None
        self._begun, self._before = 0.0, 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, time counts for this stage; afterwards for the one before again."""
        outer = self.now
        self.turn(name)
        try:
            yield
        finally:
            self.turn(outer)

    def turn(self, name: str | None) -> None:
        """From now on time counts for this stage, or for none."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        if self.now is not None and self._range is not None:
            self.seconds[self.now] += time.perf_counter() - self._begun
            self._range.__exit__(None, None, None)
            if cuda:
                used = torch.cuda.max_memory_allocated(self.device) - self._before
                self.peaks[self.now] = max(self.peaks.get(self.now, 0), used)
        self.now, self._range = name, None
        if name is None:
            return
        if cuda:
            self._before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begun = time.perf_counter()
        self._range = torch.profiler.record_function(PREFIX + name)
        self._range.__enter__()


def step_timed(trainer: Trainer, clock: StageClock, n_steps: int) -> None:
    """Train on for so many steps, eagerly and by this clock."""
    own, n_rays = trainer.stepper.stages, max(1, trainer.stepper.n_rays)

    def compare(*given: Any, **options: Any) -> Any:
        clock.turn("composite")  # and so to the end of the loss: what other losses there are comes after
        return own.compare(*given, **options)

    place, update_grid = clock.stage("march")(own.place), clock.stage("grid")(own.update_grid)
    stages = replace(own, place=place, compare=compare, update_grid=update_grid)
    stepper: Any = TrainingStep(trainer.model, trainer.pixels, trainer.optimizer, stages=stages)
    stepper.n_rays, stepper.loss = n_rays, clock.stage("rays")(stepper.loss)  # until the comparison begins
    stepper.differentiate = clock.stage("backward")(stepper.differentiate)
    stepper.update = clock.stage("optimizer")(stepper.update)
    trainer.stepper = stepper
    with _timed_parts(trainer.model, clock):
        for _ in range(n_steps):
            trainer.advance(1)


@contextmanager
def _timed_parts(model: NerfModel, clock: StageClock) -> Iterator[None]:
    """Inside, what the comparison asks of the field counts for the field, and the corrections of rays for the rays."""
    parts: list[tuple[Any, str, str]] = [
        (model.field, name, "field") for name in ("sample_logits", "forward", "density") if hasattr(model.field, name)
    ]
    if model.photos is not None:
        parts.append((model.photos, "rays", "rays"))
    with ExitStack() as timed:
        for owner, name, stage in parts:
            timed.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), stage, clock)))
        yield


def _timed(function: Callable[..., Any], stage: str, clock: StageClock) -> Callable[..., Any]:
    """The visibility pass and the grid's refreshing ask the field too: only the comparison counts for it."""
    counted = clock.stage(stage)(function)
    return lambda *given, **options: (counted if clock.now == "composite" else function)(*given, **options)
