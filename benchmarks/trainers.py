"""Whose loop costs what: one training driven by hand, by the native trainer, by Lightning and by Fabric, in one run.

    python benchmarks/trainers.py DATA --steps 300 --rounds 3
    python benchmarks/trainers.py DATA --loops native lightning-captured

Gate first: every loop must give the plain loop's losses (on a GPU, where precision differs, its score). Then rounds of
all loops in turn; a loop's time is the median over rounds, and its overhead the difference to the plain loop's. Where
only some loops are asked for, the first of them takes the plain loop's place.
"""

from __future__ import annotations

from charts import Bars, bar_chart
from common import parse_study, run_study

# isort: split
import importlib
import importlib.util
import inspect
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

import trainer_loops
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.bench.tune import peak_memory
from nerfturbo.cli.bench import TrainingArgs, prepare, show_result
from nerfturbo.cli.flags import check_positive
from nerfturbo.cli.progress import make_table, showing
from nerfturbo.cli.settings import resolve_device
from nerfturbo.config import Config
from nerfturbo.data.scene import Scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.evaluation.run_folder import check_result
from nerfturbo.files import write_atomically
from nerfturbo.rendering.model import NerfModel

Loop = Callable[[Config, Scene, torch.device, trainer_loops.Tick], NerfModel]
LABELS = {
    "plain": "plain PyTorch loop",
    "native": "native trainer",
    "native eager": "native trainer, not captured",
    "lightning": "Lightning, automatic optimization",
    "lightning captured": "Lightning, captured=True",
    "fabric": "Lightning Fabric",
}
GATE_STEPS = 20
LOSS_TOLERANCE = 1e-3  # relative
SCORE_TOLERANCE = 1.0  # dB
PROTOCOL = (
    "gate: {gate}; {rounds} rounds of all loops in turn, {steps} steps each, from the same seed; milliseconds are the "
    "median over rounds of the time between step {warm} and the last over the steps in between; psnr is of {views} "
    "test views after the last round; peak_bytes: the allocator's, pictures included; lines are those of the loop's "
    "own function"
)


@dataclass(frozen=True)
class TrainerTiming:
    """One loop. Times are None where the gate failed."""

    loop: str
    step_ms: float | None
    overhead_ms: float | None  # to the first loop
    ratio: float | None  # of its time to the first loop's
    seconds: float | None  # of a whole run, the time to this psnr
    psnr: float | None
    lines: int
    gate: str
    peak_bytes: int | None = None  # of the allocator, pictures included; a CPU has none


@dataclass(frozen=True)
class _Run:
    losses: dict[int, float]
    step_ms: float
    seconds: float
    model: NerfModel
    peak_bytes: int | None


def loops_for(device: torch.device) -> dict[str, Loop]:
    """The loops that make sense on a device: without a GPU nothing is captured."""
    loops: dict[str, Loop] = {"plain": trainer_loops.plain, "native": trainer_loops.native}
    if device.type == "cuda":
        loops["native eager"] = _eager
    loops["lightning"] = trainer_loops.lightning
    loops["lightning captured"] = trainer_loops.lightning_captured
    loops["fabric"] = trainer_loops.fabric
    return loops


def choose_loops(device: torch.device | str, names: Sequence[str]) -> dict[str, Loop]:
    """Those named, in their order; all where none is."""
    known = loops_for(torch.device(device))
    for name in names:
        if name not in known:
            raise InputError("loops", "some of " + ", ".join(known), repr(name))
    return {name: known[name] for name in names} if names else known


def _eager(config: Config, scene: Scene, device: torch.device, tick: trainer_loops.Tick) -> NerfModel:
    return trainer_loops.native(replace(config, train=replace(config.train, capture=False)), scene, device, tick)


def run_trainers_benchmark(
    config: Config,
    scenes: tuple[Scene, Scene],
    *,
    device: torch.device | str = "cpu",
    rounds: int = 3,
    eval_views: int = 4,
    loops: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> list[TrainerTiming]:
    """Gate and time every loop for `config.train.steps` steps, or the named ones; all against the first."""
    device = torch.device(device)
    chosen = choose_loops(device, loops)
    first = next(iter(chosen))
    runs: dict[str, list[_Run]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name, loop in chosen.items():
            runs[name].append(_run(loop, config, scenes[0], device))
            if report is not None:
                report(f"round {number + 1} of {rounds}: {LABELS[name]}, {runs[name][-1].step_ms:.3f} ms a step")
    views = choose_views(len(scenes[1]), eval_views)
    scores = {
        name: evaluate(done[-1].model, scenes[1], views=views, with_ssim=False).psnr for name, done in runs.items()
    }
    timings = []
    base = statistics.median(run.step_ms for run in runs[first])
    for name, done in runs.items():
        gate, lines = compare_losses(done[0].losses, runs[first][0].losses), lines_of(chosen[name])
        if device.type == "cuda":  # captured steps report one chunk behind and run in half precision
            close = abs(scores[name] - scores[first]) <= SCORE_TOLERANCE
            gate = "passed" if close else f"{scores[name]:.2f} dB, the first loop {scores[first]:.2f} dB"
        if gate != "passed":
            timings.append(TrainerTiming(name, None, None, None, None, None, lines, gate))
            continue
        own = statistics.median(run.step_ms for run in done)
        seconds = statistics.median(run.seconds for run in done)
        peak = done[-1].peak_bytes
        timings.append(TrainerTiming(name, own, own - base, own / base, seconds, scores[name], lines, gate, peak))
    return timings


def _run(loop: Loop, config: Config, scene: Scene, device: torch.device) -> _Run:
    warm = config.train.steps // 5
    losses: dict[int, float] = {}
    marks: list[tuple[int, float]] = []

    def tick(step: int, loss: float) -> None:
        losses[step] = loss
        marks.append((step, time.perf_counter()))

    importlib.import_module("lightning.pytorch")  # sets the levels of its loggers
    levels, loggers = [], [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    for logger in loggers:
        levels.append(logger.level)
        logger.setLevel(logging.ERROR)
    begun = time.perf_counter()
    try:
        with warnings.catch_warnings(), peak_memory(device) as peak:
            warnings.simplefilter("ignore")
            model = loop(config, scene, device, tick)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    first = next(mark for mark in marks if mark[0] >= warm)
    step_ms = 1e3 * (marks[-1][1] - first[1]) / max(1, marks[-1][0] - first[0])
    return _Run(losses, step_ms, seconds, model, peak.n_bytes)


def compare_losses(found: dict[int, float], truth: dict[int, float], tolerance: float = LOSS_TOLERANCE) -> str:
    """ "passed", or the first step whose loss is another one."""
    for step in sorted(set(found) & set(truth))[:GATE_STEPS]:
        if not abs(found[step] - truth[step]) <= tolerance * abs(truth[step]):
            return f"the loss of step {step} is {found[step]:.6g}, the first loop's {truth[step]:.6g}"
    return "passed"


def lines_of(loop: Loop) -> int:
    """Lines of code of a loop: neither blank ones nor its signature."""
    source = inspect.getsource(trainer_loops.native if loop is _eager else loop)
    return sum(bool(line.strip()) for line in source.splitlines()) - 1


def trainers_record(
    timings: Sequence[TrainerTiming], config: Config, scene: Scene, *, device: str, rounds: int, eval_views: int
) -> Record:
    """The timings as a benchmark file."""
    protocol = PROTOCOL.format(
        gate=f"final scores within {SCORE_TOLERANCE:g} dB of the first loop's"
        if torch.device(device).type == "cuda"
        else f"the first {GATE_STEPS} losses within {LOSS_TOLERANCE:g} of the first loop's",
        rounds=rounds,
        steps=config.train.steps,
        warm=config.train.steps // 5,
        views=eval_views,
    )
    width, height = scene.cameras.size[0].tolist()
    values: dict[str, Any] = {
        "scene": f"{scene.name}, {len(scene)} views, {width} x {height}",
        "preset": config.preset,
        "batch_samples": config.train.batch_samples,
        "loops": [asdict(timing) | {"label": LABELS[timing.loop]} for timing in timings],
    }
    what = f"one training, {len(timings)} loops: what the loop around the step costs"
    return Record(what, protocol, config.train.seed, values, machine=machine(device))


def draw_bars(path: Path, timings: Sequence[TrainerTiming], title: str) -> Path:
    """The times as bars in an SVG file."""
    known = [timing for timing in timings if timing.step_ms is not None]
    times = Bars("milliseconds a step", [timing.step_ms for timing in known])
    ratios = Bars("times as long as the first", [timing.ratio for timing in known])
    write_atomically(path, bar_chart(title, [LABELS[timing.loop] for timing in known], [times, ratios]))
    return path


@dataclass(frozen=True)
class TrainersArgs(TrainingArgs):
    """Time the plain loop, the native trainer, Lightning and Fabric on the same training."""

    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 300
    """Steps of each run."""
    rounds: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Runs of each loop, in turn; the median counts."""
    eval_views: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """Test views that the result of each loop is scored on."""
    loops: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = ()
    """Which loops, all against the first: plain, native, native-eager, lightning, lightning-captured, fabric."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-trainers.json")
    """Where the result is written; the plot goes beside it, as .svg."""


def main(argv: Sequence[str]) -> int:
    """Gate and time the loops."""
    args, start = parse_study(TrainersArgs, argv, "trainers")
    check_positive({"--steps": args.steps, "--rounds": args.rounds, "--eval-views": args.eval_views})
    if importlib.util.find_spec("lightning") is None:
        raise InputError("trainers", "lightning", "it is not installed", "pip install 'nerfturbo[lightning]'")
    check_result(args.output)
    device, loops = resolve_device(args.device), [name.replace("-", " ") for name in args.loops]
    choose_loops(device, loops)  # a wrong name is found before anything runs
    with showing() as display:
        scenes, config = prepare(args, start, device, display)
        config = replace(config, train=replace(config.train, steps=args.steps, time_limit=None))
        display.phase("training")
        options = {"device": device, "rounds": args.rounds, "eval_views": args.eval_views}
        timings = run_trainers_benchmark(config, scenes, loops=loops, report=display.note, **options)
    write_json(args.output, trainers_record(timings, config, scenes[0], **options))
    draw_bars(args.output.with_suffix(".svg"), timings, f"{scenes[0].name} on {device}")
    headers = ("loop", "ms a step", f"to {timings[0].loop}", "PSNR", "seconds", "lines", "gate")
    table = make_table(f"one training, {len(timings)} loops", *headers)
    for timing in timings:
        row = ["-"] * 4
        if timing.step_ms is not None and timing.ratio is not None:
            row = [f"{timing.step_ms:.2f}", f"{timing.ratio:.3f}x", f"{timing.psnr:.2f}", f"{timing.seconds:.1f}"]
        table.add_row(LABELS[timing.loop], *row, str(timing.lines), timing.gate)
    show_result(table, args.output, as_json=args.json)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(run_study(main))
