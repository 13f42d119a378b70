"""Train a scene and score it at marks of training time, the clock stopped while scoring."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ..config import Config, to_dict
from ..data.scene import Scene
from ..errors import refuse
from ..evaluation.evaluate import choose_views, evaluate
from ..evaluation.results import measure_baselines, peak_memory, protocol
from ..training.callbacks import skipped_fraction
from ..training.step import StepRecord
from ..training.trainer import Trainer, TrainSummary
from .record import Record, machine

Report = Callable[["Mark"], None]


@dataclass(frozen=True)
class Mark:
    """One score on the way."""

    mark: float  # seconds of training that were asked for
    seconds: float  # seconds of training at which it was taken
    step: int
    psnr: float
    ssim: float | None  # at the last mark alone


@dataclass(frozen=True)
class SceneRun:
    """One seed."""

    seed: int
    marks: tuple[Mark, ...]
    steps: int
    train_seconds: float
    wall_seconds: float  # with set-up and scoring
    rays_per_second: float
    samples_per_second: float
    samples_skipped_fraction: float | None = None  # of those that uniform marching would evaluate, at the end


def fit_whole(trainer: Trainer) -> TrainSummary:
    """Train to the end. `fit` returns on Ctrl-C, and half a training must not pass for a measurement."""
    summary = trainer.fit()
    if summary.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return summary


def run_steps(trainer: Trainer, n_steps: int) -> float:
    """Seconds of a step as training runs it, the mean over the next ones (a GPU may queue a few more)."""
    trainer.stepper.finish()
    begun, first = time.perf_counter(), trainer.step
    while trainer.step < first + n_steps:
        trainer.advance(first + n_steps - trainer.step)
    trainer.stepper.finish()
    return (time.perf_counter() - begun) / max(1, trainer.step - first)


def run_scene_benchmark(
    config: Config,
    scenes: tuple[Scene, Scene],
    marks: Sequence[float],
    *,
    device: torch.device | str = "cpu",
    eval_views: int | None = None,
    report: Report | None = None,
) -> SceneRun:
    """Train for as long as the last mark and score the test views at each; the schedule ends at the last one."""
    wanted = sorted(marks)
    refuse(not wanted or not wanted[0] > 0.0, "marks", "at least one number > 0", list(marks))
    begun = time.perf_counter()
    train_scene, test_scene = scenes
    views = choose_views(len(test_scene), eval_views)
    config = replace(config, train=replace(config.train, time_limit=wanted[-1], steps=1 << 40))
    taken: list[Mark] = []

    def score(trainer: Trainer) -> None:
        mark, seconds = wanted[len(taken)], trainer.train_seconds
        with trainer.as_finished():
            result = evaluate(trainer.model, test_scene, views=views, with_ssim=mark == wanted[-1])
        taken.append(Mark(mark, seconds, trainer.step, result.psnr, result.ssim))
        if report is not None:
            report(taken[-1])

    last: list[StepRecord] = []

    def at_marks(trainer: Trainer, record: StepRecord) -> None:
        last[:] = [record]
        if len(taken) < len(wanted) - 1 and trainer.train_seconds >= wanted[len(taken)]:
            with trainer.clock_stopped():
                score(trainer)

    trainer = Trainer(config, train_scene, device=device, callbacks=[at_marks])
    summary = fit_whole(trainer)  # a mark that was not reached has no score
    while len(taken) < len(wanted):
        score(trainer)
    trained, wall = summary.train_seconds, time.perf_counter() - begun
    rates = (summary.rays / trained, summary.samples / trained)
    skipped = skipped_fraction(trainer, last[-1]) if last else None
    return SceneRun(config.train.seed, tuple(taken), summary.steps, trained, wall, *rates, skipped)


def median_marks(runs: Sequence[SceneRun]) -> list[tuple[float, float]]:
    """(mark, median PSNR over the seeds)."""
    columns = zip(*(run.marks for run in runs), strict=True)
    return [(column[0].mark, statistics.median(mark.psnr for mark in column)) for column in columns]


def scene_record(
    runs: Sequence[SceneRun], config: Config, test_scene: Scene, *, device: str, eval_views: int | None
) -> Record:
    """The runs as a benchmark file."""
    views = choose_views(len(test_scene), eval_views)
    described = protocol(config, test_scene, len(views)) | {"seeds": [run.seed for run in runs]}
    values = {
        "scene": test_scene.name,
        "preset": config.preset,
        "config": to_dict(config) | {"data": {"scene": test_scene.name, "downscale": config.data.downscale}},
        "protocol": described,
        "baselines": measure_baselines(test_scene, views),
        "median_psnr": [{"seconds": mark, "psnr": value} for mark, value in median_marks(runs)],
        "runs": [asdict(run) for run in runs],
        **peak_memory(torch.device(device)),
    }
    text = (
        "PSNR of test views at marks of training time, read with the clock stopped; the learning rate's decay ends at "
        "the last mark; the time holds " + str(described["time_includes"]).split(",")[0]
    )
    return Record(f"{test_scene.name}: quality over training time", text, runs[0].seed, values, machine=machine(device))
