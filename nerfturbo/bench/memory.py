"""How much memory a piece of work takes at its peak, and how large a batch fits into a budget."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..config import Config
from ..data.scene import Scene
from ..errors import is_out_of_memory
from ..training.trainer import Trainer
from .continued import fit_whole

SMALLEST_BATCH = 1 << 10
LARGEST_BATCH = 1 << 24
TRIAL_STEPS = 3
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Filled in when its block ends: bytes of the device beyond those in use before (GPU), or of this process beyond a
    baseline (CPU, Linux)."""

    n_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device, baseline: int | None = None) -> Iterator[PeakMemory]:
    """Measure the most memory that was in use at any moment inside the block.

    A process keeps pages that it has freed, so that on a CPU only growth beyond a baseline taken before all such
    blocks (`resident_bytes`) means anything; without one nothing is measured there.
    """
    found = PeakMemory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # such as cuBLAS's workspaces, one for every stream so far
        yield found
        found.n_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    resettable = False
    with contextlib.suppress(OSError):
        RESET.write_text("5")
        resettable = True
    yield found
    peak = _resident("VmHWM")
    if resettable and baseline is not None and peak is not None:
        found.n_bytes = max(0, peak - baseline)


def resident_bytes() -> int | None:
    """Memory of this process now, where the system tells."""
    return _resident("VmRSS")


def _resident(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    return None


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
    first = max(64, min(rays, round(config.train.initial_rays * share)))
    train = replace(config.train, batch_samples=batch_samples, max_rays=rays, initial_rays=first)
    return replace(config, train=train)


def try_batch(
    config: Config,
    scene: Scene,
    batch_samples: int,
    *,
    device: torch.device,
    budget: int,
    baseline: int | None = None,
) -> BatchTrial:
    """Train a few steps with this batch; running out of memory is an answer, not an error."""
    train = replace(with_batch(config, batch_samples).train, steps=TRIAL_STEPS, time_limit=None)
    why = ""
    with peak_memory(device, baseline) as peak:
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
    report: Callable[[BatchTrial], None] | None = None,
) -> list[BatchTrial]:
    """Every trial in order: doubling from the smallest batch until one does not fit, then bisection to an eighth."""
    trials: list[BatchTrial] = []
    baseline = resident_bytes()

    def fits(batch: int) -> bool:
        trials.append(try_batch(config, scene, batch, device=device, budget=budget, baseline=baseline))
        if report is not None:
            report(trials[-1])
        return trials[-1].fits

    low, high = 0, SMALLEST_BATCH
    while high <= most and fits(high):
        low, high = high, high * 2
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
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(share * 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    return 4 << 30
