"""`nerfturbo bench ...`, `profile`, `tune`: correctness, then time; a table and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
from tyro.conf import Positional, arg

from ..errors import InputError, refuse, require_run
from .common import print_json
from .flags import Device, EvalViews, Number, RunPath, SceneSource, check_positive, parse
from .progress import Display, make_table, showing
from .settings import ConfigArgs, parse_settings, resolve_device

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ..bench.record import Record
    from ..config import Config
    from ..data.scene import Scene

GPU_BATCH = 1 << 20  # samples: past this a step of an H200 only takes longer
CPU_GROWTH = 4  # times the preset's batch: its steps take as many times longer
Output = Annotated[Path, arg(metavar="FILE", help="Where the result is written.")]
Json = Annotated[bool, arg(help="Print the result on stdout instead of the table.")]


@dataclass(frozen=True)
class TrainingArgs(ConfigArgs):
    """The flags that every measurement of a training has."""

    scene: SceneSource = "builtin:toybox"
    downscale: Number = 1  # Divide width and height of every image by this.
    json: Json = False

    def config(self, start: Config) -> Config:
        """The starting config with these flags in it."""
        data = replace(start.data, source=self.scene, downscale=self.downscale)
        return replace(self.settings.apply(start), data=data)


@dataclass(frozen=True)
class StepArgs(TrainingArgs):
    """Time a whole training step on the fast backend of a device against the reference, from one trained state."""

    quick: bool = False  # Fewer steps: a first impression, too noisy to publish.
    output: Output = Path("bench-step.json")


def step(argv: Sequence[str]) -> int:
    args, start = parse_settings(StepArgs, argv, "bench step")
    from ..bench.step import QUICK, StepBudget, run_step_benchmark, step_record
    from ..data.scene import load_scene
    from ..data.scene_defaults import fitted_config

    device, config = _begin(args), args.config(start)
    budget = QUICK if args.quick else StepBudget(steps=config.grid.update_every)
    scene = load_scene(args.scene, "train", downscale=args.downscale)
    config, _ = fitted_config(config, scene)
    timings = run_step_benchmark(config, scene, device=device, budget=budget)
    table = make_table("one training step", "backend", "ms a step", "times faster", "rays", "samples", "gate")
    for timing in timings:
        milliseconds = "-" if timing.step_ms is None else f"{timing.step_ms:.1f}"
        ratio = "-" if timing.ratio is None else f"{timing.ratio:.1f}x"
        counts = (f"{timing.rays_per_step:.0f}", f"{timing.samples_per_step:.0f}")
        table.add_row(timing.backend, milliseconds, ratio, *counts, timing.gate)
    _publish(args, step_record(timings, config, scene, device=device, budget=budget), table)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1


@dataclass(frozen=True)
class SceneArgs(TrainingArgs):
    """Train a scene and score its test views at marks of training time, the clock stopped while scoring."""

    marks: Annotated[tuple[float, ...], arg(metavar="SECONDS")] = (10.0, 20.0, 30.0, 60.0)
    """Seconds of training after which to score; training ends at the last."""
    seeds: Annotated[tuple[int, ...], arg(metavar="N")] = (0,)  # One run each; the median counts.
    eval_views: EvalViews = None
    output: Output = Path("bench-scene.json")

    def config(self, start: Config) -> Config:
        made = super().config(start)
        return replace(made, train=replace(made.train, time_limit=max(self.marks)))


def scene(argv: Sequence[str]) -> int:
    args, start = parse_settings(SceneArgs, argv, "bench scene")
    check_positive({"--eval-views": args.eval_views, "--marks": min(args.marks, default=0.0)})
    refuse(not args.seeds, "--seeds", "at least one", "none")
    from ..bench.record import write_json
    from ..bench.scene import Mark, median_marks, run_scene_benchmark, scene_record

    device, runs = _begin(args), []
    with showing() as display:
        scenes, config = prepare(args, start, device, display)

        def report(mark: Mark) -> None:
            display.note(f"{mark.seconds:.1f} s, step {mark.step}: {mark.psnr:.2f} dB")

        where = {"device": device, "eval_views": args.eval_views}
        for seed in args.seeds:
            display.phase(f"training {scenes[0].name}, seed {seed}, {max(args.marks):g} s")
            seeded = replace(config, train=replace(config.train, seed=seed))
            runs.append(run_scene_benchmark(seeded, scenes, args.marks, **where, report=report))
            # Written seed by seed: one that is interrupted does not take the others with it.
            write_json(args.output, record := scene_record(runs, config, scenes[1], **where))
    table = make_table(f"{scenes[0].name}: PSNR, dB", "seconds", *(f"seed {run.seed}" for run in runs), "median")
    for index, (mark, median) in enumerate(median_marks(runs)):
        table.add_row(f"{mark:g}", *(f"{run.marks[index].psnr:.2f}" for run in runs), f"{median:.2f}")
    _publish(args, record, table)
    return 0


@dataclass(frozen=True)
class RenderArgs:
    """Check the frames of a trained run against plain rendering, then time them; last, one 8K frame in its budget."""

    run: RunPath
    data: Annotated[str | None, arg(metavar="DATA")] = None  # New location of the scene, if it was moved.
    eval_views: EvalViews = None
    quick: bool = False  # Fewer and smaller frames: a first impression.
    device: Device = "auto"
    output: Output = Path("bench-render.json")
    json: Json = False


def render(argv: Sequence[str]) -> int:
    args = parse(RenderArgs, argv, "bench render")
    require_run(args.run)
    check_positive({"--eval-views": args.eval_views})
    from ..bench.render import LARGE, SIZES, render_record, render_table, run_render_benchmark
    from ..evaluation.evaluate import choose_views
    from .common import load_run, open_views

    opened = load_run(args.run, _begin(args), args.data)
    scene = open_views(opened.config)[1]
    views, repeats = choose_views(len(scene), args.eval_views), 3 if args.quick else 30
    options = {"sizes": ((100, 100),), "large": None} if args.quick else {"sizes": SIZES, "large": LARGE}
    result = run_render_benchmark(opened.model, scene, views=views, repeats=repeats, **options)
    _publish(args, render_record(result, opened.model, scene, repeats=repeats), render_table(result))
    return 0 if result.gate.verdict == "passed" else 1


@dataclass(frozen=True)
class CompareArgs:
    """Say what got faster, slower, better or worse between two results of one benchmark, beyond the noise."""

    old: Annotated[Positional[Path], arg(metavar="OLD")]  # JSON of a benchmark.
    new: Annotated[Positional[Path], arg(metavar="NEW")]  # JSON of the same benchmark, made later.
    noise: Annotated[float, arg(metavar="SHARE")] = 0.03  # Ignore changes of times and sizes up to this share.
    json: Json = False


def compare(argv: Sequence[str]) -> int:
    args = parse(CompareArgs, argv, "bench compare")
    refuse(args.noise < 0.0, "--noise", "0 or more", args.noise)
    from ..bench.record import compare_records
    from ..data.json_checks import read_json

    old, new = (read_json(path, "the JSON of a benchmark") for path in (args.old, args.new))
    for path, record in ((args.old, old), (args.new, new)):
        refuse(not {"what", "values"} <= record.keys(), str(path), "the JSON of a benchmark", "another JSON")
    refuse(old["what"] != new["what"], str(args.new), f"a result of the same benchmark ({old['what']})", new["what"])
    changes = compare_records(old, new, args.noise)
    refuse(not changes, str(args.new), f"times, sizes or scores that {args.old} has too", "none")
    table = make_table(old["what"], "measured", "old", "new", "noise", "verdict")
    for change in sorted(changes, key=lambda change: change.verdict == "same"):
        numbers = (f"{value:.4g}" for value in (change.old, change.new, change.noise))
        table.add_row(change.name, *numbers, change.verdict)
    if args.json:
        print_json({"what": old["what"], "changes": [asdict(change) for change in changes]})
    else:
        rich.print(table)
    return int(any(change.verdict == "worse" for change in changes))


@dataclass(frozen=True)
class ProfileArgs(TrainingArgs):
    """Profile training steps by stage: rays, march, field, composite, backward, optimizer, grid, host."""

    steps: Number = 32  # Steps to profile.
    warm_steps: Number = 256  # Steps of training before: a young field costs more than a trained one.
    output: Annotated[Path, arg(metavar="FILE")] = Path("profile.json")
    """Where the result is written; the trace lies beside it, as .trace.json: open it in ui.perfetto.dev."""


def profile(argv: Sequence[str]) -> int:
    args, start = parse_settings(ProfileArgs, argv, "profile")
    check_positive({"--steps": args.steps, "--warm-steps": args.warm_steps, "--downscale": args.downscale})
    import torch

    from ..bench.profile import MEANING, profile_record, profile_steps

    name, trace = _begin(args), args.output.with_suffix(".trace.json")
    with showing() as display:
        scenes, config = prepare(args, start, name, display)
        display.phase(f"training {args.warm_steps} steps, then profiling {args.steps}")
        counts = {"steps": args.steps, "warm_steps": args.warm_steps}
        found = profile_steps(config, scenes[0], device=torch.device(name), **counts, trace=trace)
    title = f"one step: {found.native_ms:.2f} ms as trained, {found.step_ms:.2f} ms eager and waited for"
    table = make_table(title, "stage", "ms", "share", "peak MB", "what")
    for cost in found.stages:
        size = "-" if cost.peak_bytes is None else f"{cost.peak_bytes / 1e6:.1f}"
        table.add_row(cost.stage, f"{cost.milliseconds:.2f}", f"{100 * cost.share:.0f}%", size, MEANING[cost.stage])
    _publish(args, profile_record(found, config, scenes[0], device=name), table)
    if not args.json:
        print(trace)
    return 0


@dataclass(frozen=True)
class TuneArgs(TrainingArgs):
    """Find the largest batch that fits the memory and a good learning rate, and write them into a config file."""

    output: Annotated[Path, arg(metavar="FILE")] = Path("tuned.json")  # Config to write, for train --config.
    memory: Annotated[float | None, arg(metavar="GB")] = None  # Memory to train in; 80% of what is free unless given.
    max_batch: Annotated[int | None, arg(metavar="SAMPLES")] = None
    """Largest batch to try; a million on a GPU, four times the preset's on a CPU, where time runs out first."""
    steps: Number = 100  # Steps of the range test and of each short training.


def tune(argv: Sequence[str]) -> int:
    args, start = parse_settings(TuneArgs, argv, "tune")
    limits = {"--memory": args.memory, "--max-batch": args.max_batch, "--steps": args.steps}
    check_positive(limits | {"--downscale": args.downscale})
    import torch

    from ..bench import tune as search
    from ..evaluation.run_folder import config_document, write_json

    name = _begin(args)
    if args.max_batch is not None and args.max_batch < search.SMALLEST_BATCH:
        raise InputError("--max-batch", f"at least {search.SMALLEST_BATCH} samples", str(args.max_batch))
    device = torch.device(name)
    with showing() as display:
        scenes, config = prepare(args, start, name, display)
        budget = search.memory_budget(device) if args.memory is None else int(args.memory * 1e9)
        most = args.max_batch or (GPU_BATCH if device.type == "cuda" else CPU_GROWTH * config.train.batch_samples)
        size = f"of at most {most} samples within {budget / 1e9:.2f} GB"
        display.phase(f"looking for a batch {size}, then for a learning rate")
        limits = {"budget": budget, "most": most, "steps": args.steps}
        found = search.tune(config, scenes[0], device=device, **limits, say=display.note)
    write_json(args.output, config_document(found.config))
    train, optim = found.config.train, found.config.optim
    if args.json:
        tried = {"batches": found.batch_trials, "rates": found.rates, "candidates": found.candidates}
        listed = {key: [asdict(item) for item in items] for key, items in tried.items()}
        print_json({"config": str(args.output), "batch_samples": train.batch_samples, "lr": optim.lr} | listed)
        return 0
    print(f"batch of {train.batch_samples} samples (at most {train.max_rays} rays), learning rate {optim.lr:.3g}")
    print("  " + shlex.join(["nerfturbo", "train", args.scene, "--config", str(args.output)]))
    return 0


def prepare(args: TrainingArgs, start: Config, device: str, display: Display) -> tuple[tuple[Scene, Scene], Config]:
    """Open the scene, fit the config to it and compile the kernels, before any clock runs. Where nobody chose a preset
    the scene may take another one than `start`, as in training."""
    from ..data.options import LoadOptions
    from ..data.scene import open_scenes
    from ..data.scene_defaults import fitted_config
    from .startup import warm_up

    display.phase(f"opening {args.scene}")
    scenes = open_scenes(args.scene, LoadOptions(args.downscale))
    config, notes = fitted_config(args.config(start), scenes[0], auto=start if args.preset == "auto" else None)
    for note in notes:
        display.note(note)
    warm_up(config, scenes[0], device, display)
    return scenes, config


Measurement = RenderArgs | StepArgs | SceneArgs | ProfileArgs | TuneArgs


def _begin(args: Measurement) -> str:
    """The device to measure on; a result that could not be written is refused first."""
    from ..evaluation.run_folder import check_result

    check_result(args.output)
    return resolve_device(args.device)


def _publish(args: Measurement, record: Record, table: Table) -> None:
    """FILE.json, and the table."""
    from ..bench.record import write_json

    write_json(args.output, record)
    show_result(table, args.output, as_json=args.json)


def show_result(table: Table | Group, output: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads(output.read_text())))
    else:
        rich.print(table)
        print(output)
