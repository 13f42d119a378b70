"""`nerfturbo bench ablation`: one training compared with another, and what measurements of many trainings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import InputError
from .bench import _config, _show, _table
from .bench_args import TrainingArgs
from .common import parse
from .settings import Settings, check_positive, resolve_device, starting_config

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.ablation import AblationRow
    from ..bench.record import Record
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
    """Where the result is written, training by training; a plot lies beside it, as .svg. A file of the same settings is
    gone on with."""
    fresh: bool = False
    """Measure everything again, also what the output holds already."""


def ablation(argv: Sequence[str]) -> int:
    """Train every case, print the table, write JSON and plot."""
    start = starting_config(argv)
    args = parse(AblationArgs, argv, "bench ablation", default=AblationArgs(settings=Settings.of(start)))
    check_positive({"--steps": args.steps, "--eval-views": args.eval_views, "--downscale": args.downscale})
    import torch

    from ..bench import ablation as bench
    from ..bench.continued import held_values
    from ..bench.record import write_json
    from ..evaluation.run_folder import check_result
    from ..files import write_atomically
    from ..training.warm_start import check_source
    from .progress import showing

    check_result(args.output)
    if args.init_from is not None:
        check_source(args.init_from)  # now, not after an hour of other cases
    device, config = resolve_device(args.device), _config(args.settings, start, args.scene, args.downscale)
    rows: dict[str, bench.AblationRow] = {}
    with showing() as display:
        scenes, config = prepare(config, device, display, auto=start if args.preset == "auto" else None)
        plan = bench.AblationPlan(args.steps or config.train.steps, args.eval_views, args.init_from)
        every = bench.ablation_cases(config, torch.device(device), args.init_from)
        cases = [c for c in every if c.name == bench.BASELINE or any(word in c.name for word in args.only or ("",))]
        if len(cases) == 1:
            raise InputError("--only", "words of the techniques' names", " ".join(args.only), "leave it out to see all")

        def ordered() -> list[bench.AblationRow]:
            return [rows[case.name] for case in every if case.name in rows]

        def record() -> Record:
            left = [case.name for case in cases if case.name not in rows]
            return bench.ablation_record(ordered(), config, scenes[1], plan, device=device, unfinished=left)

        def report(row: bench.AblationRow) -> None:
            failed = row.seconds is None or row.psnr is None
            display.note(
                f"{row.name}: {row.error}" if failed else f"{row.name}: {row.seconds:.1f} s, {row.psnr:.2f} dB"
            )
            rows[row.name] = row
            write_json(args.output, record())

        held = None if args.fresh else held_values(args.output, record(), bench.SETTINGS)
        rows.update({row["name"]: bench.AblationRow(**row) for row in (held or {}).get("rows", [])})
        left = [replace(c, config=_fitted(c.config, scenes[0])) for c in cases if c.name not in rows]
        say_plan(display, args.output, len(rows), len(left))
        with written_when_cut_short(display, args.output, lambda: len(rows)):
            try:
                bench.run_ablation(left, scenes, device=torch.device(device), plan=plan, report=report)
            finally:
                if rows:
                    write_json(args.output, record())
                    plot = bench.ablation_plot(ordered(), f"{scenes[1].name}, {plan.steps} steps")
                    write_atomically(args.output.with_suffix(".svg"), plot)
    _show(_ablation_table(ordered(), f"{scenes[1].name}, {plan.steps} steps"), args.output, as_json=args.json)
    return 0


def _ablation_table(rows: Sequence[AblationRow], title: str) -> Table:
    table = _table(title, "technique", "s", "times as long", "MB", "PSNR, dB", "dB more")
    base_seconds, base_psnr = rows[0].seconds or 1e-9, rows[0].psnr or 0.0
    for row in rows:
        if row.seconds is None or row.psnr is None:
            table.add_row(row.name, *["-"] * 3, row.error[:60], "-")
            continue
        size = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}"
        numbers = (f"{row.seconds:.1f}", f"{row.seconds / base_seconds:.2f}", size)
        table.add_row(row.name, *numbers, f"{row.psnr:.2f}", f"{row.psnr - base_psnr:+.2f}")
    return table


def say_plan(display: Display, output: Path, n_held: int, n_left: int) -> None:
    if n_held and not n_left:
        display.note(f"{output} holds all of it already; --fresh measures it again")
    elif n_held:
        display.note(f"going on with {output}, which holds {n_held} trainings of these settings")
    display.phase(f"{n_left} measurements to make")


@contextmanager
def written_when_cut_short(display: Display, output: Path, count: Callable[[], int]) -> Iterator[None]:
    """Say what an interrupt leaves behind, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if count():
            display.note(f"{count()} finished trainings are in {output}; the same command goes on with the others")
        raise


def prepare(
    config: Config, device: str, display: Display, *, auto: Config | None = None
) -> tuple[tuple[Scene, Scene], Config]:
    """Open the scene, fit the config to it and compile the kernels, before any clock runs.

    `auto` is the preset that the config began as, where nobody chose one: the scene may take another, as in training.
    """
    from ..data.fitting import fitted_config
    from .common import open_scenes
    from .startup import warm_up

    display.phase(f"opening {config.data.source}")
    scenes = open_scenes(config.data.source, config.data.downscale)
    config, notes = fitted_config(config, scenes[0], auto=auto)
    for note in notes:
        display.note(note)
    warm_up(config, scenes[0], device, display)
    return scenes, config


def _fitted(config: Config, scene: Scene) -> Config:
    from ..data.fitting import fitted_config

    return fitted_config(config, scene)[0]
