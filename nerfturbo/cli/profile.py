"""`nerfturbo profile`: where the time and memory of a training step go, in a table, a JSON file and a browser trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .bench import TrainingArgs, make_table, prepare, show_result
from .settings import check_positive, parse_settings, resolve_device, starting_config


@dataclass(frozen=True)
class ProfileArgs(TrainingArgs):
    """Profile training steps by stage: rays, march, field, composite, backward, optimizer, grid, host."""

    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Steps to profile."""
    warm_steps: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Steps of training before: a young field costs more than a trained one."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("profile.json")
    """Where the result is written; the trace lies beside it, as .trace.json: open it in ui.perfetto.dev."""


def main(argv: Sequence[str]) -> int:
    """Profile, print the table, write JSON and trace."""
    start = starting_config(argv)
    args = parse_settings(ProfileArgs, argv, "profile", start)
    check_positive({"--steps": args.steps, "--warm-steps": args.warm_steps, "--downscale": args.downscale})
    import torch

    from ..bench.profile import MEANING, profile_record, profile_steps
    from ..bench.record import write_json
    from ..evaluation.run_folder import check_result
    from .progress import showing

    check_result(args.output)
    trace = args.output.with_suffix(".trace.json")
    name = resolve_device(args.device)
    with showing() as display:
        scenes, config = prepare(args, start, name, display)
        display.phase(f"training {args.warm_steps} steps, then profiling {args.steps}")
        found = profile_steps(
            config, scenes[0], device=torch.device(name), steps=args.steps, warm_steps=args.warm_steps, trace=trace
        )
    write_json(args.output, profile_record(found, config, scenes[0], device=name))
    title = f"one step: {found.native_ms:.2f} ms as trained, {found.step_ms:.2f} ms eager and waited for"
    table = make_table(title, "stage", "ms", "share", "peak MB", "what")
    for cost in found.stages:
        size = "-" if cost.peak_bytes is None else f"{cost.peak_bytes / 1e6:.1f}"
        table.add_row(cost.stage, f"{cost.milliseconds:.2f}", f"{100 * cost.share:.0f}%", size, MEANING[cost.stage])
    show_result(table, args.output, as_json=args.json)
    if not args.json:
        print(trace)
    return 0
