"""One training session: scene, kernels, loop, previews, checkpoints; then the scores."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from ..config import Config, to_dict
from ..data.cameras import Cameras
from ..data.fitting import fitted_config
from ..data.loading import LoadOptions, loading
from ..data.scene import Scene, is_builtin
from ..errors import CheckpointError, DistributedError, InputError
from ..evaluation.evaluate import Preview, choose_views
from ..evaluation.run_folder import RunFolder, check_output, create_run
from ..presets import size_notes
from ..training.callbacks import MetricsLog, every, every_seconds, save_checkpoints
from ..training.checkpoint import latest_checkpoint, list_checkpoints, read_state
from ..training.distributed import Team, join_team, launched_rank
from ..training.loggers import Logger, tensorboard_logger, wandb_logger
from ..training.monitor import open_monitor
from ..training.precision import resolve_precision
from ..training.stability import StabilityGuard
from ..training.step import StepRecord
from ..training.trainer import Trainer, TrainSummary
from .common import open_scenes
from .finish import Finished, finish
from .process import find_poses
from .progress import Display, showing, since_command
from .startup import compile_ahead, compiling_early, import_meanwhile, starting_device, warm_up
from .train import Plan, TrainArgs, default_output, parse_save_every
from .view import check_viewer, open_page

FIRST_PREVIEW_SECONDS = 6.0  # after the command, or
FIRST_PREVIEW_TRAINING = 2.0  # after this much training, whichever comes first
PREVIEW_SECONDS = (2.0, 10.0)  # between previews, early and late: half of the training time so far, within these
PREVIEW_COST = 10.0  # and at least this many times what a preview takes
LOG_EVERY_STEPS = 10
PIXELS_A_SECOND = {"grid": 50_000.0}  # of two cores that render a trained scene: benchmarks/results/cpu/scenes.json
WITHOUT_A_GRID = 7_000.0
PATIENCE = 900.0  # seconds of scoring that nobody is warned of
DOWNSCALES = (2, 4, 8, 16)


def run_plan(plan: Plan) -> int:
    """Train and finish; returns the exit code."""
    if launched_rank() > 0:
        return _run(plan, Display())  # one process of several speaks and writes
    with showing() as display:
        return _run(plan, display)


def _run(plan: Plan, display: Display) -> int:
    writes = launched_rank() == 0
    _check_first(plan, writes)
    config = plan.config
    display.phase(f"opening {config.data.source}")
    with starting_device(plan.device), compiling_early(plan.device, config.data.source) as helper:
        train_scene, test_scene = _open(plan, display)
        config = replace(config, data=replace(config.data, source=_absolute(train_scene.source)))
        config, fitted = fitted_config(config, train_scene, auto=plan.auto)
        slow = scoring_notes(test_scene.cameras, plan.args.eval_views, config, plan.device)
        for note in (*train_scene.notes, *fitted, *size_notes(config, plan.device), *slow):
            display.note(note)
        display.note(choice_note(config, train_scene))
        team = join_team(plan.device, compression=config.train.compress_gradients)
        backend = _warm_up_in_turn(team, lambda: warm_up(config, train_scene, plan.device, display, helper))
    display.phase("preparing the model")
    trainer = Trainer(config, train_scene, device=plan.device, team=team)
    if trainer.device.type == "cuda" or trainer.sampler.on_host:
        display.note(trainer.sampler.note)
    preview = Preview(test_scene, len(test_scene) // 2)
    compile_ahead(trainer, preview, display)
    _try_field(trainer)
    if not writes:
        return _follow(trainer, plan.args)
    run = _begin(plan, trainer, display)
    display.note(f"{_counts(train_scene, test_scene)}; writing {run.path}")
    if team.world > 1:
        display.note(f"{team.world} processes train together")

    session = Session(trainer, run, display, preview)
    _open_viewer(session, (train_scene, test_scene), plan.args)
    try:
        summary = session.train(plan.args)
    except KeyboardInterrupt:
        return _say_stopped_at_once(plan, run, display)
    except DistributedError as error:
        found = list_checkpoints(run.checkpoints)
        last = f"the last one is {found[-1]}" if found else "there is none yet"
        raise DistributedError(f"{error}; {last}") from error
    team.close()
    if session.interrupted:
        return _say_how_to_go_on(plan, run, summary, display)
    done = Finished(
        run=run,
        trainer=trainer,
        summary=summary,
        test_scene=test_scene,
        last=session.last,
        first_seconds=session.first_seconds,
        backend=backend,
    )
    try:
        return finish(done, display, plan.args)
    except KeyboardInterrupt:
        return _say_how_to_go_on(plan, run, summary, display)


def _begin(plan: Plan, trainer: Trainer, display: Display) -> RunFolder:
    """The run's folder, with the trainer where it goes on from: another field, a checkpoint, or nothing."""
    if plan.args.init_from is not None:
        from ..training.initialise import KEEP

        keep = KEEP if plan.args.init_keep is None else plan.args.init_keep
        try:
            taken = trainer.initialise(plan.args.init_from, plan.args.init_parts, keep=keep)
        except InputError as error:
            flags = {"parts": "--init-parts"}  # the library's name is not the user's
            raise InputError(flags.get(error.what, error.what), error.expected, error.got, error.hint) from None
        display.note(f"begins from {taken.source}: {', '.join(taken.parts)} ({taken.n_parameters} parameters)")
    if plan.run is not None:
        trainer.resume(latest_checkpoint(plan.run.path))
        plan.run.write_config(trainer.config)
        return plan.run
    output = plan.output or default_output(trainer.scene.name)
    return create_run(output, trainer.config, overwrite=plan.args.overwrite)


def _check_first(plan: Plan, writes: bool) -> None:
    """Refuse what could not be written or served, before any work is done; the process that writes does so."""
    if not writes:
        return
    if plan.run is None and plan.output is not None:
        check_output(plan.output, overwrite=plan.args.overwrite)
    if plan.args.viewer:
        check_viewer(plan.args.viewer_host, plan.args.viewer_port)


def _warm_up_in_turn(team: Team, warm: Callable[[], str]) -> str:
    """The first process of a machine compiles, the others then find its cache."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if first:
        backend = warm()
    team.agree(False)
    return backend if first else warm()


def _fit(trainer: Trainer, args: TrainArgs) -> TrainSummary:
    if args.trainer == "native":
        return trainer.fit()
    from ..training.lightning_run import fit_with_lightning

    return fit_with_lightning(trainer)


def _follow(trainer: Trainer, args: TrainArgs) -> int:
    """Any rank but the first: train, write nothing."""
    stopped: list[bool] = []

    def stop() -> None:
        trainer.should_stop = True
        stopped.append(True)

    trainer.stepper.prepare()  # as the first rank does: its collectives meet these
    with _interrupts(stop):
        summary = _fit(trainer, args)
    trainer.team.close()
    return 130 if stopped or summary.stopped_by == "interrupted" else 0


def _open(plan: Plan, display: Display) -> tuple[Scene, Scene]:
    """Training and test views. Photos get their poses first; a run to go on with belongs to those it began with."""
    data = plan.config.data
    if plan.run is None:
        find_poses(data.source, display, wait=launched_rank() > 0)
    with loading(LoadOptions(data.cache, lambda done, total: display.update(done / total))):
        return open_scenes(
            data.source, data.downscale, allow_outside=data.allow_outside, bounds=data.bounds, ndc=data.ndc
        )


def _try_field(trainer: Trainer) -> None:
    """Evaluate a point, so that a setting no kernel can run is refused before anything is written."""
    # Many points for one: a count of 1 would be compiled for itself.
    positions = torch.tensor([trainer.model.bounds.aabb.center], device=trainer.device).repeat(128, 1)
    with torch.no_grad():
        trainer.model.field(positions, torch.tensor([[0.0, 0.0, 1.0]], device=trainer.device).repeat(128, 1))


def _absolute(source: str) -> str:
    """A folder's full path, so that a run finds its pictures again from anywhere; names of scenes stay."""
    return source if is_builtin(source) or not Path(source).exists() else str(Path(source).resolve())


def choice_note(config: Config, scene: Scene) -> str:
    """What a scene is trained with, in one line, whoever chose it."""
    low, high = scene.aabb.low, scene.aabb.high
    box = " x ".join(f"{b - a:.3g}" for a, b in zip(low, high, strict=True))
    levels = f"{config.grid.levels} grid level{'s' if config.grid.levels > 1 else ''}"
    behind = {"random": "random colours", "white": "white", "black": "black"}[config.train.background]
    background = f"{behind} behind what is transparent" if scene.has_alpha else "as photographed"
    reach = f"box of {box}, near {scene.near:.3g}, far {scene.far:.3g}"
    return f"preset {config.preset}; {reach}, {levels}; background: {background}"


def scoring_notes(cameras: Cameras, limit: int | None, config: Config, device: str) -> tuple[str, ...]:
    """A warning where scoring these test views takes a CPU long, with the first smaller size that does not."""
    if not device.startswith("cpu"):
        return ()
    sizes = cameras.size[torch.tensor(choose_views(len(cameras), limit))].long()
    rate = PIXELS_A_SECOND.get(config.sampling.kind, WITHOUT_A_GRID)
    seconds = int(sizes.prod(-1).sum()) * config.render.eval_rays**2 / rate
    if seconds <= PATIENCE:
        return ()
    divisor = next((n for n in DOWNSCALES if seconds / n**2 <= PATIENCE), DOWNSCALES[-1])
    width, height = sizes[0].tolist()
    took = f"{seconds / 60:.0f} minutes" if seconds < 5400.0 else f"{seconds / 3600:.0f} hours"
    what = f"{len(sizes)} test views of {width} x {height}"
    return (f"warning: scoring {what} will take a CPU about {took}: --downscale {divisor}, or fewer --eval-views",)


def _counts(train: Scene, test: Scene) -> str:
    width, height = train.cameras.size[0].tolist()
    return f"{train.name}: {len(train)} training views, {len(test)} test views ({test.split}), {width} x {height}"


def _open_viewer(session: Session, scenes: tuple[Scene, Scene], args: TrainArgs) -> None:
    """Serve the live page, where one is asked for, painted between steps, until the process ends."""
    if not args.viewer:
        return
    from ..viewer.page import ViewedTraining

    model, run = session.trainer.model, session.run
    page = open_page(run, model, scenes, host=args.viewer_host, port=args.viewer_port, trains=True)
    session.trainer.callbacks.append(ViewedTraining(page, session.log, run.checkpoints))
    session.display.note(f"live page: {page.url}")


class Session:
    """The loop with everything that hangs on it."""

    def __init__(self, trainer: Trainer, run: RunFolder, display: Display, preview: Preview) -> None:
        self.trainer, self.run, self.display, self.preview = trainer, run, display, preview
        self.log = MetricsLog(run.log_file, every_steps=LOG_EVERY_STEPS)
        self.interrupted = False
        self.last: StepRecord | None = None
        self.first_seconds = trainer.train_seconds
        self._next_preview: float | None = None
        self._last_score: tuple[int, float] | None = None  # step, PSNR

    def train(self, args: TrainArgs) -> TrainSummary:
        """Until the end or an interrupt; the last checkpoint is written either way."""
        self.log.records = self.run.trim_log(self.trainer.step)
        self.log.loggers += _loggers(args, self.run, self.trainer)
        self.log.monitor = open_monitor(self.trainer.device)
        self.log.start(self.trainer)
        save = save_checkpoints(self.run.checkpoints, keep=args.keep, score=self._score)
        due = parse_save_every(args.save_every)
        saving = every(due.steps, save) if due.steps is not None else every_seconds(due.seconds or 0.0, save)
        precision = resolve_precision(self.trainer.config.train.precision, self.trainer.device)
        if precision != "fp32" and self.trainer.device.type == "cpu":
            self.display.note(f"{precision} on a CPU: many times slower than fp32, whose units this processor has")
        guard = StabilityGuard(precision, report=self.log.add_event)  # before saving: what is hopeless is not saved
        self.trainer.callbacks += [self._keep, self.log, guard, self._look, self._show, saving]
        self.display.phase("preparing the step")  # on a GPU: recording the graph
        self.trainer.stepper.prepare()
        self.display.phase("training")
        # Seconds, before scores are computed.
        with _interrupts(self._stop), import_meanwhile(self.trainer.device, "torchmetrics.functional.image"):
            summary = _fit(self.trainer, args)
            if summary.stopped_by == "interrupted":  # inside a step: its state is half old, half new, and not saved
                raise KeyboardInterrupt
            if self._saved_step() != self.trainer.step:
                self._save_last(args)
        return summary

    def _save_last(self, args: TrainArgs) -> None:
        with self.trainer.clock_stopped():
            score = self._score(self.trainer)
        try:
            self.trainer.save(self.run.checkpoints, score=score, keep=args.keep)
        except CheckpointError as error:
            saved = self._saved_step()
            hint = "" if saved is None else f"; free some space and go on from step {saved} by --resume {self.run.path}"
            raise CheckpointError(f"{error}{hint}") from error

    def _score(self, trainer: Trainer) -> float | None:
        """The preview's PSNR at this step, which decides which checkpoint is the best."""
        if self._last_score is None or self._last_score[0] != trainer.step:
            self._render_preview(trainer)
        return None if self._last_score is None else self._last_score[1]

    def _saved_step(self) -> int | None:
        found = list_checkpoints(self.run.checkpoints)
        return read_state(found[-1]).step if found else None

    def _stop(self) -> None:
        # Called inside a signal handler, where printing could meet a print in progress.
        self.interrupted = self.trainer.should_stop = True

    def _keep(self, trainer: Trainer, record: StepRecord) -> None:
        self.last = record

    def _show(self, trainer: Trainer, record: StepRecord) -> None:
        done = trainer.progress
        spent = trainer.train_seconds
        eta = spent * (1.0 - done) / done if done > 0.0 and spent > 1.0 else None
        steps = (entry for entry in reversed(self.log.records) if entry["kind"] == "step")
        self.display.update(done, eta=eta, record=next(steps, None))

    def _look(self, trainer: Trainer, record: StepRecord) -> None:
        due, first = self._next_preview, self._next_preview is None
        trained = trainer.train_seconds - self.first_seconds
        early = trained < FIRST_PREVIEW_TRAINING and since_command() < FIRST_PREVIEW_SECONDS
        if early if due is None else time.monotonic() < due:
            return
        begun = time.monotonic()
        with trainer.clock_stopped():
            value = self._render_preview(trainer)
        if first and value is not None:
            where = f"{self.run.preview_file} ({value:.1f} dB)"
            self.display.note(f"first preview after {since_command():.1f} s: {where}")
        now = time.monotonic()
        pause = min(max(0.5 * trainer.train_seconds, PREVIEW_SECONDS[0]), PREVIEW_SECONDS[1])
        self._next_preview = now + max(pause, PREVIEW_COST * (now - begun))

    def _render_preview(self, trainer: Trainer) -> float | None:
        """The preview's PSNR; None where its file cannot be written, which is said and does not end training."""
        try:
            with trainer.optimizer.averaged():
                value = self.preview.render(trainer.model, self.run.preview_file)
        except OSError as error:
            self.display.note(f"{self.run.preview_file}: cannot be written ({error.strerror or error})")
            return None
        self._last_score = (trainer.step, value)
        self.log.add_preview(trainer, value, self.run.preview_file)
        target = trainer.config.train.target_psnr
        if target is not None and value >= target and not trainer.should_stop:
            self.display.note(f"step {trainer.step}: the preview reached {value:.2f} dB, the target is {target:g}")
            trainer.stop("target psnr")
        return value


def _loggers(args: TrainArgs, run: RunFolder, trainer: Trainer) -> list[Logger]:
    """What `--log` asks for."""
    made: list[Logger] = []
    if "tensorboard" in args.log:
        made.append(tensorboard_logger(run.path / "tensorboard"))
    if "wandb" in args.log:
        made.append(wandb_logger(run.path.name, to_dict(trainer.config)))
    return made


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends training after the step in hand; the second one acts at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        stop()

    count = 0
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def go_on_command(plan: Plan, run: Path, *, trained: bool) -> str:
    """What to type to go on, the flags that are not part of the run's config included."""
    command = ["nerfturbo", "eval", str(run)] if trained else ["nerfturbo", "train", "--resume", str(run)]
    for flag, value in (("--device", plan.args.device), ("--backend", plan.args.backend)):
        command += [flag, value] if value != "auto" else []
    return shlex.join(command)


def _say_stopped_at_once(plan: Plan, run: RunFolder, display: Display) -> int:
    """After a second Ctrl-C: the step in hand is lost, and with it everything since the last checkpoint."""
    display.close()
    found = list_checkpoints(run.checkpoints)
    command = go_on_command(plan, run.path, trained=False)
    where = f"the last checkpoint is {found[-1]}; resume with: {command}" if found else "there is no checkpoint yet"
    print(f"stopped at once; {where}", file=sys.stderr)
    return 130


def _say_how_to_go_on(plan: Plan, run: RunFolder, summary: TrainSummary, display: Display) -> int:
    display.close()
    trained = summary.stopped_by in ("steps", "time limit", "target psnr")
    command = go_on_command(plan, run.path, trained=trained)
    checkpoint = latest_checkpoint(run.path)
    print(f"interrupted at step {summary.steps}; checkpoint saved in {checkpoint}", file=sys.stderr)
    print(f"{'score it with' if trained else 'resume with'}: {command}", file=sys.stderr)
    if plan.args.json:
        print(json.dumps({"run": str(run.path), "interrupted": True, "steps": summary.steps, "go_on_with": command}))
    return 130
