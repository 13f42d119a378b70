"""The native loop: visible, short, and yours to copy."""

import inspect
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..config import NO_STEP_LIMIT, Config, check_code, from_dict, to_dict
from ..data.batches import PixelSampler
from ..data.cameras import PIXEL_RADIUS
from ..data.keypoints import TRAINED_PHOTOS, load_keypoints
from ..data.pool_file import check_memory
from ..data.scene import Scene, downscaled
from ..data.scene_defaults import fitted_config
from ..errors import InputError
from ..fields.field import Carry, offers, read_halves
from ..presets import preset
from ..rendering.model import NerfModel, SceneBounds
from ..sampling.grid import Frusta
from . import refine
from .callbacks import GpuMonitor, open_monitor, rank_usage, seldom, stop_at_psnr, view_psnr
from .checkpoint import KEEP, CheckpointState, load_tensors, read_state, save_checkpoint, unpacked
from .distributed import Team
from .graph import DeviceStep
from .loss import Stages
from .optim import Optimizer, learning_rate
from .precision import half_dtype, resolve_precision
from .stability import StabilityGuard
from .step import StepRecord, TrainingStep
from .warm_start import WarmStart, warm_start

COARSE_DOWNSCALE = 4  # how much smaller the images of `train.coarse_fraction` are in width and height
SAMPLE_BYTES = 64  # that a sample of a step takes at least: place, interval, density, colour, and their gradients
LOOK_EVERY = 0.25  # seconds between looks at a time limit, which is passed by twice as much at most
Callback = Callable[["Trainer", StepRecord], None]
Stop = Literal["steps", "time limit", "interrupted", "callback", "target psnr"]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSummary:
    """How training ended."""

    steps: int
    train_seconds: float
    rays: int
    samples: int
    stopped_by: Stop
    skipped: int = 0  # of the steps, those without an update because a gradient was not finite
    ranks: tuple[dict[str, float | None], ...] = ()  # what each process spent its time on (`callbacks.rank_usage`)


class ChunkSize:
    """How many steps to queue at once where a clock ends training; a GPU has always one chunk queued behind another."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, float]] = []  # step and seconds at the start of the last ones
        self.step_seconds = 0.0

    def steps_at_once(self, step: int, seconds: float) -> int:
        """The most steps to queue now, at `step` and after so many `seconds` of training; at least one."""
        self._chunks.append((step, seconds))
        if len(self._chunks) == 2:  # the very first chunk is waited for, so that the second is all that was queued
            (first, before), _ = self._chunks
            self._measure(step - first, seconds - before)
        elif len(self._chunks) == 4:
            del self._chunks[0]
            (first, _), (second, before), _ = self._chunks
            self._measure(second - first, seconds - before)
        return NO_STEP_LIMIT if self.step_seconds == 0.0 else max(1, int(LOOK_EVERY / self.step_seconds))

    def _measure(self, steps: int, seconds: float) -> None:
        if steps > 0:  # else a checkpoint was loaded in between
            self.step_seconds = max(0.0, seconds / steps)


def mark_unseen_cells(model: NerfModel, scene: Scene) -> float:
    """Give up the cells of the grid that no camera sees; returns their share. To be done before training. A field that
    knows how wide a pixel is learns a typical one."""
    if offers(model.field, "set_footprint"):
        cameras, middle = scene.cameras, torch.tensor(scene.aabb.low) * 0.5 + torch.tensor(scene.aabb.high) * 0.5
        distance = torch.linalg.vector_norm(cameras.positions.cpu() - middle, dim=-1)
        model.field.set_footprint(float((distance * PIXEL_RADIUS / cameras.focal.cpu().prod(-1).sqrt()).median()))
    if (seen := scene.cameras.enclosing_pinholes()) is None or not model.config.grid.enabled:
        return 0.0
    seen = seen.to(model.device)
    frusta = Frusta(seen.camera_to_world, seen.focal, seen.center, seen.size)
    if offers(model.sampler, "mark_invisible"):
        model.sampler.mark_invisible(frusta, scene.near)
    return model.grid.mark_invisible(frusta, scene.near)


class Trainer:
    """Trains one model on one scene. `callbacks` run after the steps; the clock counts training only. `field` is any
    nn.Module with `density` and `forward` (`nerfturbo.fields.field`), `sampler` any object with `sample`
    (`nerfturbo.sampling.sampler`): they take the place of the config's, which records where they come from. `stages`
    replaces parts of the step by functions of your own. `trainer.test_scene` has the view for `train.target_psnr`. In a
    `team` every process makes a trainer over the same config and scene and calls `fit`; callbacks and saving are for
    rank 0. Training that is no longer finite ends with `UnstableError`, whatever the callbacks."""

    def __init__(
        self,
        config: Config,
        scene: Scene,
        *,
        field: nn.Module | None = None,
        sampler: Any = None,
        device: torch.device | str = "cpu",
        callbacks: Sequence[Callback] = (),
        stages: Stages | None = None,
        team: Team | None = None,
    ) -> None:
        self.scene, self.device, self.team = scene, torch.device(device), team or Team()
        self.model = NerfModel(config, SceneBounds.of(scene), field=field, sampler=sampler)
        # Gradients (in a checkpoint the weights), two means of them, and the mean of the weights where one is kept.
        self.state_bytes = (3 + (config.optim.ema_decay > 0.0)) * sum(v.nbytes for v in self.model.parameters())
        needed = self.state_bytes + SAMPLE_BYTES * config.train.batch_samples
        check_memory("training", needed, "use smaller tables and batches, field.* and train.*", self.device)
        self.model.to(self.device)
        if hasattr(self.model.sampler, "to"):
            self.model.sampler.to(self.device)
        self.config = config = self.model.config
        if self.model.photos is not None:
            self.model.photos.observe(scene.cameras, scene.aabb)
        if config.loss.depth > 0.0:
            self.model.keypoints = load_keypoints(scene, min_photos=TRAINED_PHOTOS).to(self.device)
        train = config.train
        radii = offers(self.model.field, "set_footprint")
        self._full_pixels = PixelSampler(scene, self.device, train.seed, pixels=config.data.pixels, radii=radii)
        self._coarse_pixels: PixelSampler | None = None
        if train.coarse_fraction > 0.0:
            small = downscaled(scene, COARSE_DOWNSCALE)
            self._coarse_pixels = PixelSampler(small, self.device, train.seed, radii=radii)
        self.pixels = self._coarse_pixels or self._full_pixels
        self.optimizer = Optimizer(self.model, config.optim, half_dtype=half_dtype(config, self.device))
        self.stepper = self._make_stepper(stages)
        self.callbacks = list(callbacks)
        self.guard = StabilityGuard(resolve_precision(train.precision, self.device))
        self.test_scene: Scene | None = None
        self.monitor: GpuMonitor | None = None
        self._reached: Callback | None = None
        self._started: float | None = None
        self._start_at(0, 0.0)
        if scene.grid_levels > 1 and config.grid.levels == 1 and config.grid.contraction == "none":
            _LOG.warning("%s is unbounded, but grid.levels is 1: Trainer.for_scene fits the config to it", scene.name)
        self.unseen_fraction = mark_unseen_cells(self.model, scene)

    def _make_stepper(self, stages: Stages | None) -> TrainingStep | DeviceStep:
        """Fixed shapes and graphs where there is a GPU, exact shapes step by step elsewhere."""
        parts, sampler = (self.model, self.pixels, self.optimizer), self.model.sampler
        if self.device.type == "cuda":
            if "n_active" in inspect.signature(sampler.sample).parameters:
                return DeviceStep(*parts, capture=self.config.train.capture, stages=stages, team=self.team)
            what = f"{type(sampler).__name__}.sample takes no n_active and capacity"
            _LOG.warning("the training step is not captured as a CUDA graph: %s; it runs eagerly", what)
        return TrainingStep(*parts, stages=stages, team=self.team)

    def _start_at(self, step: int, seconds: float) -> None:
        """All that training counts, after so many steps and seconds."""
        self.step, self.rays, self.samples = step, 0, 0
        self.skipped = 0  # steps without an update because a gradient was not finite
        self.lr_factor = 1.0  # on top of the schedule; lowered where training is unstable
        self.should_stop = False
        self._stop_reason: Stop = "callback"
        self._seconds = self._agreed_seconds = seconds
        self._begun = (step, seconds)
        self._chunk_size = ChunkSize()
        self.culled_fraction = 0.0  # of the occupied cells, emptied at the end

    @classmethod
    def for_scene(
        cls,
        scene: Scene,
        config: Config | None = None,
        *,
        device: torch.device | str = "cpu",
        steps: int | None = None,
        time_limit: float | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> "Trainer":
        """A trainer whose config fits the scene, as the command line chooses it; without one, the device's preset. What
        the scene changes (`fitted_config`) is logged and stands in `config`; values chosen by hand stay."""
        auto = preset("auto", torch.device(device).type) if config is None else None
        config, notes = fitted_config(config or preset("auto", torch.device(device).type), scene, auto=auto)
        for note in notes:
            _LOG.info("%s: %s", scene.name, note)
        limit = NO_STEP_LIMIT if steps is None and time_limit is not None else steps
        given = {"steps": limit, "time_limit": time_limit}
        train = replace(config.train, **{name: value for name, value in given.items() if value is not None})
        return cls(replace(config, train=train), scene, device=device, callbacks=callbacks)

    @property
    def train_seconds(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    @property
    def _shared_seconds(self) -> float:
        """Of the clock that all ranks follow."""
        return self.train_seconds if self.team.alone else self._agreed_seconds

    @property
    def progress(self) -> float:
        """Share of the run that is over, by steps or by the clock, whichever ends first."""
        return self._share(self.step)

    def _share(self, steps: int) -> float:
        limit = self.config.train.time_limit
        by_clock = 0.0 if limit is None else self._shared_seconds / limit
        return min(1.0, max(steps / max(1, self.config.train.steps), by_clock))

    @property
    def learning_rate(self) -> float:
        """Of the next step: the schedule counts the steps that were made, not those that were skipped."""
        made = self.step - self.skipped
        return self.lr_factor * learning_rate(self.config.optim, made, self._share(made))

    def stop(self, reason: Stop = "callback") -> None:
        """End `fit` after the step in hand."""
        self.should_stop, self._stop_reason = True, reason

    @contextmanager
    def as_finished(self) -> Iterator[None]:
        """Inside, the model is as it would be if training ended here: mean weights, and nothing that was never seen."""
        with self.optimizer.averaged(), refine.unseen_culled(self.model, self.pixels, self.step):
            yield

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Evaluation, previews and saves inside this block do not count as training time."""
        running = self._started is not None
        self._pause()
        self.team.excuse(running)
        try:
            yield
        finally:
            self.team.excuse(-running)
            self._started = time.perf_counter() if running else None

    def _pause(self) -> None:
        self.stepper.finish()
        self._seconds, self._started = self.train_seconds, None

    def fit(self) -> TrainSummary:
        """Train until the steps, the time limit, a callback or Ctrl-C ends it; can be called again to go on."""
        stopped_by: Stop = "steps"
        self.begin()
        try:
            while self.step < self.config.train.steps:
                if self.is_over:
                    stopped_by = self.stop_reason
                    break
                self.advance()
        except KeyboardInterrupt:
            stopped_by = "interrupted"
        return self.end(stopped_by)

    def begin(self) -> None:
        """Compile, record, agree with the other ranks; then start the clock."""
        self._reached = self._watch_target()
        self._begin_together()
        refine.rehearse(self.model, self.pixels)
        refine.recall_culled(self.model, self.step)
        self.optimizer.drop_gradients()  # of a step that ran out of memory, say
        self.stepper.prepare()
        self.guard.start(self)
        self.monitor = self.monitor or open_monitor(self.device)
        self._begun = (self.step, self.train_seconds)  # of this fit
        self._started = time.perf_counter()

    def _watch_target(self) -> Callback | None:
        """What ends training at `train.target_psnr`, by the middle view of the test scene."""
        target, scene = self.config.train.target_psnr, self.test_scene
        if target is None:
            return None
        if scene is None:
            raise InputError("train.target_psnr", "a view to look at", "none", "set trainer.test_scene to a scene")
        return seldom(stop_at_psnr(target, lambda made: view_psnr(made.model, scene, len(scene) // 2)))

    @property
    def is_over(self) -> bool:
        """Whether something other than the number of steps ends training. Ranks stop together and follow one clock;
        otherwise they would wait for each other for ever, or part ways."""
        if not self.team.alone:
            own = (self.train_seconds, self.lr_factor)
            self.should_stop, (self._agreed_seconds, self.lr_factor) = self.team.agree(self.should_stop, own)
        return self.should_stop or self.progress >= 1.0

    @property
    def stop_reason(self) -> Stop:
        """Why training is over, or would be now."""
        if self.should_stop:
            return self._stop_reason
        return "steps" if self.step >= self.config.train.steps else "time limit"

    def end(self, stopped_by: Stop = "steps") -> TrainSummary:
        """Wait for what is queued, empty what no picture shows where the config says so, and stop the clock."""
        if stopped_by != "interrupted" and self.step > 0:  # what is resumed goes on as if never interrupted
            self.stepper.finish()
            if refine.culls(self.model):
                self.culled_fraction = refine.cull_unseen(self.model, self.pixels, self.step)
        self._pause()
        self.skipped, ranks = int(self.optimizer.skipped), ()
        if stopped_by != "interrupted":
            self.guard.finish(self)
            made, seconds = self.step - self._begun[0], self.train_seconds - self._begun[1]
            ranks = rank_usage(self, 1e3 * seconds / made) if made else ()
        return TrainSummary(self.step, self.train_seconds, self.rays, self.samples, stopped_by, self.skipped, ranks)

    @torch.no_grad()
    def _begin_together(self) -> None:
        """Every rank takes over the state of rank 0, which alone needs to have read a checkpoint."""
        if self.team.alone:
            return
        self._check_same()
        if refine.share_shapes(self.model, self.team):
            self.restructure()
        counts = [self.step, self.stepper.n_rays, self.rays, self.samples, self.skipped]
        counts = torch.tensor(counts, device=self.device)
        state = [*self.model.state_dict().values(), *self.optimizer.state_tensors().values()]
        self.team.copy_from_first([counts, *state])
        self.step, self.stepper.n_rays, self.rays, self.samples, self.skipped = counts.tolist()
        self.optimizer.refresh_halves()

    def _check_same(self) -> None:
        """Ranks train one scene with one config, but for its paths. Decoders and processors may differ a little."""
        images, own = self.scene.images, {name: part for name, part in to_dict(self.config).items() if name != "data"}
        self.team.check_same("config", zlib.crc32(repr(own).encode()))
        self.team.check_same("number or size of images", zlib.crc32(repr(images.sizes.tolist()).encode()))
        rows = images.pixels[:: max(1, images.pixels.shape[0] // 65_536)].float().mean()
        self.team.check_same("scene", float(rows + self.scene.cameras.camera_to_world.abs().mean()), within=1e-3)

    def _refine(self) -> None:
        """Let a field that changes its shapes do so; go over from downscaled images to the full ones."""
        if refine.is_due(self.model, self.progress, self.step):
            self.stepper.forget()
            self.restructure(refine.refine_field(self.model, self.scene.cameras, step=self.step, team=self.team))
        early = self._coarse_pixels if self.progress < self.config.train.coarse_fraction else None
        if self.pixels is not (due := early or self._full_pixels):
            with self.clock_stopped():
                self.pixels = due
                self.stepper.set_pixels(due)

    def restructure(self, carry: Carry | None = None) -> None:
        """Follow parameters that have changed their shapes: the optimizer gathers them, the step is recorded anew."""
        self.stepper.forget()
        self.optimizer.rebuild(self.model, carry)

    def advance(self, limit: int | None = None) -> StepRecord:
        """One step, or on a GPU as many as are queued at once, at most `limit`; then the callbacks."""
        left = self.config.train.steps - self.step
        if self.config.train.time_limit is not None:  # without one no clock decides anything: runs can be repeated
            left = min(left, self._chunk_size.steps_at_once(self.step, self._shared_seconds))
        self.prepare_step()
        record = self.stepper.advance(self.step, left if limit is None else min(limit, left))
        self.note(record)
        return record

    def prepare_step(self) -> None:
        """What comes before a step: changes of the field or the images, learning rate, what follows the progress."""
        self._refine()
        self.stepper.set_learning_rate(self.learning_rate)
        self.stepper.set_progress(self.progress)

    def note(self, record: StepRecord) -> None:
        """What comes after it: the counters, the guard, the callbacks."""
        self.step = record.step
        self.skipped += record.skipped
        self.rays += record.total_rays
        self.samples += record.total_samples
        if self.monitor is not None:
            self.monitor()
        for callback in (self.guard, *self.callbacks, self._reached):
            if callback is not None:
                callback(self, record)

    def save(self, folder: Path, *, score: float | None = None, keep: int = KEEP) -> Path:
        """Write a checkpoint into `folder`; see `nerfturbo.training.checkpoint`."""
        return save_checkpoint(folder, self.state(score), self.model, self.optimizer.state_tensors(), keep=keep)

    def state(self, score: float | None = None) -> CheckpointState:
        """What a checkpoint holds besides tensors."""
        progress, bounds = (self.step, self.train_seconds, self.stepper.n_rays), self.model.bounds.to_dict()
        return CheckpointState(*progress, to_dict(self.config), bounds, score=score, lr_factor=self.lr_factor)

    def reconfigure(self, config: Config) -> None:
        """Go on with another peak learning rate, number of steps or batch size; the rest is built already."""
        resized = config.train.batch_samples != self.config.train.batch_samples
        self.config = self.model.config = config
        if resized:
            self.stepper.forget()

    def warm_start(self, source: Path | str, parts: tuple[str, ...] = (), *, keep: float = 1.0) -> WarmStart:
        """Begin from a trained field, or parts of it; see `nerfturbo.training.warm_start`."""
        taken = warm_start(self.model, source, parts, keep=keep)
        self.optimizer.adopt_values()
        return taken

    def resume(self, checkpoint: Path) -> None:
        """Go on where a checkpoint stopped, on the same draws; a file that Lightning wrote will do too."""
        if checkpoint.suffix == ".ckpt":
            with unpacked(checkpoint) as folder:
                return self.resume(folder)
        self.stepper.forget()
        state = read_state(checkpoint)
        load_tensors(checkpoint, self.model, self.optimizer)
        self.restore(state)

    def restore(self, state: CheckpointState) -> None:
        """Take over a checkpoint whose model and optimizer are loaded, whatever this trainer has done before."""
        self._start_at(state.step, state.train_seconds)
        self.skipped, self.lr_factor = int(self.optimizer.skipped), state.lr_factor
        self.stepper.restart(min(state.n_rays, self.config.train.max_rays * self.team.world))


def load_model(
    checkpoint: Path, device: torch.device | str = "cpu", *, field: nn.Module | None = None, sampler: Any = None
) -> NerfModel:
    """The trained model alone, without its images. A `field` or `sampler` of one's own is made anew from where the run
    says it came from, unless it is handed in."""
    state = read_state(checkpoint)
    run = checkpoint.parent.parent if (checkpoint.parent.parent / "config.json").is_file() else checkpoint
    config = check_code(from_dict(Config, state.config, f"{checkpoint}: config"), run if field is None else None)
    try:
        model = NerfModel(config, SceneBounds.from_dict(state.bounds), field=field, sampler=sampler).to(device)
    except InputError as error:
        raise InputError(f"{checkpoint}: {error.what}", error.expected, error.got, error.hint) from error
    load_tensors(checkpoint, model, averaged=config.optim.ema_decay > 0.0)
    read_halves(model, half_dtype(config, torch.device(device)))  # rendered as it was trained
    return model.eval()
