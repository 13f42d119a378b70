"""The native loop: visible, short, and yours to copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ..config import NO_STEP_LIMIT, Config, from_dict, to_dict
from ..data.batches import PixelSampler
from ..data.cameras import PIXEL_RADIUS
from ..data.coarse import shrunken
from ..data.fitting import fitted_config
from ..data.keypoints import TRAINED_PHOTOS, Keypoints, load_keypoints
from ..data.scene import Scene
from ..fields import AntiAliasedNGP, FactorField, HashDensity, InstantNGP, VanillaNeRF, VoxelGrid
from ..fields.field import Carry, Connected
from ..presets import preset
from ..rendering.model import NerfModel, SceneBounds
from ..sampling.contracted_grid import ContractedGrid
from ..sampling.visible_cells import Frusta
from .checkpoint import KEEP, CheckpointState, load_tensors, read_state, save_checkpoint
from .distributed import Team
from .graph import DeviceStep
from .hidden import hide_unseen, hides, rehearse_hiding, unseen_hidden
from .initialise import Initialised, initialise
from .interchange import unpacked
from .optim import Optimizer, learning_rate
from .pace import Pace
from .precision import half_dtype
from .refine import is_due, refine_field, rehearse, share_shapes
from .stages import Stages
from .step import StepRecord, TrainingStep

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


def make_stepper(
    model: NerfModel,
    sampler: PixelSampler,
    optimizer: Optimizer,
    *,
    stages: Stages | None = None,
    team: Team | None = None,
) -> TrainingStep | DeviceStep:
    """Fixed shapes and graphs where there is a GPU, exact shapes step by step elsewhere."""
    if model.device.type == "cuda":
        capture = model.config.train.capture
        return DeviceStep(model, sampler, optimizer, capture=capture, stages=stages, team=team)
    return TrainingStep(model, sampler, optimizer, stages=stages, team=team)


def mark_unseen_cells(model: NerfModel, scene: Scene) -> float:
    """Give up the cells of the grid that no camera sees; returns their share. To be done before training.

    An anti-aliased field also learns how wide a pixel typically is.
    """
    if isinstance(model.field, AntiAliasedNGP):
        cameras, middle = scene.cameras, torch.tensor(scene.aabb.low) * 0.5 + torch.tensor(scene.aabb.high) * 0.5
        distance = torch.linalg.vector_norm(cameras.positions.cpu() - middle, dim=-1)
        model.field.set_footprint(float((distance * PIXEL_RADIUS / cameras.focal.cpu().prod(-1).sqrt()).median()))
    frusta = scene.cameras.enclosing_pinholes()
    if frusta is None or not model.config.grid.enabled:
        return 0.0
    frusta = frusta.to(model.device)
    if isinstance(model.proposer, ContractedGrid):
        cameras = Frusta(frusta.camera_to_world, frusta.focal, frusta.center, frusta.size)
        model.proposer.mark_invisible(cameras, scene.near)
    return model.grid.mark_invisible(frusta.camera_to_world, frusta.focal, frusta.center, frusta.size, scene.near)


class Trainer:
    """Trains one model on one scene. `callbacks` run after the steps; the clock counts training only.

    `stages` replaces parts of the step by functions of your own. In a `team` every process makes a trainer over the
    same config and scene and calls `fit`; callbacks and saving are for rank 0. `keypoints` are depths known from
    elsewhere, in place of COLMAP's; `photo.depth_weight` is what they count.
    """

    def __init__(
        self,
        config: Config,
        scene: Scene,
        *,
        device: torch.device | str = "cpu",
        callbacks: Sequence[Callback] = (),
        stages: Stages | None = None,
        team: Team | None = None,
        keypoints: Keypoints | None = None,
    ) -> None:
        self.config, self.scene, self.device = config, scene, torch.device(device)
        self.team = team or Team()
        self.model = NerfModel(config, SceneBounds.of(scene)).to(self.device)
        if self.model.photos is not None:
            self.model.photos.observe(scene.cameras, scene.aabb)
        if config.photo.depth_weight > 0.0:
            known = keypoints or load_keypoints(scene, min_photos=TRAINED_PHOTOS)
            self.model.keypoints = known.to(self.device)
        train, rays_per_pixel = config.train, config.train.rays_per_pixel
        spread = train.pixel_spread or (1.0 if rays_per_pixel > 1 else 0.0)
        options = {"guided": train.draw == "error", "spread": spread, "radii": config.field.anti_alias}
        options |= {"rays_per_pixel": rays_per_pixel}
        self.sampler = PixelSampler(scene, self.device, config.train.seed, pixels=config.data.pixels, **options)
        self.optimizer = Optimizer(self.model, config.optim, half_dtype=half_dtype(config, self.device))
        self.stepper = make_stepper(self.model, self.sampler, self.optimizer, stages=stages, team=self.team)
        self._full_sampler: PixelSampler | None = None  # waits while shrunken pictures are trained on
        if config.train.coarse_fraction > 0.0:
            coarse = shrunken(scene, config.train.coarse_downscale)
            self._full_sampler = self.sampler
            self.sampler = PixelSampler(coarse, self.device, config.train.seed, **options)
            self.stepper.set_sampler(self.sampler)
        self.callbacks = list(callbacks)
        self.step, self.rays, self.samples = 0, 0, 0
        self.skipped = 0  # steps without an update because a gradient was not finite
        self.lr_factor = 1.0  # on top of the schedule; lowered where training is unstable
        self.should_stop = False
        self._stop_reason: Stop = "callback"
        self._seconds, self._started = 0.0, None
        self._agreed_seconds, self._pace = 0.0, Pace()
        if scene.grid_levels > 1 and config.grid.levels == 1 and config.sampling.contraction == "none":
            _LOG.warning("%s has no end, but grid.levels is 1: Trainer.for_scene fits the config to it", scene.name)
        self.unseen_fraction = mark_unseen_cells(self.model, scene)
        self.hidden_fraction = 0.0  # of the occupied cells, emptied at the end

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
    ) -> Trainer:
        """A trainer whose config fits the scene, as the command line chooses it; without one, the device's preset.

        What the scene changes (`fitted_config`: a field that sees time for one that moves; nested grids, growing steps
        and so on for one without an end) is logged and stands in `config`; values chosen by hand stay.
        Trainer(config, scene) takes the config as it is.
        """
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
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds + running

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
        with self.optimizer.averaged(), unseen_hidden(self.model, self.sampler, self.step):
            yield

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Evaluation, previews and saves inside this block do not count as training time."""
        self._pause()
        try:
            yield
        finally:
            self._started = time.perf_counter()

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
        self._begin_together()
        rehearse(self.model, self.scene.cameras)
        rehearse_hiding(self.model, self.sampler)
        if hides(self.model) and self.step > 0:  # training goes on with all that was learned
            grid = self.config.grid
            self.model.grid.recall(guard=self.step <= grid.warmup_steps + grid.update_every)
        self.stepper.prepare()
        self._started = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether something other than the number of steps ends training; the same answer on all ranks."""
        self._agree()
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
            self.hide_unseen()
        self._pause()
        return TrainSummary(self.step, self.train_seconds, self.rays, self.samples, stopped_by)

    def hide_unseen(self, steps: int | None = None) -> None:
        """Empty the cells that no picture shows, where the config says so; `steps` that another loop has made."""
        if hides(self.model):
            self.hidden_fraction = hide_unseen(self.model, self.sampler, self.step if steps is None else steps)

    @torch.no_grad()
    def _begin_together(self) -> None:
        """Every rank takes over the state of rank 0, which alone needs to have read a checkpoint."""
        if self.team.alone:
            return
        if share_shapes(self.model, self.team):
            self.restructure()
        counts = [self.step, self.stepper.n_rays, self.rays, self.samples, self.skipped]
        counts = torch.tensor(counts, device=self.device)
        state = [*self.model.state_dict().values(), *self.optimizer.state_tensors().values()]
        self.team.copy_from_first([counts, *state])
        self.step, self.stepper.n_rays, self.rays, self.samples, self.skipped = counts.tolist()
        self.optimizer.refresh_halves()

    def _agree(self) -> None:
        """Ranks stop together and follow one clock; otherwise they would wait for each other for ever, or part ways."""
        if not self.team.alone:
            own = (self.train_seconds, self.lr_factor)
            self.should_stop, (self._agreed_seconds, self.lr_factor) = self.team.agree(self.should_stop, own)

    def _refine(self) -> None:
        """Let a field that changes its shapes do so; go over from shrunken pictures to the full ones."""
        if is_due(self.model, self.progress, self.step):
            self.stepper.forget()
            self.restructure(refine_field(self.model, self.scene.cameras, step=self.step, team=self.team))
        if self._full_sampler is None or self.progress < self.config.train.coarse_fraction:
            return
        with self.clock_stopped():
            self.sampler, self._full_sampler = self._full_sampler, None
            self.stepper.set_sampler(self.sampler)

    def restructure(self, carry: Carry | None = None) -> None:
        """Follow parameters that have changed their shapes: the optimizer gathers them, the step is recorded anew."""
        self.stepper.forget()
        self.optimizer.rebuild(self.model, carry)

    def advance(self, limit: int | None = None) -> StepRecord:
        """One step, or on a GPU as many as are queued at once, at most `limit`; then the callbacks."""
        left = self.config.train.steps - self.step
        if self.config.train.time_limit is not None:  # without one no clock decides anything: runs can be repeated
            left = min(left, self._pace.steps_at_once(self.step, self._shared_seconds))
        self._refine()
        self.stepper.set_learning_rate(self.learning_rate)
        self.stepper.set_progress(self.progress)
        record = self.stepper.advance(self.step, left if limit is None else min(limit, left))
        self.step = record.step
        self.skipped += record.skipped
        self.rays += record.total_rays
        self.samples += record.total_samples
        for callback in self.callbacks:
            callback(self, record)
        return record

    def save(self, folder: Path, *, score: float | None = None, keep: int = KEEP) -> Path:
        """Write a checkpoint into `folder`; see `nerfturbo.training.checkpoint`."""
        state = CheckpointState(
            step=self.step,
            train_seconds=self.train_seconds,
            n_rays=self.stepper.n_rays,
            config=to_dict(self.config),
            bounds=self.model.bounds.to_dict(),
            score=score,
            lr_factor=self.lr_factor,
        )
        return save_checkpoint(folder, state, self.model, self.optimizer, keep=keep)

    def initialise(self, source: Path | str, parts: tuple[str, ...] = (), *, keep: float = 1.0) -> Initialised:
        """Begin from a trained field, or parts of it; see `nerfturbo.training.initialise`."""
        taken = initialise(self.model, source, parts, keep=keep)
        self.optimizer.adopt_values()
        return taken

    def resume(self, checkpoint: Path) -> None:
        """Go on where a checkpoint stopped, on the same draws; a file that Lightning wrote will do too."""
        if checkpoint.suffix == ".ckpt":
            with unpacked(checkpoint) as folder:
                return self.resume(folder)
        state = read_state(checkpoint)
        self.stepper.forget()
        load_tensors(checkpoint, self.model, self.optimizer)
        self.step, self._seconds = state.step, state.train_seconds
        self.skipped, self.lr_factor = int(self.optimizer.skipped), state.lr_factor
        self.stepper.n_rays = min(state.n_rays, self.config.train.max_rays * self.team.world)


def load_model(checkpoint: Path, device: torch.device | str = "cpu") -> NerfModel:
    """The trained model alone, without its pictures."""
    state = read_state(checkpoint)
    config = from_dict(Config, state.config)
    model = NerfModel(config, SceneBounds.from_dict(state.bounds)).to(device)
    load_tensors(checkpoint, model, averaged=config.optim.ema_decay > 0.0)
    dtype = half_dtype(config, torch.device(device))
    for module in model.modules():
        if isinstance(module, InstantNGP | HashDensity) and dtype is not None:
            module.half_table = module.encoding.table.detach().to(dtype)  # rendered as it was trained
        elif isinstance(module, VoxelGrid) and dtype is not None:
            module.half_table = module.color_table.detach().to(dtype)
        elif isinstance(module, VanillaNeRF | FactorField):
            module.compute_dtype = dtype
        elif isinstance(module, Connected) and dtype is not None:
            module.read_as(dtype)
    return model.eval()
