"""How many more fine samples a faster precision affords, where a coarse pass places them: timed, not calculated.

fp32's step at the config's samples is the budget. A precision doubles its fine samples per ray while a step still fits
into that time, then bisects; each trial is a trainer of its own that makes real steps, in turn with steps of fp32, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common import matmul_precision
from nerfturbo.bench.scene import run_steps
from nerfturbo.config import NO_STEP_LIMIT, Config
from nerfturbo.data.scene import Scene
from nerfturbo.errors import is_out_of_memory
from nerfturbo.training.distributed import RayShare
from nerfturbo.training.loss import Stages, compute_loss, draw_background, place_samples, render_and_compare
from nerfturbo.training.step import gradient_scale, set_rest
from nerfturbo.training.trainer import Trainer

if TYPE_CHECKING:
    from precision_runs import Kind

TWO_PASSES = ("hierarchy", "proposal")  # ways of sampling where a coarse look places fine samples
MOST_TIMES = 8  # the config's fine samples: where the search ends unless told otherwise
GRAIN = 16  # the search ends within a sixteenth of what fits
BLOCKS, MORE_BLOCKS = 5, 15  # of steps, of each precision in turn, and where they disagree; medians count
BLOCK_SECONDS, BLOCK_STEPS = 0.1, 64  # a block lasts so long, and has at most so many steps
HOPELESS = 2.0  # times the budget: one block says enough
PASS_STEPS, SLOW_SECONDS = 5, 1.0  # steps whose passes are timed apart; one alone if it is so slow


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of the parts of a step, each run by itself and waited for; gradients are in them."""

    coarse: float  # the first look, and drawing the fine places from it
    fine: float  # the field over all samples that it sees, colours, loss
    rest: float  # pixels, the update


@dataclass(frozen=True)
class FineTrial:
    """A number of fine samples per ray: did a step fit into fp32's time?"""

    fine_samples: int
    milliseconds: float | None  # of a step as training runs it
    ratio: float | None  # to fp32's step, which ran in turn with it
    fits: bool
    why: str = ""  # no time at all: memory ran out


@dataclass(frozen=True)
class FineSearch:
    """What the time that one precision saves affords. For fp32, which is the measure, nothing is tried."""

    kind: str
    passes: PassTimes  # at the config's samples
    step_ms: float | None  # as training runs it, at the config's samples
    ratio: float | None  # to fp32's, which ran in turn with it
    fine_samples: int  # per ray: the most that fitted; the config's where no time is saved
    trials: tuple[FineTrial, ...] = ()

    @property
    def saves(self) -> bool:
        """Whether a step takes less than fp32's."""
        return bool(self.trials) and self.trials[0].fits

    @classmethod
    def of(cls, values: dict[str, Any]) -> FineSearch:
        """From a file."""
        trials = tuple(FineTrial(**trial) for trial in values["trials"])
        return cls(**values | {"passes": PassTimes(**values["passes"]), "trials": trials})


def has_two_passes(config: Config) -> bool:
    """Whether samples of a coarse pass decide where fine ones lie."""
    return config.sampler.kind in TWO_PASSES


def with_fine(config: Config, fine_samples: int) -> Config:
    """The config with another number of fine samples on each ray, on the same number of rays.

    >>> from nerfturbo.presets import preset
    >>> more = with_fine(preset("hierarchy"), 256)
    >>> more.sampler.n_samples, more.train.max_rays, more.train.batch_samples == 1024 * (64 + 256)
    (256, 1024, True)
    """
    sampler, train = config.sampler, config.train
    beside = sampler.coarse_samples if sampler.kind == "hierarchy" else 0  # the field sees these as well
    rays = max(1, min(train.max_rays, train.batch_samples // (beside + sampler.n_samples)))
    train = replace(train, batch_samples=rays * (beside + fine_samples), max_rays=rays)
    return replace(config, sampler=replace(sampler, n_samples=fine_samples), train=train)


def most_fine(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The most samples that fit: doubling from `start` while they do, at most `most`, then bisection.

    Where not even `start` fits there is nothing to buy, and it stays.

    >>> most_fine(lambda n: n <= 300, start=128, most=1024), most_fine(lambda n: False, start=128, most=1024)
    (288, 128)
    """
    if not fits(start):
        return start
    low, high = start, start
    while low < most:
        high = min(2 * low, most)
        if not fits(high):
            break
        low = high
    grain = max(1, start // GRAIN)  # whole grains above the start: shapes that kernels like where the config's are
    while high - low > max(grain, low // GRAIN):
        middle = low + max(grain, (high - low) // 2 // grain * grain)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class StepTimer:
    """Steps of one precision as training runs them: recorded, on a GPU. They begin behind the first update of the grid,
    which looks at all of its cells."""

    def __init__(self, config: Config, scene: Scene, kind: Kind, *, device: torch.device) -> None:
        train = replace(config.train, precision=kind.precision, steps=NO_STEP_LIMIT, time_limit=None)
        self.kind = kind
        with matmul_precision(kind.matmul):
            self.trainer = Trainer(replace(config, train=train), scene, device=device)
            self.trainer.step = 1  # step 0 updates the grid
            self.trainer.stepper.prepare()
        self._run(1)  # compiles what is left
        self.block = 0  # steps; not known before one of them was timed

    def seconds(self) -> float:
        """Of a step, the mean over a block of steps."""
        if self.block == 0:
            one = self._run(1)
            self.block = max(1, min(BLOCK_STEPS, round(BLOCK_SECONDS / max(one, 1e-9))))
            if self.block == 1:
                return one
        return self._run(self.block)

    def _run(self, n_steps: int) -> float:
        with matmul_precision(self.kind.matmul):
            return run_steps(self.trainer, n_steps)


def time_in_turn(own: Callable[[], float], base: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of a step of `own`, and the median over pairs of its ratio to `base`.

    Who goes first alternates. One pair will do where it is hopeless, a few where all agree on who is faster.
    """
    seconds: list[float] = []
    ratios: list[float] = []
    for pair in range(MORE_BLOCKS):
        first = base() if pair % 2 == 0 else None
        seconds.append(own())
        ratios.append(seconds[-1] / (base() if first is None else first))
        agreed = pair + 1 >= BLOCKS and len({ratio <= 1.0 for ratio in ratios}) == 1
        if agreed or ratios[0] > HOPELESS:
            break
    return statistics.median(seconds), statistics.median(ratios)


def try_fine(
    config: Config, scene: Scene, kind: Kind, fine_samples: int, *, device: torch.device, base: StepTimer
) -> FineTrial:
    """Time steps with so many fine samples against fp32's; running out of memory is an answer, not an error."""
    timer = None
    try:
        timer = StepTimer(with_fine(config, fine_samples), scene, kind, device=device)
        seconds, ratio = time_in_turn(timer.seconds, base.seconds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return FineTrial(fine_samples, None, None, False, "out of memory: " + (str(error).splitlines() or [""])[0])
    finally:
        del timer
        _tidy(device)
    return FineTrial(fine_samples, 1e3 * seconds, ratio, ratio <= 1.0)


def search_fine(
    config: Config,
    scene: Scene,
    kind: Kind,
    *,
    device: torch.device,
    base: StepTimer,
    most: int,
    report: Callable[[FineTrial], None],
) -> FineSearch:
    """The fine samples per ray that a precision affords in the time of `base`, fp32's step at the config's samples."""
    trials: list[FineTrial] = []

    def fits(fine_samples: int) -> bool:
        trials.append(try_fine(config, scene, kind, fine_samples, device=device, base=base))
        report(trials[-1])
        return trials[-1].fits

    passes = time_passes(config, scene, kind, device=device)
    found = most_fine(fits, config.sampler.n_samples, max(most, config.sampler.n_samples))
    return FineSearch(kind.name, passes, trials[0].milliseconds, trials[0].ratio, found, tuple(trials))


def measure_base(config: Config, scene: Scene, kind: Kind, *, device: torch.device, base: StepTimer) -> FineSearch:
    """fp32 itself: its passes and its step; it buys nothing."""
    passes = time_passes(config, scene, kind, device=device)
    step = statistics.median(base.seconds() for _ in range(BLOCKS))
    return FineSearch(kind.name, passes, 1e3 * step, 1.0, config.sampler.n_samples)


def time_passes(config: Config, scene: Scene, kind: Kind, *, device: torch.device) -> PassTimes:
    """The coarse and the fine pass apart: eager steps of the trainer's own stages, medians.

    Gradients of the coarse pass and of the fine one are separate graphs, so that each is differentiated by itself.
    """
    train = replace(with_fine(config, config.sampler.n_samples).train, precision=kind.precision)
    with matmul_precision(kind.matmul):
        trainer = Trainer(replace(config, train=train), scene, device=device)
        steps = []
        for step in range(PASS_STEPS + 1):
            begun = time.perf_counter()
            steps.append(_apart(trainer, step))
            if step == 1 and time.perf_counter() - begun > SLOW_SECONDS:
                break
    del trainer
    _tidy(device)
    parts = zip(*steps[1:], strict=True)  # the first one compiles
    return PassTimes(*(1e3 * statistics.median(part) for part in parts))


def _apart(trainer: Trainer, step: int) -> tuple[float, float, float]:
    """Seconds of the coarse pass, the fine pass and the rest of one step."""
    model, optimizer, device = trainer.model, trainer.optimizer, trainer.device
    coarse = {parameter for parameter in model.sampler.parameters() if parameter.requires_grad}
    fine = [p for p in model.parameters() if p.requires_grad and p not in coarse]
    spent = {"coarse": 0.0, "fine": 0.0}
    set_rest(model, optimizer, False)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            _wait(device)
            begun = time.perf_counter()
            made = function(*arguments, **options)
            _wait(device)
            spent[name] += time.perf_counter() - begun
            return made

        return run

    stages = Stages(place=timed("coarse", place_samples), compare=timed("fine", render_and_compare))
    _wait(device)
    begun = time.perf_counter()
    n_rays, scale = trainer.config.train.max_rays, gradient_scale(optimizer)
    batch = stages.draw(trainer.pixels, step, RayShare(0, n_rays))
    background = draw_background(model.config, step, n_rays, device)
    loss = compute_loss(model, batch, background, step=step, loss_scale=scale, stages=stages).loss
    loss = loss if scale is None else loss * scale
    timed("coarse", _differentiate)(loss, list(coarse), keep=True)
    timed("fine", _differentiate)(loss, fine, keep=False)
    optimizer.step()
    optimizer.finish_step()
    _wait(device)
    whole = time.perf_counter() - begun
    return spent["coarse"], spent["fine"], max(0.0, whole - sum(spent.values()))


def _differentiate(loss: Tensor, parameters: Sequence[Tensor], *, keep: bool) -> None:
    """Only what leads to these parameters is run."""
    loss.backward(inputs=list(parameters), retain_graph=keep)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
