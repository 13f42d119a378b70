"""`nerfturbo bench ops|step|scene|render`: correctness first, then time; a table, a JSON file and a plot beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import InputError
from .common import Kind, parse
from .settings import Settings, check_positive, parse_settings, resolve_device, starting_config

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ..config import Config
    from ..data.scene import Scene
    from .progress import Display


@dataclass(frozen=True)
class TrainingArgs:
    """The flags that every measurement of a training has: a scene, a config, a device."""

    scene: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")] = "builtin:toybox"
    """A scene folder, or a built-in scene by name."""
    preset: str = "auto"
    """Where the values of the config come from; auto chooses by device."""
    field: Kind = None
    """Radiance field: ngp, ngp-time, vanilla, voxels, factor, or your own: path/to/file.py:MyField."""
    sampler: Kind = None
    """Sampler: grid, uniform, hierarchy, proposal, or your own: path/to/file.py:MySampler."""
    downscale: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Divide the width and height of every picture by this."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    json: bool = False
    """Print the result on stdout instead of the table."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)

    def config(self, start: Config) -> Config:
        """The starting config with these flags in it."""
        data = replace(start.data, source=self.scene, downscale=self.downscale)
        return replace(self.settings.apply(start), data=data)


@dataclass(frozen=True)
class OpsArgs:
    """Time every operation on the fast backend of a device against the reference."""

    ops: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Only these operations; all of them unless given."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    quick: bool = False
    """Fewer repeats and smaller sizes."""
    seed: int = 0
    """Of the random inputs."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-ops.json")
    """Where the result is written."""
    json: bool = False
    """Print the result on stdout instead of the table."""


def ops(argv: Sequence[str]) -> int:
    """Gate and time the ops."""
    args = parse(OpsArgs, argv, "bench ops")
    from ..bench.ops import render_table, run_ops_benchmark, write_timings
    from ..bench.plot import Bars, bar_chart
    from ..evaluation.run_folder import check_result

    check_result(args.output)
    device = resolve_device(args.device)
    timings = run_ops_benchmark(device, args.ops or None, quick=args.quick, seed=args.seed)
    write_timings(args.output, timings, device=device, seed=args.seed)
    fast = [timing for timing in timings if timing.backend != "reference"]
    panel = Bars("times faster than the reference, gradients included", [timing.total_ratio for timing in fast])
    _write_plot(args.output, bar_chart("operations", [timing.op for timing in fast], [panel]))
    show_result(render_table(timings), args.output, as_json=args.json)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1


@dataclass(frozen=True)
class StepArgs(TrainingArgs):
    """Time a whole training step on the fast backend of a device against the reference, from one trained state."""

    quick: bool = False
    """Fewer steps: a first impression, too noisy to publish."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-step.json")
    """Where the result is written."""


def step(argv: Sequence[str]) -> int:
    """Gate and time a step."""
    start = starting_config(argv)
    args = parse_settings(StepArgs, argv, "bench step", start)
    from ..bench.plot import Bars, bar_chart
    from ..bench.record import write_json
    from ..bench.step import QUICK, StepBudget, run_step_benchmark, step_record
    from ..data.scene import load_scene
    from ..data.scene_defaults import fitted_config
    from ..evaluation.run_folder import check_result

    check_result(args.output)
    device, config = resolve_device(args.device), args.config(start)
    budget = QUICK if args.quick else StepBudget(steps=config.grid.update_every)
    scene = load_scene(args.scene, "train", downscale=args.downscale)
    config, _ = fitted_config(config, scene)
    timings = run_step_benchmark(config, scene, device=device, budget=budget)
    write_json(args.output, step_record(timings, config, scene, device=device, budget=budget))
    panel = Bars("milliseconds", [timing.step_ms for timing in timings])
    names = [timing.backend for timing in timings]
    _write_plot(args.output, bar_chart(f"one training step, {scene.name}", names, [panel]))
    table = make_table("one training step", "backend", "ms a step", "times faster", "rays", "samples", "gate")
    for timing in timings:
        milliseconds = "-" if timing.step_ms is None else f"{timing.step_ms:.1f}"
        ratio = "-" if timing.ratio is None else f"{timing.ratio:.1f}x"
        counts = (f"{timing.rays_per_step:.0f}", f"{timing.samples_per_step:.0f}")
        table.add_row(timing.backend, milliseconds, ratio, *counts, timing.gate)
    show_result(table, args.output, as_json=args.json)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1


@dataclass(frozen=True)
class SceneArgs(TrainingArgs):
    """Train a scene and score its test views at marks of training time, the clock stopped while scoring."""

    marks: Annotated[tuple[float, ...], tyro.conf.arg(metavar="SECONDS")] = (10.0, 20.0, 30.0, 60.0)
    """Seconds of training after which to score; training ends at the last."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = (0,)
    """One run each; the median counts."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-scene.json")
    """Where the result is written."""


def scene(argv: Sequence[str]) -> int:
    """Train and score, seed by seed."""
    start = starting_config(argv)
    args = parse_settings(SceneArgs, argv, "bench scene", start)
    check_positive({"--eval-views": args.eval_views, "--marks": min(args.marks, default=0.0)})
    if not args.seeds:
        raise InputError("--seeds", "at least one", "none")
    from ..bench.plot import Curve, line_chart
    from ..bench.record import write_json
    from ..bench.scene import Mark, median_marks, run_scene_benchmark, scene_record
    from ..evaluation.run_folder import check_result
    from .progress import showing

    check_result(args.output)
    device, runs = resolve_device(args.device), []
    with showing() as display:
        scenes, config = prepare(args, start, device, display)

        def report(mark: Mark) -> None:
            display.note(f"{mark.seconds:.1f} s, step {mark.step}: {mark.psnr:.2f} dB")

        for seed in args.seeds:
            display.phase(f"training {scenes[0].name}, seed {seed}, {max(args.marks):g} s")
            seeded = replace(config, train=replace(config.train, seed=seed))
            run = run_scene_benchmark(
                seeded, scenes, args.marks, device=device, eval_views=args.eval_views, report=report
            )
            runs.append(run)  # kept seed by seed: one that is interrupted does not take the others with it
            write_json(args.output, scene_record(runs, config, scenes[1], device=device, eval_views=args.eval_views))
    curves = [
        Curve(f"seed {run.seed}", [mark.seconds for mark in run.marks], [mark.psnr for mark in run.marks])
        for run in runs
    ]
    title = f"{scenes[0].name}: quality over training time"
    _write_plot(args.output, line_chart(title, curves, x_label="seconds of training", y_label="PSNR, dB"))
    table = make_table(f"{scenes[0].name}: PSNR, dB", "seconds", *(f"seed {run.seed}" for run in runs), "median")
    for index, (mark, median) in enumerate(median_marks(runs)):
        table.add_row(f"{mark:g}", *(f"{run.marks[index].psnr:.2f}" for run in runs), f"{median:.2f}")
    show_result(table, args.output, as_json=args.json)
    return 0


@dataclass(frozen=True)
class RenderArgs:
    """Check the frames of a trained run against plain rendering, then time them; last, one 8K frame in its budget."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Check only this many test views, evenly spaced; all of them unless given."""
    quick: bool = False
    """Fewer and smaller frames: a first impression."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-render.json")
    """Where the result is written."""
    json: bool = False
    """Print the result on stdout instead of the table."""


def render(argv: Sequence[str]) -> int:
    """Gate and time frames."""
    args = parse(RenderArgs, argv, "bench render")
    check_positive({"--eval-views": args.eval_views})
    from ..bench.plot import Bars, bar_chart
    from ..bench.record import write_json
    from ..bench.render import LARGE, SIZES, render_record, render_table, run_render_benchmark
    from ..evaluation.evaluate import choose_views
    from ..evaluation.run_folder import check_result
    from .common import load_run, open_views

    check_result(args.output)
    opened = load_run(args.run, resolve_device(args.device), args.data)
    scene = open_views(opened.config)[1]
    views, repeats = choose_views(len(scene), args.eval_views), 3 if args.quick else 30
    options = {"sizes": ((100, 100),), "large": None} if args.quick else {"sizes": SIZES, "large": LARGE}
    result = run_render_benchmark(opened.model, scene, views=views, repeats=repeats, **options)
    write_json(args.output, render_record(result, opened.model, scene, repeats=repeats))
    names = [f"{t.width} x {t.height}, {t.way}" for t in result.timings]
    panel = Bars("milliseconds", [t.milliseconds for t in result.timings])
    _write_plot(args.output, bar_chart(f"frames of {scene.name}", names, [panel]))
    show_result(render_table(result), args.output, as_json=args.json)
    return 0 if result.gate.verdict == "passed" else 1


def prepare(args: TrainingArgs, start: Config, device: str, display: Display) -> tuple[tuple[Scene, Scene], Config]:
    """Open the scene, fit the config to it and compile the kernels, before any clock runs.

    Where nobody chose a preset the scene may take another one than `start`, as in training.
    """
    from ..data.options import LoadOptions
    from ..data.scene import open_scenes
    from ..data.scene_defaults import fitted_config
    from .startup import warm_up

    config = args.config(start)
    display.phase(f"opening {args.scene}")
    scenes = open_scenes(args.scene, LoadOptions(args.downscale))
    config, notes = fitted_config(config, scenes[0], auto=start if args.preset == "auto" else None)
    for note in notes:
        display.note(note)
    warm_up(config, scenes[0], device, display)
    return scenes, config


def make_table(title: str, *headers: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def _write_plot(output: Path, svg: str) -> None:
    """Beside FILE.json: FILE.svg."""
    output.with_suffix(".svg").write_text(svg, encoding="utf-8")


def show_result(table: Table | Group, output: Path, *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print(json.dumps(json.loads(output.read_text())))
        return
    Console(highlight=False).print(table)
    print(output)
