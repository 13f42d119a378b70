"""`nerfturbo train`: flags to a plan. What the plan does is in session.py, what follows it in finish.py."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..config import Config, FieldConfig, GridConfig, OptimConfig, RenderConfig, TrainConfig
from ..errors import InputError
from ..presets import preset
from .parse import flag_value, parse

if TYPE_CHECKING:
    from ..evaluation.run_folder import RunFolder

BackendName = Literal["auto", "reference", "cpu", "triton"]


@dataclass(frozen=True)
class TrainArgs:
    """Train a radiance field and write a run folder: checkpoints, scores on unseen views, renders and a report.

    The defaults below are those of the preset (or, with --resume, of the run).
    """

    scene: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="DATA")] = None
    """A scene folder, or a built-in scene by name. Without it the built-in default scene is trained."""
    preset: str = "auto"
    """Where the values below come from: ngp, ngp-cpu or vanilla; auto chooses by device."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Stop after this many steps; short for --train.steps."""
    time_limit: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Stop after this many seconds of training; short for --train.time-limit."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Run folder to write; runs/SCENE-TIME unless given."""
    overwrite: bool = False
    """Write into a folder that is not empty; only files of an earlier run are removed from it."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Go on with this run folder, with its own values; give --steps or --time-limit to train longer."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Decides every random draw; short for --train.seed."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: BackendName = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""
    downscale: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Divide the width and height of every picture by this."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    turntable: Annotated[int, tyro.conf.arg(metavar="FRAMES")] = 36
    """Frames of the turntable that is rendered at the end; 0 leaves it out."""
    save_every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 30.0
    """Seconds between checkpoints."""
    json: bool = False
    """Print the result as one JSON object on stdout."""
    grid: GridConfig = dataclasses.field(default_factory=GridConfig)
    field: FieldConfig = dataclasses.field(default_factory=FieldConfig)
    render: RenderConfig = dataclasses.field(default_factory=RenderConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Plan:
    """What is to be trained, where, and where it goes."""

    config: Config
    device: str
    output: Path | None  # None: named after the scene once that is open
    run: RunFolder | None  # the run to go on with
    args: TrainArgs


def main(argv: Sequence[str]) -> int:
    """Parse, plan, train, finish."""
    start = _starting_config(argv)
    default = TrainArgs(grid=start.grid, field=start.field, render=start.render, optim=start.optim, train=start.train)
    args = parse(TrainArgs, argv, "train", default=default)
    plan = _plan(args, start)
    from .common import chosen_backend
    from .session import run_plan

    with chosen_backend(args.backend):
        return run_plan(plan)


def _starting_config(argv: Sequence[str]) -> Config:
    """The config whose values the nested flags have as defaults: decided by --resume, --preset and --device."""
    resume, name = flag_value(argv, "--resume"), flag_value(argv, "--preset") or "auto"
    asks_help = any(word in ("-h", "--help") for word in argv)
    if resume is not None and not asks_help:
        from ..evaluation.run_folder import open_run

        return open_run(resume).read_config()
    device = flag_value(argv, "--device") or "auto"
    if name != "auto" or not device.startswith("auto"):
        return preset(name, "cpu" if device.startswith("cpu") else "cuda")
    if asks_help:  # torch would take seconds to say whether it can use the GPU
        return preset(name, "cuda" if os.path.exists("/dev/nvidia0") else "cpu")
    return preset(name, resolve_device(device))


def resolve_device(name: str) -> str:
    """A device torch can use here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("--device", "auto, cpu, cuda or cuda:N", repr(name)) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            got = f"{name}, with {count} GPUs usable here"
            raise InputError("--device", "a GPU that torch can use", got, "`nerfturbo doctor` says why")
    elif device.type not in ("cpu", "mps"):
        raise InputError("--device", "auto, cpu, cuda or cuda:N", repr(name))
    return name


def _plan(args: TrainArgs, start: Config) -> Plan:
    device = resolve_device(args.device)
    train = replace(
        args.train,
        steps=args.train.steps if args.steps is None else args.steps,
        time_limit=args.train.time_limit if args.time_limit is None else args.time_limit,
        seed=args.train.seed if args.seed is None else args.seed,
    )
    config = replace(start, grid=args.grid, field=args.field, render=args.render, optim=args.optim, train=train)
    _check(args, config)
    if args.resume is not None:
        return Plan(config, device, args.resume, _run_to_resume(args, config), args)
    source = config.data.source if args.scene is None else args.scene
    data = replace(config.data, source=source, downscale=args.downscale or config.data.downscale)
    return Plan(replace(config, data=data), device, args.output, None, args)


def _run_to_resume(args: TrainArgs, config: Config) -> RunFolder:
    from ..evaluation.run_folder import open_run
    from ..training.checkpoint import latest_checkpoint, read_state

    fixed = {"DATA": args.scene, "--output": args.output, "--downscale": args.downscale, "--seed": args.seed}
    for flag, value in fixed.items():
        if value is not None:
            raise InputError(flag, "nothing beside --resume", repr(str(value)), "a run keeps its own")
    run = open_run(str(args.resume))
    state = read_state(latest_checkpoint(run.path))
    hint = f"train longer with a larger value, or score it again: nerfturbo eval {args.resume}"
    if state.step >= config.train.steps:
        raise InputError("--steps", f"more than the {state.step} steps of the run", str(config.train.steps), hint)
    limit = config.train.time_limit
    if limit is not None and state.train_seconds >= limit:
        raise InputError("--time-limit", f"more than the run's {state.train_seconds:.1f} s", f"{limit:g}", hint)
    return run


def _check(args: TrainArgs, config: Config) -> None:
    """What only makes sense above zero, named by its flag."""
    positive = {
        "--steps": config.train.steps,
        "--time-limit": config.train.time_limit,
        "--downscale": args.downscale,
        "--eval-views": args.eval_views,
        "--save-every": args.save_every,
        "--train.batch-samples": config.train.batch_samples,
        "--train.max-rays": config.train.max_rays,
        "--train.initial-rays": config.train.initial_rays,
        "--render.steps-per-diagonal": config.render.steps_per_diagonal,
        "--grid.update-every": config.grid.update_every,
        "--optim.lr": config.optim.lr,
    }
    for flag, value in positive.items():
        if value is not None and not value > 0:
            raise InputError(flag, "a number > 0", str(value))
    if args.turntable < 0:
        raise InputError("--turntable", "a number >= 0", str(args.turntable))


def default_output(scene_name: str) -> Path:
    """runs/SCENE-TIME, with a counter behind where two runs begin in the same second."""
    stem = f"{scene_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{counter}" for counter in range(2, 100))]
    return next((path for name in names if not (path := Path("runs") / name).exists()), Path("runs") / stem)
