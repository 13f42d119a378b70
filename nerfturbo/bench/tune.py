"""What fits a scene on a machine: peak memory, the largest batch of a budget, a learning rate by a range test."""

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import Config
from ..data.pool_file import available_memory
from ..data.scene import Scene
from ..errors import is_out_of_memory
from ..training.trainer import Trainer
from .scene import fit_whole

Say = Callable[[str], None]
SMALLEST_BATCH = 1 << 10
LARGEST_BATCH = 1 << 24
TRIAL_STEPS = 3
SMOOTHING = 0.9
RANGE = (1.0 / 100.0, 30.0)  # of the config's learning rate: where the test begins and ends
DIVERGED = 4.0  # times the least loss: past this the test need not go on
SAFETY = 4.0  # the learning rate with the least loss is already too large, by about this
CANDIDATES = (0.5, 1.0, 2.0)  # around the suggestion, each tried by a short training


class PeakBytes(TorchDispatchMode):
    """Counts what operations inside the block allocate, until it is freed; what was there before does not count. By the
    storages of tensors: the same on any device, whatever an allocator keeps of earlier work."""

    n_bytes: int | None = 0  # at most; None where nobody counted

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
            if storage._cdata not in self._seen and storage._cdata not in before:
                self._seen.add(storage._cdata)
                self._now += storage.nbytes()
                self.n_bytes = max(self.n_bytes or 0, self._now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, n_bytes: int) -> None:
        self._seen.discard(key)
        self._now -= n_bytes


def _tensors(value: Any) -> list[torch.Tensor]:
    """In an argument or a result of an operation; torch's own walk through trees takes three times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []


@contextlib.contextmanager
def peak_memory(device: torch.device, *, count: bool = False) -> Iterator[PeakBytes]:
    """Measure the most memory in use at any moment inside the block, beyond what was before. A GPU's allocator knows.
    On a CPU a process keeps what it has freed, so that its size says more about what ran before: with `count` the
    tensors of the block are counted instead, which makes its operations slower."""
    found = PeakBytes()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # such as cuBLAS's workspaces, one for every stream so far
        yield found
        found.n_bytes = torch.cuda.max_memory_allocated(device) - before
    elif count:
        with contextlib.suppress(ImportError):
            from ..ops.ngp.cpu import release

            release()  # kept for the next step by the last one
        with found:
            yield found
    else:
        found.n_bytes = None
        yield found


@dataclass(frozen=True)
class BatchTrial:
    """One try: did training fit, and what it took."""

    batch_samples: int
    fits: bool
    n_bytes: int | None
    why: str = ""


def with_batch(config: Config, batch_samples: int) -> Config:
    """The config with another sample budget; rays follow in proportion."""
    share = batch_samples / config.train.batch_samples
    rays = max(64, round(config.train.max_rays * share))
    return replace(config, train=replace(config.train, batch_samples=batch_samples, max_rays=rays))


def try_batch(config: Config, scene: Scene, batch_samples: int, *, device: torch.device, budget: int) -> BatchTrial:
    """Train a few steps with this batch; running out of memory is an answer, not an error."""
    train = replace(with_batch(config, batch_samples).train, steps=TRIAL_STEPS, time_limit=None)
    why = ""
    with peak_memory(device, count=True) as peak:
        try:
            fit_whole(Trainer(replace(config, train=train), scene, device=device))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = "out of memory: " + (str(error).splitlines() or [""])[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not why and peak.n_bytes is not None and peak.n_bytes > budget:
        why = f"took {peak.n_bytes / 1e6:.0f} MB of {budget / 1e6:.0f} MB"
    return BatchTrial(batch_samples, not why, peak.n_bytes, why)


def largest_batch(
    config: Config,
    scene: Scene,
    *,
    device: torch.device,
    budget: int,
    most: int = LARGEST_BATCH,
    start: int | None = None,
    report: Callable[[BatchTrial], None] | None = None,
) -> list[BatchTrial]:
    """Every trial: doubling from the smallest batch, or from a `start` that fits, then bisection to an eighth."""
    trials: list[BatchTrial] = []

    def fits(batch: int) -> bool:
        trials.append(try_batch(config, scene, batch, device=device, budget=budget))
        if report is not None:
            report(trials[-1])
        return trials[-1].fits

    low, high, refused = 0, SMALLEST_BATCH, most + 1
    if start is not None and fits(start):
        low, high = start, 2 * start
    elif start is not None:
        refused = start
    while high < refused and fits(high):
        low, high = high, high * 2
    high = min(high, refused)
    if low == 0 or high > most:
        return trials
    while high - low > max(SMALLEST_BATCH // 2, low // 8):
        middle = (low + high) // 2 // 256 * 256
        low, high = (middle, high) if fits(middle) else (low, middle)
    return trials


def best_trial(trials: list[BatchTrial]) -> BatchTrial | None:
    """The largest batch that fitted."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch_samples, default=None)


def memory_budget(device: torch.device, share: float = 0.8) -> int:
    """A share of what is free now."""
    if device.type == "cuda":
        return int(share * torch.cuda.mem_get_info(device)[0])
    free = available_memory()
    return 4 << 30 if free is None else int(share * free)


@dataclass(frozen=True)
class RatePoint:
    """One step of the range test: the smoothed loss there."""

    learning_rate: float
    loss: float


@dataclass(frozen=True)
class Candidate:
    """A short training with one learning rate."""

    learning_rate: float
    mse: float  # mean of the last quarter of its steps
    skipped: int


@dataclass(frozen=True)
class Tuned:
    """What was found, and how."""

    config: Config
    batch_trials: tuple[BatchTrial, ...]
    rates: tuple[RatePoint, ...]
    candidates: tuple[Candidate, ...]


def range_test(config: Config, scene: Scene, *, device: torch.device, steps: int) -> list[RatePoint]:
    """Train while the learning rate rises exponentially from far too small to far too large."""
    low, high = (config.optim.lr * factor for factor in RANGE)
    config = replace(config, train=replace(config.train, steps=steps, time_limit=None, coarse_fraction=0.0))
    trainer = Trainer(config, scene, device=device)
    points: list[RatePoint] = []
    mean, weight, step = 0.0, 0.0, 0
    while step < steps:
        rate = low * (high / low) ** (step / max(1, steps - 1))
        trainer.stepper.set_learning_rate(rate)
        record = trainer.stepper.advance(step, 1)
        step = record.step
        if not math.isfinite(record.loss):
            break
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * record.loss, SMOOTHING * weight + (1 - SMOOTHING)
        points.append(RatePoint(rate, mean / weight))
        if points[-1].loss > DIVERGED * min(point.loss for point in points):
            break
    trainer.stepper.finish()
    return points


def suggested_rate(points: list[RatePoint], fallback: float) -> float:
    """A quarter of the learning rate at which the loss was least.

    >>> suggested_rate([RatePoint(0.001, 1.0), RatePoint(0.01, 0.5), RatePoint(0.1, 0.9)], 1.0)
    0.0025
    """
    return fallback if len(points) < 2 else min(points, key=lambda point: point.loss).learning_rate / SAFETY


def try_rate(config: Config, scene: Scene, rate: float, *, device: torch.device, steps: int) -> Candidate:
    """A short training with the whole schedule, as a real one would be."""
    train = replace(config.train, steps=steps, time_limit=None)
    optim = replace(config.optim, lr=rate, warmup_steps=min(config.optim.warmup_steps, steps // 5))
    errors: list[float] = []
    trainer = Trainer(replace(config, train=train, optim=optim), scene, device=device)
    trainer.callbacks.append(lambda _, record: errors.append(record.mse))
    fit_whole(trainer)
    last = errors[-max(1, len(errors) // 4) :]
    mse = sum(last) / len(last)
    return Candidate(rate, mse if math.isfinite(mse) else math.inf, trainer.skipped)


def tune(config: Config, scene: Scene, *, device: torch.device, budget: int, most: int, steps: int, say: Say) -> Tuned:
    """The largest stable batch within `budget` bytes and at most `most` samples, then a learning rate for it."""

    def said(trial: BatchTrial) -> None:
        size = "" if trial.n_bytes is None else f", {trial.n_bytes / 1e6:.0f} MB"
        say(f"batch of {trial.batch_samples} samples: {'fits' + size if trial.fits else trial.why}")

    trials = largest_batch(config, scene, device=device, budget=budget, most=most, report=said)
    best = best_trial(trials)
    config = config if best is None else with_batch(config, best.batch_samples)
    points = range_test(config, scene, device=device, steps=steps)
    suggestion = suggested_rate(points, config.optim.lr)
    say(f"range test over {len(points)} steps suggests a learning rate of {suggestion:.3g}")
    candidates: list[Candidate] = []
    for rate in sorted({*(suggestion * factor for factor in CANDIDATES), config.optim.lr}):
        candidates.append(try_rate(config, scene, rate, device=device, steps=steps))
        say(f"learning rate {rate:.3g}: error {candidates[-1].mse:.3g} after {steps} steps")
    chosen = min(candidates, key=lambda candidate: candidate.mse)
    tuned = replace(config, optim=replace(config.optim, lr=chosen.learning_rate))
    return Tuned(tuned, tuple(trials), tuple(points), tuple(candidates))
