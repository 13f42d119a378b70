"""How much memory a piece of work takes at its peak, and how large a batch fits into a budget."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import Config
from ..data.scene import Scene
from ..errors import is_out_of_memory
from ..training.trainer import Trainer
from .continued import fit_whole

SMALLEST_BATCH = 1 << 10
LARGEST_BATCH = 1 << 24
TRIAL_STEPS = 3


class PeakBytes(TorchDispatchMode):
    """Counts what operations inside the block allocate, until it is freed; what was there before does not count.

    By the storages of tensors: the same on any device, whatever an allocator keeps of earlier work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._seen or storage._cdata in before:
                continue
            self._seen.add(storage._cdata)
            self._now += storage.nbytes()
            self.n_bytes = max(self.n_bytes, self._now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, n_bytes: int) -> None:
        self._seen.discard(key)
        self._now -= n_bytes


class PeakMemory:
    """Filled in when its block ends: bytes of the device beyond those in use before; None on a CPU unless counted."""

    n_bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device, *, count: bool = False) -> Iterator[PeakMemory]:
    """Measure the most memory that was in use at any moment inside the block.

    A GPU's allocator knows. On a CPU a process keeps what it has freed, so that its size says more about what ran
    before: with `count` the tensors of the block are counted instead, which makes its operations slower.
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
    elif count:
        with contextlib.suppress(ImportError):
            from ..ops.ngp.cpu import release

            release()  # kept for the next step by the last one
        with PeakBytes() as counted:
            yield found
        found.n_bytes = counted.n_bytes
    else:
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


def try_batch(
    config: Config,
    scene: Scene,
    batch_samples: int,
    *,
    device: torch.device,
    budget: int,
) -> BatchTrial:
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
    """Every trial in order: doubling from the smallest batch until one does not fit, then bisection to an eighth.

    Where `start` fits, doubling begins there.
    """
    trials: list[BatchTrial] = []

    def fits(batch: int) -> bool:
        trials.append(try_batch(config, scene, batch, device=device, budget=budget))
        if report is not None:
            report(trials[-1])
        return trials[-1].fits

    low, high, refused = 0, SMALLEST_BATCH, most + 1
    if start is not None:
        if fits(start):
            low, high = start, 2 * start
        else:
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
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(share * 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    return 4 << 30
