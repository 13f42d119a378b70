"""`nerfturbo train`: flags to a plan. What the plan does is in session.py, what follows it in finish.py."""

import contextlib
import importlib.util
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..config import NO_STEP_LIMIT, Config
from ..errors import InputError, refuse
from .common import chosen_backend
from .flags import Backend, BoundsName, Count, Number, UpName, asks_help, check_positive, check_within, flag_value
from .settings import ConfigArgs, parse_settings, resolve_device
from .startup import imports_kept, wake_gpu

if TYPE_CHECKING:
    from ..evaluation.run_folder import RunFolder


@dataclass(frozen=True)
class TrainArgs(ConfigArgs):
    """Train a radiance field and write a run folder: checkpoints, scores on unseen views, renders and a report. What is
    not given is as in the preset or, with --resume, in the run."""

    scene: Annotated[Positional[str | None], arg(metavar="DATA")] = None
    """A scene folder, a folder of photos, a video, or a built-in scene by name; the built-in default unless given."""
    config: Annotated[Path | None, arg(metavar="FILE")] = None
    """Take values from this file (of `nerfturbo tune` or a run) instead of a preset."""
    steps: Count = None  # Stop after this many steps; short for --train.steps.
    time_limit: Annotated[float | None, arg(metavar="SECONDS")] = None
    """Stop after this many seconds of training, whatever the preset's steps; short for --train.time-limit."""
    output: Annotated[Path | None, arg(metavar="FOLDER")] = None  # Run folder to write; runs/SCENE-TIME unless given.
    overwrite: bool = False  # Write into a folder that is not empty; only files of an earlier run are removed from it.
    resume: Annotated[Path | None, arg(metavar="RUN")] = None
    """Resume this run folder with its own config; give --steps or --time-limit to train longer."""
    seed: Count = None  # Seed of every random draw; short for --train.seed.
    on_instability: Literal["warn", "lower-lr", "stop"] | None = None
    """What to do where half precision keeps overflowing; short for --train.on-instability."""
    backend: Backend = "auto"
    trainer: Literal["native", "lightning"] = "native"  # Training loop: native, or PyTorch Lightning's (an extra).
    downscale: Count = None  # Divide width and height of every image by this; unless given, 1, on a CPU as time allows.
    allow_outside: bool = False  # Let a scene's files name images outside its folder.
    bounds: Annotated[BoundsName | None, arg(metavar="KIND")] = None
    """bounded (object) or unbounded (outdoor, 360); auto decides by images, cameras and points, in doubt by a trial."""
    up: Annotated[UpName | None, arg(metavar="AXIS")] = None
    """Axis of the scene that is up: x, y, z, -x, -y, -z or auto."""
    ndc: bool = False  # Bend a capture whose cameras all look one way into normalised device coordinates (NeRF paper).
    cache: Annotated[Literal["auto", "memory", "disk"] | None, arg(metavar="auto|memory|disk")] = None
    """Pixels in memory, or on disk in a memory-mapped file; auto takes the disk where memory is short."""
    pixels: Annotated[Literal["auto", "device", "host"] | None, arg(metavar="auto|device|host")] = None
    """Where pixels stay while a GPU trains; host: read through the bus; auto: host where the GPU cannot hold them."""
    eval_views: Count = None  # Score this many test views; unless given, what fits the training time.
    turntable: Annotated[int, arg(metavar="FRAMES")] = 36  # Frames of the video at the end; 0 leaves it out.
    save_every: Annotated[str | None, arg(metavar="TIME")] = None
    """Checkpoint interval: seconds (30s) or steps (500steps); unless given, 30s, more where saving takes over 3 s."""
    keep: Number = 2  # Checkpoints that stay: the newest N, and the one with the best preview.
    init_from: Annotated[str | None, arg(metavar="RUN")] = None
    """Begin from the trained field of this run; or of a checkpoint, safetensors file or zoo:NAME, with its grid."""
    init_parts: Annotated[tuple[str, ...], arg(metavar="PART")] = ()
    """Take over only these parts: encoding, density_net, color_net or grid (vanilla: trunk, color_head, ...)."""
    init_keep: Annotated[float | None, arg(metavar="SHARE")] = None
    """Share of the hash table's features to take over: 1 for the same scene, less for another; 0.6 unless given."""
    log: Annotated[tuple[Literal["tensorboard", "wandb"], ...], arg(metavar="LOGGER")] = ()
    """Also log curves and previews here, besides log.jsonl; TensorBoard's lie in RUN/tensorboard."""
    viewer: bool = False  # Serve the viewer while training, for this machine only; its address is printed.
    viewer_host: str = "127.0.0.1"  # Where it listens; beyond the loopback a token is asked for, part of the address.
    viewer_port: int = 7007  # Port of the viewer; 0 takes any that is free.
    json: bool = False  # Print the result as one JSON object on stdout.


@dataclass(frozen=True)
class Plan:
    """What is to be trained, where, and where it goes."""

    config: Config
    device: str
    output: Path | None  # None: named after the scene once that is open
    run: "RunFolder | None"  # the run to go on with
    args: TrainArgs
    auto: Config | None = None  # the preset's values, where the scene may choose another preset


def main(argv: Sequence[str]) -> int:
    if not asks_help(argv):
        wake_gpu(flag_value(argv, "--device"))
    with imports_kept():
        args, start = parse_settings(TrainArgs, argv, "train")
        plan = _plan(args, start)
        from .session import run_plan

    with chosen_backend(args.backend):
        return run_plan(plan)


def _plan(args: TrainArgs, start: Config) -> Plan:
    shortcuts = {"--steps": args.steps, "--time-limit": args.time_limit, "--downscale": args.downscale}
    check_positive(shortcuts | {"--eval-views": args.eval_views, "--keep": args.keep})
    parse_save_every(args.save_every)
    for flag, given in (("--init-parts", bool(args.init_parts)), ("--init-keep", args.init_keep is not None)):
        refuse(given and args.init_from is None, flag, "--init-from beside it", "none", "name the run to begin from")
    if args.init_keep is not None and not 0.0 < args.init_keep <= 1.0:
        raise InputError("--init-keep", "a number above 0, at most 1", f"{args.init_keep:g}", "1 takes all of it")
    if args.trainer == "lightning" and importlib.util.find_spec("lightning") is None:
        hint = "pip install 'nerfturbo[lightning]'"
        raise InputError("--trainer", "native", "lightning, which is not installed", hint)
    for logger in args.log:  # before a run is overwritten for it
        if importlib.util.find_spec(logger) is None:
            raise InputError("--log", "loggers whose packages are installed", logger, f"pip install {logger}")
    check_within("--viewer-port", args.viewer_port, 0, 65535)
    check_within("--turntable", args.turntable, 0)
    steps = NO_STEP_LIMIT if args.steps is None and args.time_limit is not None else args.steps
    given = {"steps": steps, "time_limit": args.time_limit, "seed": args.seed, "on_instability": args.on_instability}
    settings: Any = args.settings  # whose sections depend on the preset
    train = replace(settings.train, **{name: value for name, value in given.items() if value is not None})
    device, config = resolve_device(args.device), replace(settings, train=train).apply(start)
    if is_launched():
        from ..training.distributed import rank_device

        device = rank_device(device)
    chosen = {"downscale": args.downscale, "cache": args.cache, "pixels": args.pixels}
    data = replace(config.data, **{name: value for name, value in chosen.items() if value is not None})
    data = data.placed("ndc" if args.ndc else args.bounds, args.up)
    config = replace(config, data=data)
    if args.resume is not None:
        return Plan(config, device, args.resume, _run_to_resume(args, config), args)
    data = replace(data, source=args.scene or data.source, allow_outside=args.allow_outside or data.allow_outside)
    run, args = _run_after_restart(args)
    chosen_by_hand = args.config is not None or args.sampler is not None
    auto = start if args.preset == "auto" and not chosen_by_hand else None
    return Plan(replace(config, data=data), device, args.output, run, args, auto)


def is_launched() -> bool:
    """Whether torchrun started this process; asked before torch is imported."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_after_restart(args: TrainArgs) -> "tuple[RunFolder | None, TrainArgs]":
    """The run to go on with where torchrun has restarted this job, and whether its beginnings may be overwritten."""
    if not is_launched() or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None, args
    if args.output is None:
        raise InputError("--output", "a folder, because a restarted job must find its run again", "none")
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    if not any(int(os.environ.get(name, "0")) for name in counts):
        return None, args
    from ..evaluation.run_folder import open_run
    from ..training.checkpoint import list_checkpoints

    if list_checkpoints(args.output / "checkpoints"):
        return open_run(args.output), args
    return None, replace(args, overwrite=True)


def _run_to_resume(args: TrainArgs, config: Config) -> "RunFolder":
    from ..evaluation.run_folder import open_run
    from ..training.checkpoint import latest_checkpoint, read_state

    fixed = {"DATA": args.scene, "--output": args.output, "--downscale": args.downscale, "--seed": args.seed}
    fixed |= {"--init-from": args.init_from, "--config": args.config, "--field": args.field, "--sampler": args.sampler}
    fixed |= {"--bounds": args.bounds, "--ndc": args.ndc or None, "--up": args.up}
    fixed |= {"--preset": None if args.preset == "auto" else args.preset}
    for flag, value in fixed.items():
        refuse(value is not None, flag, "nothing beside --resume", repr(str(value)), "a run keeps its own")
    run = open_run(str(args.resume))
    state = read_state(latest_checkpoint(run.path))
    hint = f"train longer with a larger value, or score it again: nerfturbo eval {shlex.quote(str(args.resume))}"
    if state.step >= config.train.steps:
        raise InputError("--steps", f"more than the {state.step} steps of the run", str(config.train.steps), hint)
    limit = config.train.time_limit
    if limit is not None and state.train_seconds >= limit:
        raise InputError("--time-limit", f"more than the run's {state.train_seconds:.1f} s", f"{limit:g}", hint)
    return run


def parse_save_every(text: str | None) -> tuple[float, Literal["steps", "seconds"]]:
    """
    >>> parse_save_every("500steps"), parse_save_every("30s"), parse_save_every("0.5")
    ((500.0, 'steps'), (30.0, 'seconds'), (0.5, 'seconds'))
    """
    text = "30s" if text is None else text
    number, in_steps = text.strip().removesuffix("steps").removesuffix("s").strip(), text.strip().endswith("steps")
    with contextlib.suppress(ValueError, OverflowError):
        value = float(number)
        if value > 0.0 and (not in_steps or value == int(value)):
            return value, "steps" if in_steps else "seconds"
    raise InputError("--save-every", "seconds > 0 (30s) or whole steps > 0 (500steps)", repr(text))


def default_output(scene_name: str) -> Path:
    """runs/SCENE-TIME, with a counter behind where two runs begin in the same second."""
    stem = f"{scene_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{counter}" for counter in range(2, 100))]
    return next((path for name in names if not (path := Path("runs") / name).exists()), Path("runs") / stem)
