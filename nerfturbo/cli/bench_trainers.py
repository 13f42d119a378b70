"""`nerfturbo bench trainers`: the same training under every loop, in one run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .bench import _config, _show, _table
from .bench_args import TrainingArgs
from .common import parse
from .settings import Settings, check_positive, resolve_device, starting_config


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
    start = starting_config(argv)
    args = parse(TrainersArgs, argv, "bench trainers", default=TrainersArgs(settings=Settings.of(start)))
    check_positive({"--steps": args.steps, "--rounds": args.rounds, "--eval-views": args.eval_views})
    if importlib.util.find_spec("lightning") is None:
        raise InputError("bench trainers", "lightning", "it is not installed", "pip install 'nerfturbo[lightning]'")
    from ..bench.record import write_json
    from ..bench.trainers import LABELS, choose_loops, draw_bars, run_trainers_benchmark, trainers_record
    from ..data.fitting import fitted_config
    from ..evaluation.run_folder import check_result
    from .common import open_scenes
    from .progress import showing
    from .startup import warm_up

    check_result(args.output)
    device, loops = resolve_device(args.device), [name.replace("-", " ") for name in args.loops]
    choose_loops(device, loops)  # a wrong name is found before anything runs
    config = _config(args.settings, start, args.scene, args.downscale)
    with showing() as display:
        display.phase(f"opening {args.scene}")
        scenes = open_scenes(args.scene, args.downscale)
        config, _ = fitted_config(config, scenes[0])
        config = replace(config, train=replace(config.train, steps=args.steps, time_limit=None))
        warm_up(config, scenes[0], device, display)
        display.phase("training")
        options = {"device": device, "rounds": args.rounds, "eval_views": args.eval_views}
        timings = run_trainers_benchmark(config, scenes, loops=loops, report=display.note, **options)
    write_json(args.output, trainers_record(timings, config, scenes[0], **options))
    draw_bars(args.output.with_suffix(".svg"), timings, f"{scenes[0].name} on {device}: milliseconds a step")
    first = f"to {timings[0].loop}"
    table = _table(
        f"one training, {len(timings)} loops", "loop", "ms a step", first, "PSNR", "seconds", "lines", "gate"
    )
    for timing in timings:
        row = ["-"] * 4
        if timing.step_ms is not None and timing.ratio is not None:
            row = [f"{timing.step_ms:.2f}", f"{timing.ratio:.3f}x", f"{timing.psnr:.2f}", f"{timing.seconds:.1f}"]
        table.add_row(LABELS[timing.loop], *row, str(timing.lines), timing.gate)
    _show(table, args.output, as_json=args.json)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1
