"""A training step on each backend against the reference, from one trained state: first the gate, then the clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import PixelSampler
from ..data.scene import Scene
from ..ops._dispatch import Backend, use_backend
from ..rendering.model import NerfModel, SceneBounds
from ..training.loss import compute_loss, draw_background, first_rays
from ..training.trainer import Trainer
from .gate import backends
from .record import Record, machine
from .scene import fit_whole

# Of a gradient's norm, not of its largest value: rounding may move a sample across the border of the box, which changes
# the few hash entries under it and nothing else.
TOLERANCE = 2e-3
PROTOCOL = (
    "gate: loss and every parameter's gradient of the first step against the reference; then {warm} steps of training "
    "on the fast backend, and from that one state {blocks} blocks of {steps} steps on each backend in turn; a block "
    "holds grid updates as training does; milliseconds are the median over blocks of a block's time over its steps; "
    "loading and compilation are outside"
)


@dataclass(frozen=True)
class StepTiming:
    """One backend. Times are None where the gate failed."""

    backend: str
    step_ms: float | None
    ratio: float | None  # the reference's time / this backend's time
    rays_per_step: float
    samples_per_step: float
    gate: str  # "passed", or what was wrong


@dataclass(frozen=True)
class StepBudget:
    """How long to measure. `steps` should be a multiple of the steps between grid updates."""

    warm_steps: int = 256
    steps: int = 16
    blocks: int = 3


QUICK = StepBudget(warm_steps=64, steps=4, blocks=1)


def _snapshot(trainer: Trainer) -> Callable[[Trainer], None]:
    """Puts a trainer where this one is now, to begin every block from the same point."""
    trainer.stepper.finish()
    model = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    optimizer = {name: value.clone() for name, value in trainer.optimizer.state_tensors().items()}
    step, n_rays = trainer.step, trainer.stepper.n_rays

    def restore(other: Trainer) -> None:
        other.model.load_state_dict(model)
        other.optimizer.load_state_tensors(optimizer)
        other.step, other.stepper.n_rays = step, n_rays

    return restore


def run_step_benchmark(
    config: Config, scene: Scene, *, device: torch.device | str = "cpu", budget: StepBudget | None = None
) -> list[StepTiming]:
    """Gate and time a step on each backend that runs on the device, the reference first."""
    device, budget = torch.device(device), budget or StepBudget()
    names: list[Backend] = backends(device)
    config = replace(config, train=replace(config.train, steps=budget.warm_steps, time_limit=None))
    truth = _first_step(config, scene, device, "reference")
    gates = {name: compare_steps(_first_step(config, scene, device, name), truth) for name in names[1:]}
    gates["reference"] = "passed"
    passed: list[Backend] = [name for name in names if gates[name] == "passed"]
    trainers = {name: _trainer(config, scene, device, name) for name in passed}
    fast = passed[-1]
    with use_backend(fast):
        fit_whole(trainers[fast])
        restore = _snapshot(trainers[fast])
    blocks: dict[Backend, list[tuple[float, float, float]]] = {name: [] for name in passed}
    for _ in range(budget.blocks):
        for name in passed:
            with use_backend(name):
                restore(trainers[name])
                blocks[name].append(_run_block(trainers[name], budget.steps))
    times = {name: statistics.median(block[0] for block in own) for name, own in blocks.items()}
    timings = []
    for name in names:
        own, ratio = times.get(name), times["reference"] / times[name] if name in times else None
        rays, samples = blocks[name][0][1:] if name in blocks else (0.0, 0.0)
        timings.append(StepTiming(name, own, ratio, rays, samples, gates[name]))
    return timings


def _trainer(config: Config, scene: Scene, device: torch.device, backend: Backend) -> Trainer:
    if backend == "reference":  # plain torch reads values back, which a CUDA graph cannot hold
        config = replace(config, train=replace(config.train, capture=False))
    with use_backend(backend):
        return Trainer(config, scene, device=device)


def _run_block(trainer: Trainer, n_steps: int) -> tuple[float, float, float]:
    """Milliseconds, rays and samples of a step."""
    first = step = trainer.step
    rays = samples = 0
    trainer.stepper.finish()
    begun = time.perf_counter()
    while step < first + n_steps:
        record = trainer.stepper.advance(step, first + n_steps - step)
        step, rays, samples = record.step, rays + record.total_rays, samples + record.total_samples
    trainer.stepper.finish()
    return 1e3 * (time.perf_counter() - begun) / (step - first), rays / (step - first), samples / (step - first)


def _first_step(config: Config, scene: Scene, device: torch.device, backend: Backend) -> dict[str, Tensor]:
    """Loss and gradients of step 0, by name, in fp32."""
    with use_backend(backend):
        model = NerfModel(config, SceneBounds.of(scene)).to(device)
        sampler = PixelSampler(scene, device, config.train.seed)
        n_rays = first_rays(model)
        result = compute_loss(model, sampler.draw(0, n_rays), draw_background(config, 0, n_rays, device), step=0)
        result.loss.backward()
    found = {"loss": result.loss.detach()}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_steps(found: dict[str, Tensor], truth: dict[str, Tensor]) -> str:
    """ "passed", or the first value that differs from the truth."""
    if found.keys() != truth.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ truth.keys())}"
    for name, expected in truth.items():
        length = float(expected.double().norm())
        difference = float((found[name].double() - expected.double()).norm())
        if not difference <= TOLERANCE * max(length, 1e-12):  # written so that a NaN counts as wrong
            return f"{name} differs by {difference:.3g}, its norm is {length:.3g}"
    return "passed"


def step_record(timings: list[StepTiming], config: Config, scene: Scene, *, device: str, budget: StepBudget) -> Record:
    """The timings as a benchmark file."""
    protocol = PROTOCOL.format(warm=budget.warm_steps, blocks=budget.blocks, steps=budget.steps)
    width, height = scene.cameras.size[0].tolist()
    values: dict[str, Any] = {
        "scene": f"{scene.name}, {len(scene)} views, {width} x {height}",
        "preset": config.preset,
        "batch_samples": config.train.batch_samples,
        "timings": [asdict(timing) for timing in timings],
    }
    what = "a whole training step against the reference"
    return Record(what, protocol, config.train.seed, values, machine=machine(device))
