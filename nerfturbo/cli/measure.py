"""`nerfturbo bench ablation|precision`: one training compared with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import InputError
from .bench import _config, _show, _table
from .bench_args import TrainingArgs
from .parse import parse
from .settings import Settings, check_positive, resolve_device, starting_config

if TYPE_CHECKING:
    from ..config import Config
    from ..data.scene import Scene
    from .progress import Display


@dataclass(frozen=True)
class AblationArgs(TrainingArgs):
    """Train a scene again and again with one technique changed at a time: time, memory and dB of each."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Steps of every training; the preset's unless given."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORD")] = ()
    """Only the techniques whose name has one of these words in it, beside the baseline."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Where pretrained initialisation begins: a run, a safetensors file, zoo:NAME; the zoo's field that fits unless
    given."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-ablation.json")
    """Where the result is written; a plot lies beside it, as .svg."""


def ablation(argv: Sequence[str]) -> int:
    """Train every case, print the table, write JSON and plot."""
    start = starting_config(argv)
    args = parse(AblationArgs, argv, "bench ablation", default=AblationArgs(settings=Settings.of(start)))
    check_positive({"--steps": args.steps, "--eval-views": args.eval_views, "--downscale": args.downscale})
    import torch

    from ..bench.ablation import BASELINE, AblationRow, ablation_cases, ablation_plot, ablation_record, run_ablation
    from ..bench.record import write_json
    from ..evaluation.run_folder import check_writable, write_text
    from .progress import showing

    check_writable(args.output)
    device, config = resolve_device(args.device), _config(args.settings, start, args.scene, args.downscale)
    cases = ablation_cases(config, torch.device(device), args.init_from)
    if args.only:
        cases = [c for c in cases if c.name == BASELINE or any(word in c.name for word in args.only)]
        if len(cases) == 1:
            raise InputError("--only", "words of the techniques' names", " ".join(args.only), "leave it out to see all")
    with showing() as display:
        scenes, config = prepare(config, device, display)
        cases = [replace(case, config=_fitted(case.config, scenes[0])) for case in cases]

        def report(row: AblationRow) -> None:
            failed = row.seconds is None or row.psnr is None
            display.note(
                f"{row.name}: {row.error}" if failed else f"{row.name}: {row.seconds:.1f} s, {row.psnr:.2f} dB"
            )

        display.phase(f"training {len(cases)} times")
        steps = args.steps or config.train.steps
        rows = run_ablation(
            cases, scenes, device=torch.device(device), steps=steps, eval_views=args.eval_views, report=report
        )
    record = ablation_record(rows, config, scenes[1], device=device, eval_views=args.eval_views)
    write_json(args.output, record)
    write_text(args.output.with_suffix(".svg"), ablation_plot(rows, f"{scenes[1].name}, {steps} steps"))
    table = _table(f"{scenes[1].name}, {steps} steps", "technique", "s", "times as long", "MB", "PSNR, dB", "dB more")
    base_seconds, base_psnr = rows[0].seconds or 1e-9, rows[0].psnr or 0.0
    for row in rows:
        if row.seconds is None or row.psnr is None:
            table.add_row(row.name, *["-"] * 3, row.error[:60], "-")
            continue
        size = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}"
        numbers = (f"{row.seconds:.1f}", f"{row.seconds / base_seconds:.2f}", size)
        table.add_row(row.name, *numbers, f"{row.psnr:.2f}", f"{row.psnr - base_psnr:+.2f}")
    _show(table, args.output, as_json=args.json)
    return 0


def prepare(config: Config, device: str, display: Display) -> tuple[tuple[Scene, Scene], Config]:
    """Open the scene, fit the config to it and compile the kernels, before any clock runs."""
    from .scenes import open_scenes
    from .warm import warm_up

    display.phase(f"opening {config.data.source}")
    scenes = open_scenes(config.data.source, config.data.downscale)
    config = _fitted(config, scenes[0])
    warm_up(config, scenes[0], device, display)
    return scenes, config


def _fitted(config: Config, scene: Scene) -> Config:
    from ..data.fitting import fitted_config

    return fitted_config(config, scene)[0]


@dataclass(frozen=True)
class PrecisionArgs(TrainingArgs):
    """Train a scene in fp32, fp16 and bf16: speed, memory, quality and stability, at one batch and at one budget."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Steps of every training; the preset's unless given."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = (0,)
    """One training each; medians count."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Only these of fp32, tf32, fp16 and bf16; all that the device has units for unless given."""
    memory_budget: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """Also train each precision with the largest batch that fits this much memory."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-precision.json")
    """Where the result is written; a page lies beside it, as .html, and plots, as -NAME.svg."""


def precision(argv: Sequence[str]) -> int:
    """Train every precision, print the table, write JSON, page and plots."""
    start = starting_config(argv)
    args = parse(PrecisionArgs, argv, "bench precision", default=PrecisionArgs(settings=Settings.of(start)))
    positive = {"--steps": args.steps, "--eval-views": args.eval_views, "--memory-budget": args.memory_budget}
    check_positive(positive | {"--downscale": args.downscale})
    if not args.seeds:
        raise InputError("--seeds", "at least one", "none")
    import torch

    from ..bench import precision as bench
    from ..bench.precision_page import plots, precision_page
    from ..bench.record import write_json
    from ..evaluation.run_folder import check_writable, write_text
    from .progress import quantity, showing

    check_writable(args.output)
    device, config = resolve_device(args.device), _config(args.settings, start, args.scene, args.downscale)
    kinds = bench.kinds_for(torch.device(device))
    for name in args.only:
        if name not in {kind.name for kind in kinds}:
            raise InputError("--only", "some of " + ", ".join(kind.name for kind in kinds), repr(name))
    chosen = tuple(kind for kind in kinds if not args.only or kind.name in args.only)
    budget = None if args.memory_budget is None else int(args.memory_budget * 1e9)
    plan = bench.PrecisionPlan(chosen, args.seeds, args.steps or config.train.steps, args.eval_views, budget)
    with showing() as display:
        scenes, config = prepare(config, device, display)
        display.phase(f"training in {', '.join(kind.name for kind in chosen)}")

        def report(run: bench.PrecisionRun) -> None:
            display.note(f"{run.kind}, seed {run.seed}: {run.seconds:.1f} s, {run.psnr:.2f} dB, {run.skipped} skipped")

        result = bench.compare_precisions(config, scenes, plan, device=torch.device(device), report=report)
    write_json(args.output, bench.precision_record(result, config, scenes[1], plan, device=device))
    title = f"{scenes[1].name}, {config.preset}: precisions side by side, {plan.steps} steps"
    write_text(args.output.with_suffix(".html"), precision_page(result, title))
    for name, text in plots(result).items():
        write_text(args.output.with_name(f"{args.output.stem}-{name}.svg"), text)
    table = _table(
        title, "precision", "batch", "samples/s", "times fp32", "MB", "of fp32's", "dB", "dB more", "skipped"
    )
    for line in (*bench.summarise(result.same_batch), *bench.summarise(result.same_memory)):
        mega = None if line["peak_bytes"] is None else line["peak_bytes"] / 1e6
        numbers = {"samples_per_second_ratio": ".2f", "peak_bytes": ".0f", "peak_bytes_ratio": ".2f"}
        numbers |= {"psnr": ".2f", "psnr_difference": "+.2f"}
        values = line | {"peak_bytes": mega}
        cells = ["-" if values[name] is None else format(values[name], form) for name, form in numbers.items()]
        speed = quantity(line["samples_per_second"])
        table.add_row(line["kind"], str(line["batch_samples"]), speed, *cells, str(line["skipped"]))
    _show(table, args.output, as_json=args.json)
    return 0
