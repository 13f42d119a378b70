"""Training under PyTorch Lightning: the same step, driven by `lightning.Trainer`.

    import lightning as L
    from nerfturbo.training.lightning import NerfData, NerfModule

    L.Trainer(max_steps=2000).fit(NerfModule(config), NerfData(config))

`NerfModule(config)` leaves optimization to Lightning, eagerly: every flag of its trainer works. `NerfModule(config,
captured=True)` runs several steps of the native trainer per `training_step`, recorded graphs on a GPU; precision,
clipping and accumulation then come from the config, and flags that contradict it are refused by name.

Importing this file imports lightning; nothing else of the package does.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..config import Config, from_dict, to_dict
from ..data.images import save_image
from ..data.options import LoadOptions
from ..data.scene import Scene, open_scenes
from ..errors import BackendError, InputError
from ..fields.field import connect, field_part, is_adaptive
from ..rendering.model import NerfModel, SceneBounds
from .checkpoint import LIGHTNING_KEY, CheckpointState
from .distributed import ProcessTeam, Team
from .loss import Stages, StepResult
from .optim import FieldAdam, learning_rate
from .refine import cull_unseen, culls, is_due, match_shapes, recall_culled, refine_field
from .step import RayBatches, start_totals, totals_of
from .trainer import Trainer, TrainSummary

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise BackendError(
        f"training under Lightning needs the package lightning ({error}); pip install 'nerfturbo[lightning]'"
    ) from error

LOG = logging.getLogger("nerfturbo")


class _Steps(IterableDataset):
    """Numbers: rays are drawn on the device of training, by the module. An epoch is a whole run."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class NerfData(pl.LightningDataModule):
    """A scene: pixels to train on, and views to validate on (the indices of test pictures)."""

    def __init__(self, config: Config, scenes: tuple[Scene, Scene] | None = None) -> None:
        super().__init__()
        self.config, self._scenes = config, scenes

    def setup(self, stage: str | None = None) -> None:
        if self._scenes is None:
            self._scenes = open_scenes(self.config.data.source, LoadOptions.of(self.config.data))

    @property
    def train_scene(self) -> Scene:
        self.setup()
        assert self._scenes is not None
        return self._scenes[0]

    @property
    def test_scene(self) -> Scene:
        self.setup()
        assert self._scenes is not None
        return self._scenes[1]

    def train_dataloader(self) -> DataLoader[int]:
        accumulate = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        return DataLoader(_Steps(self.config.train.steps * accumulate), batch_size=None)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(list(range(len(self.test_scene))), batch_size=None)  # type: ignore[arg-type]

    test_dataloader = val_dataloader


class NerfModule(pl.LightningModule):
    """A field with its grid over the scene of a `NerfData`.

    `field` and `sampler` are those of `Trainer`, `start` is a checkpoint of the native trainer to go on from, `stages`
    replaces parts of the step, `steps_per_call` is how many captured steps one `training_step` runs. `engine` hands in
    a native trainer that is already made.
    """

    def __init__(
        self,
        config: Config,
        *,
        field: torch.nn.Module | None = None,
        sampler: Any = None,
        captured: bool = False,
        steps_per_call: int = 16,
        stages: Stages | None = None,
        start: Path | None = None,
        engine: Trainer | None = None,
    ) -> None:
        super().__init__()
        if steps_per_call < 1:
            raise InputError("steps_per_call", "a number >= 1", str(steps_per_call))
        self.save_hyperparameters({"config": to_dict(config), "captured": captured, "steps_per_call": steps_per_call})
        self.config, self.captured, self.steps_per_call = config, captured or engine is not None, steps_per_call
        self.automatic_optimization = not self.captured
        self.engine = engine
        self._stages, self._start = stages, start
        self._plugged = {"field": field, "sampler": sampler}
        self.model: NerfModel | None = None if engine is None else engine.model
        self.batches: RayBatches | None = None
        self.last: StepResult | None = None
        self._first_step, self._part, self._part_of = 0, 0, -1
        self._restored: dict[str, Any] | None = None
        self._seconds, self._started = 0.0, None

    # --- set-up ------------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """The grid's update and the non-finite guard come along; in captured mode they are part of the step."""
        if self.captured:
            self._refuse_conflicts()
            return []
        given = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return [kind() for kind in (Refinement, GridUpdate, NonFiniteGuard) if kind not in given]

    def _refuse_conflicts(self) -> None:
        """Flags of Lightning that the captured step would ignore."""
        trainer, hint = self.trainer, "or leave captured=True out"
        conflicts = {
            "precision": (trainer.precision, "32-true", "set train.precision in the config"),
            "gradient_clip_val": (trainer.gradient_clip_val, None, "set optim.clip_norm in the config"),
            "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "set train.accumulate in the config"),
        }
        for name, (found, neutral, instead) in conflicts.items():
            if found != neutral:
                expected = f"its default with NerfModule(captured=True), which {instead.replace('set', 'takes')}"
                raise InputError(f"Trainer({name}=...)", expected, repr(found), f"{instead}, {hint}")

    @property
    def _data(self) -> NerfData:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, NerfData):
            raise InputError("datamodule", "a NerfData", type(data).__name__, "trainer.fit(NerfModule(c), NerfData(c))")
        return data

    def configure_model(self) -> None:
        """Build the model once the device and the scene are known."""
        if self.model is not None or self._trainer is None:  # without a trainer: load_from_checkpoint makes it
            return
        scene, device = self._data.train_scene, self._device_of_rank()
        dtype = torch.get_default_dtype()  # float64 under Trainer(precision="64-true")
        torch.set_default_dtype(torch.float32)
        try:
            # Lightning makes its own device the default here; the trainer places things itself.
            with torch.device("cpu"):
                options = {"stages": self._stages, "team": self._team(device), **self._plugged}
                self.engine = Trainer(self.config, scene, device=device, **options)
        finally:
            torch.set_default_dtype(dtype)
        self.model, self.config = self.engine.model, self.engine.config
        if self._start is not None:
            self._begin_from(self._start)
        if not self.captured:
            self._disconnect(self.engine)
            self.model.to(dtype)
            self.engine = None

    def _device_of_rank(self) -> torch.device:
        return torch.device(self.trainer.strategy.root_device)

    def _team(self, device: torch.device) -> Team:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return Team()
        return ProcessTeam(device, compression=self.config.train.compress_gradients)

    def _disconnect(self, engine: Trainer) -> None:
        """Give gradients back to autograd: the native optimizer's buffers are not used here."""
        connect(engine.model, None)
        for parameter in engine.model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.batches = RayBatches(engine.model, engine.pixels, stages=self._stages, team=engine.team)
        self.batches.n_rays = engine.stepper.n_rays

    def _begin_from(self, checkpoint: Path) -> None:
        assert self.engine is not None
        self.engine.resume(checkpoint)
        self._first_step, self._seconds = self.engine.step, self.engine.train_seconds
        self._start_state = {name: value.clone() for name, value in self.engine.optimizer.state_tensors().items()}

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        if self.captured:
            return None
        optimizer = FieldAdam(self.model, self.config.optim)
        if self._start is not None:
            optimizer.load_state_tensors(self._start_state)
        total = self.config.train.steps

        def factor(n_steps: int) -> float:
            made, limit = self._first_step + n_steps, self.config.train.time_limit
            by_clock = 0.0 if limit is None else self.train_seconds / limit
            rate = learning_rate(self.config.optim, made, min(1.0, max(made / max(1, total), by_clock)))
            return rate / self.config.optim.lr

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --- training ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done since the start of training, those of the checkpoint it began from included."""
        if self.captured:
            return 0 if self.engine is None else self.engine.step
        return self._first_step + self.trainer.global_step

    @property
    def progress(self) -> float:
        """Share of the run that is over, by steps or by the first rank's clock; the same on all ranks."""
        by_steps, limit = self.step / max(1, self.config.train.steps), self.config.train.time_limit
        if limit is None or self.batches is None:
            return min(1.0, by_steps)
        _, (seconds,) = self.batches.team.agree(False, (self.train_seconds,))
        return min(1.0, max(by_steps, seconds / limit))

    @property
    def train_seconds(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def on_fit_start(self) -> None:
        self._started = time.perf_counter()
        if self._restored is not None and self.batches is not None:
            self.batches.n_rays = self._restored["n_rays"]
        if self.captured:
            assert self.engine is not None
            wrapped = self.trainer.strategy.model
            if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
                wrapped.require_backward_grad_sync = False  # the step reduces its gradients itself
            self.engine.begin()

    def on_train_start(self) -> None:
        if not self.captured and self.batches is not None:
            recall_culled(self.batches.model, self.step)

    def on_fit_end(self) -> None:
        if self.captured and self.engine is not None:
            self.engine.end()
        elif self.batches is not None and not self.trainer.interrupted and culls(self.batches.model):
            cull_unseen(self.batches.model, self.batches.pixels, self.step)

    def cpu(self) -> NerfModule:
        """Lightning ends with this on every module; a captured one stays where its graphs and buffers are."""
        return self if self.engine is not None else super().cpu()

    def training_step(self, batch: int, batch_idx: int) -> Tensor | None:
        return self._captured_steps() if self.captured else self._eager_step()

    def _captured_steps(self) -> None:
        """Up to K steps of the native trainer; Lightning's own count goes on by as many."""
        engine, limit = self.engine, self.trainer.max_steps
        assert engine is not None
        before = engine.step
        due = self.steps_per_call if limit < 0 else min(self.steps_per_call, limit - self.trainer.global_step)
        record = None
        while engine.step - before < due and engine.step < self.config.train.steps and not engine.is_over:
            record = engine.advance(due - (engine.step - before))
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for tracker in (progress.total, progress.current):
            tracker.ready += engine.step - before
            tracker.completed += engine.step - before
        if record is None or engine.step >= self.config.train.steps or engine.should_stop:
            self.trainer.should_stop = True
        if record is not None and self.trainer.logger is not None:
            self.log_dict({"loss": record.loss, "n_rays": float(record.n_rays)})

    def _eager_step(self) -> Tensor:
        """The loss of one batch, weighted so that the mean of the ranks' gradients is that of all rays."""
        assert self.batches is not None
        step = self.step
        self._part = self._part + 1 if step == self._part_of else 0
        self._part_of = step
        if self.batches.model.photos is not None:
            self.batches.model.set_progress(self.progress)
        result = self.batches.loss(step, self._part)
        loss, team = result.loss, self.batches.team
        if not loss.requires_grad:  # no samples anywhere: DDP still waits for every parameter
            loss = loss + sum(parameter.sum() * 0.0 for parameter in self.parameters())
        if not team.alone:
            sums, wait = start_totals(result, team)
            wait()
            result, weight = totals_of(sums, result)
            loss = loss * (weight * team.world).to(loss.dtype)
        self.last = result
        if self.trainer.logger is not None and step % getattr(self.trainer, "log_every_n_steps", 50) == 0:
            self.log_dict({"loss": result.loss.detach(), "n_rays": result.n_rays.float()})
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.captured or self.batches is None or self.last is None:
            return
        if self.step != self._part_of:  # an update was made
            self.batches.adapt(int(self.last.n_samples), int(self.last.n_marched))
        limit = self.config.train.time_limit
        if self.step >= self.config.train.steps or (limit is not None and self.train_seconds >= limit):
            self.trainer.should_stop = True

    def validation_step(self, batch: int, batch_idx: int) -> None:
        """PSNR of one test view over white, logged as `val_psnr`."""
        assert self.model is not None
        scene, index = self._data.test_scene, int(batch)
        picture = scene.images.image(index).to(self.device)
        truth = picture[..., :3]
        if picture.shape[-1] == 4:
            truth = truth * picture[..., 3:] + (1.0 - picture[..., 3:])
        error = (self.model.render_image(scene.cameras, index).rgb - truth).square().mean()
        self.log("val_psnr", -10.0 * torch.log10(error.clamp(min=1e-12)), batch_size=1, sync_dist=True)

    test_step = validation_step

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What a checkpoint of the native trainer holds besides the weights."""
        assert self.model is not None
        if self.captured:
            assert self.engine is not None
            optimizer, n_rays, seconds = self.engine.optimizer, self.engine.stepper.n_rays, self.engine.train_seconds
        else:
            assert self.batches is not None
            found = self.optimizers(use_pl_optimizer=False)
            assert isinstance(found, FieldAdam)
            optimizer, n_rays, seconds = found, self.batches.n_rays, self.train_seconds
        bounds = self.model.bounds.to_dict()
        state = CheckpointState(self.step, seconds, n_rays, to_dict(self.config), bounds)
        tensors = {name: value.detach().cpu().contiguous() for name, value in optimizer.state_tensors().items()}
        checkpoint[LIGHTNING_KEY] = {"state": vars(state), "optimizer": tensors}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get(LIGHTNING_KEY)
        if own is None:
            raise InputError("checkpoint", "one of a NerfModule", "no entry of nerfturbo in it")
        self._restored = own["state"]
        self._seconds = own["state"]["train_seconds"]
        self._first_step = own["state"]["step"] - int(checkpoint.get("global_step", 0))
        if self.model is None:  # load_from_checkpoint, without a trainer
            bounds = SceneBounds.from_dict(own["state"]["bounds"])
            self.model = NerfModel(self.config, bounds, **self._plugged)
        if self.captured and self.engine is not None:
            if match_shapes(self.engine.model, checkpoint["state_dict"]):
                self.engine.restructure()
            self.engine.model.load_state_dict(field_part(checkpoint["state_dict"], "model."))
            self.engine.optimizer.load_state_tensors(own["optimizer"])
            self.engine.step, self.engine.stepper.n_rays = own["state"]["step"], own["state"]["n_rays"]


def load_module(path: Path | str) -> NerfModule:
    """The module of Lightning's checkpoint file, to render with or to look at."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    state = saved[LIGHTNING_KEY]["state"]
    module = NerfModule(from_dict(Config, state["config"]))
    module.model = NerfModel(module.config, SceneBounds.from_dict(state["bounds"]))
    module.load_state_dict(saved["state_dict"])
    return module.eval()


# --- callbacks --------------------------------------------------------------------------------------------------------


class GridUpdate(pl.Callback):
    """Refreshes the occupancy grid before every n-th step, as the config says. A `NerfModule` brings it along."""

    def __init__(self) -> None:
        self._last = -1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, NerfModule) and pl_module.batches is not None
        grid, step, batches = pl_module.config.grid, pl_module.step, pl_module.batches
        if grid.enabled and step % grid.update_every == 0 and step != self._last:
            self._last = step
            batches.stages.update_grid(batches.model, step, team=batches.team)


class Refinement(pl.Callback):
    """Lets a field that changes its shapes do so, before the step that is due. A `NerfModule` brings it along.

    The optimizer takes the new parameters with their moments, and DistributedDataParallel is wrapped around the model
    anew, because its buckets have the old sizes; every rank does so at the same step.
    """

    def __init__(self) -> None:
        self._last = -1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, NerfModule) and pl_module.batches is not None
        batches, step = pl_module.batches, pl_module.step
        if not is_adaptive(batches.model.field) or step == self._last:  # never between accumulated parts
            return
        self._last = step
        if not is_due(batches.model, pl_module.progress, step):
            return
        cameras = batches.pixels.scene.cameras
        carry = refine_field(batches.model, cameras, step=step, team=batches.team)
        for optimizer in trainer.optimizers:
            optimizer = getattr(optimizer, "optimizer", optimizer)
            if isinstance(optimizer, FieldAdam):
                optimizer.rebuild(batches.model, carry)
        strategy = trainer.strategy
        if isinstance(strategy.model, torch.nn.parallel.DistributedDataParallel):
            strategy.model = strategy._setup_model(pl_module)
            strategy._register_ddp_hooks()  # type: ignore[attr-defined]


class NonFiniteGuard(pl.Callback):
    """Says when steps were skipped because a gradient was not finite, and ends training when too many in a row were."""

    def __init__(self, every_n_steps: int = 100, patience: int = 20) -> None:
        self.every_n_steps, self.patience = every_n_steps, patience
        self.skipped, self._checked = 0, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step - self._checked < min(self.every_n_steps, self.patience):
            return
        optimizer = trainer.optimizers[0]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, FieldAdam):
            return
        found, since, self._checked = optimizer.skipped, step - self._checked, step
        new, self.skipped = found - self.skipped, found
        if new:
            LOG.warning("%d of the last %d steps were skipped: a gradient was not finite", new, since)
        if new >= min(since, self.patience):
            LOG.error("no step was possible any more: training stops")
            trainer.should_stop = True


class ImageLog(pl.Callback):
    """Renders one test view every n steps: into TensorBoard where that is the logger, else as PNG files."""

    def __init__(self, every_n_steps: int = 500, view: int = 0) -> None:
        self.every_n_steps, self.view, self._last = every_n_steps, view, 0

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, NerfModule) and pl_module.model is not None
        if trainer.global_step - self._last < self.every_n_steps or not trainer.is_global_zero:
            return
        self._last = trainer.global_step
        image = pl_module.model.render_image(pl_module._data.test_scene.cameras, self.view).rgb.clamp(0.0, 1.0).cpu()
        board = getattr(trainer.logger, "experiment", None)
        if hasattr(board, "add_image"):
            board.add_image("test_view", image, trainer.global_step, dataformats="HWC")  # type: ignore[union-attr]
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_image(folder / f"view_{trainer.global_step:08d}.png", image)


def fit_with_lightning(engine: Trainer) -> TrainSummary:
    """`engine.fit()` under `lightning.Trainer`, with its callbacks; several ranks become Lightning's DDP."""
    team: dict[str, Any] = {"devices": 1}
    if not engine.team.alone:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        team = {"devices": local, "num_nodes": max(1, engine.team.world // local), "strategy": "ddp"}
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)  # its advertisements; ours is the display
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                accelerator="gpu" if engine.device.type == "cuda" else "cpu",
                max_epochs=-1,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                limit_val_batches=0,  # the session scores the test views; here it would render every training view
                logger=False,
                **team,
            )
            trainer.fit(NerfModule(engine.config, engine=engine), NerfData(engine.config, (engine.scene, engine.scene)))
    finally:
        log.setLevel(level)
    return engine.end(engine.stop_reason)
