"""One training session: scene, kernels, loop, previews, checkpoints; then the scores."""

import contextlib
import math
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
from ..data.capture.photos import find_photos, photo_sizes
from ..data.scene import Scene, is_builtin
from ..data.scene_defaults import fitted_config
from ..data.speed import RAYS_A_SECOND, machine_speed
from ..errors import CheckpointError, DistributedError, InputError, NerfturboError, counted, is_out_of_memory
from ..evaluation.evaluate import Preview
from ..evaluation.run_folder import RunFolder, check_output, check_writable, claim, create_run, release_claims
from ..evaluation.trial import try_bounds
from ..presets import size_notes
from ..training import callbacks
from ..training.checkpoint import latest_checkpoint, list_checkpoints, read_state
from ..training.distributed import Team, join_team, launched_rank
from ..training.precision import resolve_precision
from ..training.step import StepRecord
from ..training.trainer import Trainer, TrainSummary
from .common import open_data, print_json
from .finish import finish, seconds_after
from .progress import Display, duration, showing, since_command
from .render import check_viewer, open_page
from .scene import find_poses
from .startup import compile_ahead, compile_note, compiling_early, starting_device, warm_up
from .train import Plan, TrainArgs, default_output, is_launched, parse_save_every

FIRST_PREVIEW_SECONDS = 6.0  # after the command, or
FIRST_PREVIEW_TRAINING = 2.0  # after this much training, whichever comes first
PLAN_TRAINING = 3.0  # seconds of training, which let expect the rest
PREVIEW_SECONDS = (2.0, 10.0)  # between previews, early and late: half of the training time so far, within these
PREVIEW_COST = 10.0  # and at least this many times what a preview takes
LOG_EVERY_STEPS = 10
STEP_RAYS = 512  # of a step on a CPU, where a preset says no less
PIXELS_A_RAY = 3.0  # images with more pixels for each ray of training show nothing more of the scene
LEAST_SIDE = 200  # of images that are made smaller for a CPU


def run_plan(plan: Plan) -> int:
    """Train and finish; returns the exit code."""
    if launched_rank() > 0:
        return _run(plan, Display())  # one process of several speaks and writes
    try:
        with showing() as display:
            return _run(plan, display)
    finally:
        release_claims()


def _run(plan: Plan, display: Display) -> int:
    plan, shrunk = shrunk_photos(plan)
    config, args, writes = plan.config, plan.args, launched_rank() == 0
    if writes and plan.run is None and plan.output is not None:
        check_output(plan.output, overwrite=args.overwrite, scene=config.data.source)
    elif writes:
        check_writable(Path("runs") if plan.run is None else plan.run.path)
    if writes and args.viewer:
        check_viewer(args.viewer_host, args.viewer_port)
    if config.train.time_limit is not None:
        display.note(compile_note(plan.device) + time_note(config.train.time_limit, args))
    display.phase(f"opening {config.data.source}")
    with starting_device(plan.device), compiling_early(plan.device, config.data.source) as helper:
        train_scene, test_scene = _open(plan, display)
        source = train_scene.source  # a folder's full path, so that a run finds its pictures again from anywhere
        source = source if is_builtin(source) or not Path(source).exists() else str(Path(source).resolve())
        config = replace(config, data=replace(config.data, source=source))
        doubt = train_scene.other is not None and plan.run is None and len(train_scene) >= 4
        if doubt and not is_launched():  # several processes would have to agree
            display.phase("trying it bounded and unbounded")
            extent, note = try_bounds(config, train_scene, auto=plan.auto, device=plan.device)
            train_scene, test_scene = train_scene.within(extent), test_scene.within(extent)
            config, shrunk = replace(config, data=config.data.placed(extent.kind)), (*shrunk, note)
        config, fitted = fitted_config(config, train_scene, auto=plan.auto)
        for note in (*train_scene.notes, *shrunk, *fitted, *size_notes(config, plan.device)):
            display.note(note)
        display.note(choice_note(config, train_scene))
        team = join_team(plan.device, compression=config.train.compress_gradients)
        backend = _warm_up_in_turn(team, lambda: warm_up(config, train_scene, plan.device, display, helper))
    display.phase("preparing the model")
    trainer = Trainer(config, train_scene, device=plan.device, team=team)
    trainer.test_scene = test_scene
    if trainer.device.type == "cuda" or trainer.pixels.on_host:
        display.note(trainer.pixels.note)
    preview = Preview(test_scene, len(test_scene) // 2)
    compile_ahead(trainer, preview, display)
    _try_field(trainer)
    if not writes:
        return _follow(trainer, args)
    session = Session(trainer, _begin(plan, trainer, display), display, preview, args)
    views = f"{counted(len(train_scene), 'training view')}, {counted(len(test_scene), 'test view')}"
    size = "{} x {}".format(*train_scene.cameras.size[0].tolist())
    display.note(f"{train_scene.name}: {views} ({test_scene.split}), {size}; writing {session.run.path}")
    if team.world > 1:
        display.note(f"{team.world} processes train together")
    if args.viewer:
        _open_viewer(session, (train_scene, test_scene))
    summary = None
    try:
        summary = session.train()
        team.close()
        if not session.interrupted:
            return finish(session, summary, test_scene, backend)
    except KeyboardInterrupt:
        pass
    except DistributedError as error:
        found = list_checkpoints(session.run.checkpoints)
        last = f"the last one is {found[-1]}" if found else "there is none yet"
        raise DistributedError(f"{error}; {last}") from error
    return _say_how_to_go_on(session, summary)


def _begin(plan: Plan, trainer: Trainer, display: Display) -> RunFolder:
    """The run's folder, with the trainer where it goes on from: another field, a checkpoint, or nothing."""
    if plan.args.init_from is not None:
        from ..training.warm_start import KEEP

        keep = KEEP if plan.args.init_keep is None else plan.args.init_keep
        try:
            taken = trainer.warm_start(plan.args.init_from, plan.args.init_parts, keep=keep)
        except InputError as error:
            flags = {"parts": "--init-parts"}  # the library's name is not the user's
            raise InputError(flags.get(error.what, error.what), error.expected, error.got, error.hint) from None
        display.note(f"begins from {taken.source}: {', '.join(taken.parts)} ({taken.n_parameters} parameters)")
    if plan.run is not None:
        claim(plan.run.path)
        trainer.resume(latest_checkpoint(plan.run.path))
        plan.run.write_config(trainer.config)
        return plan.run
    output = plan.output or default_output(trainer.scene.name)
    check_writable(output, (plan.args.keep + 1) * trainer.state_bytes)
    claim(output)
    run = create_run(output, trainer.config, overwrite=plan.args.overwrite)
    claim(output)  # a new one
    return run


def _warm_up_in_turn(team: Team, warm: Callable[[], str]) -> str:
    """The first process of a machine compiles, the others then find its cache."""
    backend = warm() if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None
    team.agree(False)
    return backend or warm()


def _fit(trainer: Trainer, args: TrainArgs) -> TrainSummary:
    if args.trainer == "native":
        return trainer.fit()
    from ..training.lightning import fit_with_lightning

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
        find_poses(data.source, display, wait=launched_rank() > 0, allow_outside=data.allow_outside)
    return open_data(data, lambda done, total: display.update(done / total))


def _try_field(trainer: Trainer) -> None:
    """Evaluate a point, so that a setting no kernel can run is refused before anything is written."""
    # Many points for one: a count of 1 would be compiled for itself.
    positions = torch.tensor([trainer.model.bounds.aabb.center], device=trainer.device).repeat(128, 1)
    with torch.no_grad():
        trainer.model.field(positions, torch.tensor([[0.0, 0.0, 1.0]], device=trainer.device).repeat(128, 1))


def choice_note(config: Config, scene: Scene) -> str:
    """What a scene is trained with, in one line, whoever chose it."""
    low, high = scene.aabb.low, scene.aabb.high
    box = " x ".join(f"{b - a:.3g}" for a, b in zip(low, high, strict=True))
    levels = f"{config.grid.levels} grid level{'s' if config.grid.levels > 1 else ''}"
    behind = {"random": "random colours", "white": "white", "black": "black"}[config.train.background]
    background = f"{behind} behind what is transparent" if scene.has_alpha else "as photographed"
    reach = f"box of {box}, near {scene.near:.3g}, far {scene.far:.3g}"
    return f"preset {config.preset}; {reach}, {levels}; background: {background}"


def shrunk_photos(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """On a CPU, photos as large as the rays of training can learn, and a line about it; chosen sizes stay."""
    config, path = plan.config, Path(plan.config.data.source).expanduser()
    chosen = plan.args.downscale or plan.args.config or plan.run or config.data.downscale > 1 or is_launched()
    sizes = [] if chosen or not plan.device.startswith("cpu") else photo_sizes(find_photos(path))
    if not sizes:
        return plan, ()
    pixels, side, rays = sum(w * h for w, h in sizes), min(map(min, sizes)), config.train.steps * STEP_RAYS
    if config.train.time_limit is not None:
        rays = min(rays, config.train.time_limit * RAYS_A_SECOND * machine_speed())
    divisor = min(math.ceil((pixels / (PIXELS_A_RAY * rays)) ** 0.5), side // LEAST_SIDE)
    if divisor < 2:
        return plan, ()
    (width, height), data = sizes[0], replace(config.data, downscale=divisor)
    shrunk = f"{round(width / divisor)} x {round(height / divisor)}"  # as images and cameras are rounded
    note = f"photos shrunk from {width} x {height} to {shrunk}: this CPU learns no more"
    return replace(plan, config=replace(config, data=data)), (f"{note} in that time (--downscale 1 keeps them)",)


def time_note(training: float, args: TrainArgs) -> str:
    """How long a run takes from here on; without a limit, as its first seconds of training let expect."""
    scoring, video = (f"at most {duration(seconds)}" for seconds in seconds_after(training))
    after = f"{scoring} of scoring" if args.eval_views is None else f"{counted(args.eval_views, 'view')} to score"
    after += f" and {video} of video" if args.turntable else ""
    return f"about {duration(training)} of training, then {after}"


def _open_viewer(session: "Session", scenes: tuple[Scene, Scene]) -> None:
    """Serve the live page, painted between steps, until the process ends."""
    from ..viewer.page import ViewedTraining

    trainer, run, args = session.trainer, session.run, session.args
    page = open_page(run, trainer.model, scenes, host=args.viewer_host, port=args.viewer_port, trains=True)
    trainer.callbacks.append(ViewedTraining(page, session.log, run.checkpoints))
    session.display.note(f"viewer: {page.url}")


class Session:
    """The loop with everything that hangs on it."""

    def __init__(self, trainer: Trainer, run: RunFolder, display: Display, preview: Preview, args: TrainArgs) -> None:
        self.trainer, self.run, self.display, self.preview, self.args = trainer, run, display, preview, args
        self.log = callbacks.MetricsLog(run.log_file, every_steps=LOG_EVERY_STEPS)
        self.interrupted = False
        self.last: StepRecord | None = None
        self.first_seconds = trainer.train_seconds
        self._next_preview: float | None = None
        self._plan_is_due = trainer.config.train.time_limit is None  # a limit is a plan
        self._last_score: tuple[int, float] | None = None  # step, PSNR

    def train(self) -> TrainSummary:
        """Until the end or an interrupt; the last checkpoint is written either way."""
        trainer, run, args, log = self.trainer, self.run, self.args, self.log
        log.records = run.trim_log(trainer.step)
        if "tensorboard" in args.log:
            log.loggers.append(callbacks.tensorboard_logger(run.path / "tensorboard"))
        if "wandb" in args.log:
            log.loggers.append(callbacks.wandb_logger(run.path.name, to_dict(trainer.config)))
        log.monitor = trainer.monitor = callbacks.open_monitor(trainer.device)
        log.start(trainer)
        save = callbacks.save_checkpoints(run.checkpoints, keep=args.keep, score=self._score)
        due, unit = parse_save_every(args.save_every)
        pause = callbacks.SELDOM if args.save_every is None else 0.0  # large fields take seconds to write
        saving = callbacks.every(int(due), save) if unit == "steps" else callbacks.every_seconds(due, save, pause=pause)
        precision = resolve_precision(trainer.config.train.precision, trainer.device)
        if precision != "fp32" and trainer.device.type == "cpu":
            self.display.note(f"{precision} on a CPU: many times slower than fp32, whose units this processor has")
        trainer.guard.report = log.add_event
        trainer.callbacks += [log, self._look, self._show]
        # Not at the last step: a kill before cells are culled would leave a run that is over and yet has them.
        trainer.callbacks.append(lambda trainer, step: None if trainer.progress >= 1.0 else saving(trainer, step))
        self.display.phase("preparing the step")  # on a GPU: recording the graph
        trainer.stepper.prepare()
        self.display.phase("training")
        with _interrupts(self._stop):
            try:
                summary = _fit(trainer, args)
            except (RuntimeError, MemoryError) as error:
                raise self._short_of_memory(error) from error
            if summary.stopped_by == "interrupted":  # inside a step: its state is half old, half new, and not saved
                raise KeyboardInterrupt
            if self._saved_step() != trainer.step or trainer.culled_fraction > 0.0:  # saved before cells were culled
                self._save_last()
        return summary

    def _save_last(self) -> None:
        with self.trainer.clock_stopped():
            score = self._score(self.trainer)
        try:
            self.trainer.save(self.run.checkpoints, score=score, keep=self.args.keep)
        except CheckpointError as error:
            saved = self._saved_step()
            hint = "" if saved is None else f"; free some space and go on from step {saved} by --resume {self.run.path}"
            raise CheckpointError(f"{error}{hint}") from error

    def _short_of_memory(self, error: RuntimeError | MemoryError) -> NerfturboError:
        """Memory ran out in a step, before it changed the weights: they are saved, to go on with smaller steps."""
        if isinstance(error, NerfturboError) or not is_out_of_memory(error):
            raise error
        trainer, reason = self.trainer, str(error).partition("\n")[0] or type(error).__name__
        saved = trainer.save(self.run.checkpoints, keep=self.args.keep)
        flags = f"--resume {shlex.quote(str(self.run.path))} --train.batch-samples"
        less = f"nerfturbo train {flags} {max(1, trainer.config.train.batch_samples // 2)}"
        short = f"memory: expected enough for a step, ran out after step {trainer.step} ({reason})"
        return NerfturboError(f"{short}; {saved} is saved, go on with smaller batches: {less}")

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

    def _show(self, trainer: Trainer, record: StepRecord) -> None:
        self.last = record
        if self._plan_is_due and trainer.train_seconds - self.first_seconds > PLAN_TRAINING:
            self._plan_is_due = False
            self.display.note(time_note(trainer.train_seconds / max(trainer.progress, 1e-6), self.args))
        steps = (entry for entry in reversed(self.log.records) if entry["kind"] == "step")
        self.display.update(trainer.progress, record=next(steps, None))

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
        return value


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends training after the step in hand; the second one acts at once."""

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        stop()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore()


def _say_how_to_go_on(session: Session, summary: TrainSummary | None) -> int:
    """After an interrupt. Without a summary it was the second: what was trained since the last checkpoint is lost."""
    run, args = session.run, session.args
    session.display.close()
    trained = summary is not None and summary.stopped_by in ("steps", "time limit", "target psnr")
    words = ["nerfturbo", "eval", str(run.path)] if trained else ["nerfturbo", "train", "--resume", str(run.path)]
    for flag, value in (("--device", args.device), ("--backend", args.backend)):  # no part of the run's config
        words += [flag, value] if value != "auto" else []
    command, found = shlex.join(words), list_checkpoints(run.checkpoints)
    if summary is None:
        where = f"the last checkpoint is {found[-1]}; resume with: {command}" if found else "there is no checkpoint yet"
        print(f"stopped at once; {where}", file=sys.stderr)
        return 130
    print(f"interrupted at step {summary.steps}; checkpoint saved in {found[-1]}", file=sys.stderr)
    print(f"{'score it with' if trained else 'resume with'}: {command}", file=sys.stderr)
    if args.json:
        print_json({"run": str(run.path), "interrupted": True, "steps": summary.steps, "go_on_with": command})
    return 130
