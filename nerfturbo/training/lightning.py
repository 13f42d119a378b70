"""Training under PyTorch Lightning: the native trainer and its step, driven by `lightning.Trainer`.

    import lightning as L
    from nerfturbo.training.lightning import NerfData, NerfModule

    L.Trainer(max_steps=2000).fit(NerfModule(config), NerfData(config))

Every value of the config acts as in the native trainer. Flags of Lightning that say the same become values of it; one
that contradicts it is refused by name. `NerfModule(config)` leaves backward and update to Lightning's loop;
`NerfModule(config, captured=True)` replays recorded graphs on a GPU. Nothing else of the package imports lightning.
"""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..config import Config, from_dict, to_dict
from ..data.batches import PixelBatch
from ..data.images import save_image
from ..data.options import LoadOptions
from ..data.scene import Scene, open_scenes
from ..errors import BackendError, InputError, refuse
from ..fields.field import field_part
from ..rendering.model import NerfModel, SceneBounds
from .callbacks import view_psnr
from .checkpoint import LIGHTNING_KEY, CheckpointState
from .distributed import ProcessTeam, Team
from .loss import Stages, StepResult
from .optim import FieldAdam, Optimizer
from .refine import match_shapes
from .step import StepRecord, TrainingStep, backward, gradient_scale, mean_result, start_totals
from .trainer import Trainer, TrainSummary

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    hint = "pip install 'nerfturbo[lightning]'"
    raise BackendError(f"training under Lightning needs the package lightning ({error}); {hint}") from error

MAKE_NEW = "make a new NerfModule and fit it with ckpt_path"
# What a flag asks of the config; the first is Lightning's default and asks for nothing.
PRECISIONS = {"32-true": None, "64-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16"}


class NerfData(pl.LightningDataModule):
    """A scene: pixels to train on, and views to validate on (the indices of test pictures)."""

    def __init__(self, config: Config, scenes: tuple[Scene, Scene] | None = None) -> None:
        super().__init__()
        self.config, self._scenes = config, scenes

    def setup(self, stage: str | None = None) -> tuple[Scene, Scene]:  # type: ignore[override]
        self._scenes = self._scenes or open_scenes(self.config.data.source, LoadOptions.of(self.config.data))
        return self._scenes

    @property
    def train_scene(self) -> Scene:
        return self.setup()[0]

    @property
    def test_scene(self) -> Scene:
        return self.setup()[1]

    def train_dataloader(self) -> range:
        """Numbers: rays are drawn on the device of training, by the module. An epoch is a whole run."""
        steps, trainer = self.config.train.steps, self.trainer
        if trainer is None:
            return range(steps)
        return range((trainer.max_steps if trainer.max_steps >= 0 else steps) * trainer.accumulate_grad_batches)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(list(range(len(self.test_scene))), batch_size=None)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


class NerfModule(pl.LightningModule):
    """A field with its sampler over the scene of a `NerfData`: the native trainer, driven by Lightning. `field` and
    `sampler` are those of `Trainer`, `start` is a checkpoint of the native trainer to go on from, `stages` replaces
    parts of the step, `steps_per_call` is how many captured steps are queued at once where nothing looks in between.
    `engine` hands in a native trainer that is already made."""

    last: StepRecord | None = None  # what the last step did

    def __init__(
        self,
        config: Config | dict[str, Any],
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
        refuse(steps_per_call < 1, "steps_per_call", "a number >= 1", steps_per_call)
        self.config: Config = config if isinstance(config, Config) else from_dict(Config, config)
        values = {"config": to_dict(self.config), "captured": captured, "steps_per_call": steps_per_call}
        self.save_hyperparameters(values)
        self._asked = self.config  # before flags of a Lightning trainer change it
        self.captured, self.steps_per_call = captured or engine is not None, steps_per_call
        self.automatic_optimization = not self.captured
        self.engine = engine
        self._options = {"stages": stages, "field": field, "sampler": sampler}
        self._start, self._restored = start, None
        self._results: list[StepResult] = []  # of the batches of one step
        self._made: StepResult  # of all of them
        self._ahead = 0  # captured steps that Lightning has not counted yet
        self._paused = ExitStack()
        self._quiet = engine is not None  # whoever made it logs
        self.summary: TrainSummary | None = None
        self.model: NerfModel | None = None if engine is None else engine.model

    def configure_callbacks(self) -> list[pl.Callback]:
        """Make Lightning's flags and the config say the same; what they cannot agree on is refused by name."""
        if self.trainer.state.fn != "fit":
            return []
        self._agree_on_flags()
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and self.trainer.world_size == 1:
                callback.save_on_exception = True  # an epoch is the whole run: nothing else would be saved
        return []

    def _agree_on_flags(self) -> None:
        trainer: Any = self.trainer
        config, strategy = self._asked, trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            hint = "every process holds the whole field"
            raise InputError("Trainer(strategy=...)", "one device or ddp", type(strategy).__name__, hint)
        train, optim = config.train, config.optim
        if trainer.precision not in PRECISIONS:
            hint = "masters and reductions of a field are fp32"
            raise InputError("Trainer(precision=...)", " or ".join(PRECISIONS), repr(trainer.precision), hint)
        if (precision := PRECISIONS[trainer.precision]) is not None:
            train = replace(train, precision=_agreed("precision", precision, train.precision, "auto"))
        if trainer.max_steps >= 0:
            train = replace(train, steps=max(1, trainer.max_steps))
        parts, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        hint = "set train.accumulate or optim.clip_norm in the config, or leave captured=True out"
        flags: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "overfit_batches": 0}
        flags |= {"precision": "32-true"} if trainer.precision == "64-true" else {}
        for name, neutral in flags.items() if self.captured else ():
            got = getattr(trainer, name)
            refuse(got != neutral, f"Trainer({name}=...)", f"{neutral!r} with captured=True", repr(got), hint)
        if parts != 1:
            train = replace(train, accumulate=_agreed("accumulate_grad_batches", parts, train.accumulate, 1))
        elif not self.captured:
            trainer.accumulate_grad_batches = train.accumulate
        if clip is not None and trainer.gradient_clip_algorithm != "value":
            optim = replace(optim, clip_norm=_agreed("gradient_clip_val", float(clip), optim.clip_norm, 0.0))
        self.config = replace(config, train=train, optim=optim)
        if self.engine is not None:
            built = self.engine.config
            if (built.train.precision, built.optim) != (train.precision, optim):
                raise InputError("Trainer", "the precision and clipping of the module's first run", "others", MAKE_NEW)
            self.engine.reconfigure(self.config)

    @property
    def _data(self) -> NerfData:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, NerfData):
            raise InputError("datamodule", "a NerfData", type(data).__name__, "trainer.fit(NerfModule(c), NerfData(c))")
        return data

    def configure_model(self) -> None:
        """Build the trainer once the device and the scene are known."""
        if self.engine is not None or self._trainer is None:  # without a trainer: load_from_checkpoint makes the model
            return
        data, device = self._data, torch.device(self.trainer.strategy.root_device)
        team = Team()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            team = ProcessTeam(device, compression=self.config.train.compress_gradients)
        dtype = torch.get_default_dtype()  # float64 under Trainer(precision="64-true")
        torch.set_default_dtype(torch.float32)
        try:
            # Lightning makes its own device the default here; the trainer places things itself.
            with torch.device("cpu"):
                engine = Trainer(self.config, data.train_scene, device=device, team=team, **self._options)
            if dtype == torch.float64:
                engine.optimizer = Optimizer(engine.model.double(), engine.config.optim)
        finally:
            torch.set_default_dtype(dtype)
        if dtype == torch.float64:
            stages = self._options["stages"] or Stages()
            self._options["stages"] = replace(stages, draw=_doubled(stages.draw))
        if not self.captured:
            options = {"stages": self._options["stages"], "team": team}
            engine.stepper = TrainingStep(engine.model, engine.pixels, engine.optimizer, **options)
        engine.test_scene = data.test_scene if engine.config.train.target_psnr is not None else None
        self.engine, self.model, self.config = engine, engine.model, engine.config
        if self._start is not None:
            engine.resume(self._start)
        if self._restored is not None:
            self._restore(*self._restored)

    def configure_optimizers(self) -> Any:
        engine = self._engine
        self.optimizer = FieldAdam(engine.model, engine.config.optim, native=engine.optimizer)
        if self.captured:
            return self.optimizer

        def factor(n_steps: int) -> float:
            return engine.learning_rate / engine.config.optim.lr

        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _engine(self) -> Trainer:
        assert self.engine is not None
        return self.engine

    def _change(self, section: str, **values: Any) -> None:
        sections = {section: replace(getattr(self.config, section), **values)}
        self.config, self._asked = replace(self.config, **sections), replace(self._asked, **sections)
        if self.engine is not None:
            self.engine.reconfigure(self.config)

    # Peak learning rate and samples of a step, where Lightning's finders look for them.
    lr = property(lambda self: self.config.optim.lr, lambda self, value: self._change("optim", lr=float(value)))
    batch_size = property(
        lambda self: self.config.train.batch_samples,
        lambda self, value: self._change("train", batch_samples=int(value)),
    )

    @property
    def step(self) -> int:
        """Steps done since the start of training, those of the checkpoint it began from included."""
        return 0 if self.engine is None else self.engine.step

    def on_train_start(self) -> None:
        if isinstance(wrapped := self.trainer.strategy.model, torch.nn.parallel.DistributedDataParallel):
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = False  # the step does both itself
        self._check_minimum()
        engine, scaler = self._engine, getattr(self.trainer.precision_plugin, "scaler", None)
        engine.optimizer.scaled = engine.optimizer.half_dtype == torch.float16 and (self.captured or scaler is None)
        self._paused.close()  # what an earlier run has left behind
        self._results, self._ahead = [], 0
        engine.begin()
        self.trainer.should_stop = False  # set by a finder's trial
        self._stop_when_over()

    def _check_minimum(self) -> None:
        """Lightning goes on, whatever asks it to stop, until its minimum is met: the run must be as long."""
        trainer, train = self.trainer, self._engine.config.train
        loop, left = trainer.fit_loop, train.steps - self.step + trainer.global_step
        loop.min_epochs = 0 if loop.min_epochs == 1 else loop.min_epochs  # one is the whole run, however it ends
        epochs = (loop.min_epochs or 0) * loop.max_batches // trainer.accumulate_grad_batches
        for name, least in (("min_steps", trainer.min_steps or 0), ("min_epochs", epochs)):
            refuse(least > left, f"Trainer({name}=...)", f"at most the {left} steps of the run", least)
            if least and (train.time_limit, train.target_psnr) != (None, None):
                raise InputError(f"Trainer({name}=...)", "no train.time_limit or target_psnr beside it", str(least))

    def on_fit_end(self) -> None:
        engine = self._engine
        reason = engine.stop_reason if engine.should_stop or engine.progress >= 1.0 else "callback"
        self.summary = engine.end("interrupted" if self.trainer.interrupted else reason)

    def forward(self, positions: Tensor, directions: Tensor) -> None:
        """Refused: a step is more than what `torch.nn.DataParallel` could share out, and cannot be replicated."""
        hint = "several GPUs: Trainer(strategy='ddp'); points: module.model.field(positions, directions)"
        raise InputError("NerfModule", "a fit by lightning.Trainer", "a call, by torch.nn.DataParallel perhaps", hint)

    def cpu(self) -> "NerfModule":
        """Lightning ends with this on every module; this one stays where its graphs and buffers are."""
        return self if self.engine is not None else super().cpu()

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        engine = self._engine
        if not self.captured and not self._results:
            engine.prepare_step()
            engine.stepper.refresh(engine.step)  # type: ignore[union-attr]
            self.optimizer.follow()

    def training_step(self, batch: int, batch_idx: int) -> Tensor | None:
        with torch.autocast(self.device.type, enabled=False):  # the config has the flag's precision
            return self._captured_step() if self.captured else self._eager_loss(batch)

    def _eager_loss(self, batch: int) -> Tensor:
        """The loss of one batch of a step."""
        engine, parts = self._engine, self.trainer.accumulate_grad_batches
        step, part = engine.step, len(self._results)
        if self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            step, part = divmod(int(batch), parts)
        result = engine.stepper.loss(step, part, self._loss_scale(parts))  # type: ignore[union-attr]
        self._results.append(result)
        loss = result.loss
        if not loss.requires_grad:  # no samples anywhere
            loss = loss + sum(parameter.sum() * 0.0 for parameter in self.parameters())
        return loss

    def _loss_scale(self, parts: int) -> Tensor | None:
        """() what the loss will be multiplied by: by Lightning's GradScaler, or by `backward` below."""
        if (scaler := getattr(self.trainer.precision_plugin, "scaler", None)) is None:
            return gradient_scale(self._engine.optimizer, parts)
        return torch.tensor(scaler.get_scale() / parts, device=self.device)

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        engine = self._engine
        engine.optimizer.held.on = not (engine.team.alone or self.trainer.fit_loop._should_accumulate())
        backward(loss, engine.optimizer.loss_scale)

    def on_after_backward(self) -> None:
        """After the last batch of a step: the mean of all ranks' gradients."""
        engine = self._engine
        if self.captured or self.trainer.fit_loop._should_accumulate():
            return
        engine.optimizer.attach_gradients()
        result = mean_result(self._results)
        if not engine.team.alone:
            sums, wait = start_totals(result, engine.team)
            wait()
            result = engine.stepper.share(sums, result)  # type: ignore[union-attr]
        self._results = [result]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """The norm is clipped by the optimizer; single values are clipped here, before they are unscaled."""
        if gradient_clip_val is not None and gradient_clip_algorithm == "value":
            limit = float(gradient_clip_val) * float(self._loss_scale(1) or 1.0)
            for buffer in self._engine.optimizer.buffers:
                grads = buffer.grads  # what is not finite stays so: the step is skipped
                grads.copy_(torch.where(grads.isfinite(), grads.clamp(-limit, limit), grads))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        engine, step = self._engine, self._engine.step
        skipped = engine.optimizer.skipped.clone()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        stepper, (result,), parts = engine.stepper, self._results, self.trainer.accumulate_grad_batches
        done = (engine.optimizer.skipped - skipped, engine.optimizer.scale)
        self._results, self._made = [], result
        stepper.average(step)  # type: ignore[union-attr]
        self.last = stepper.record(step, result, *done, parts)  # type: ignore[union-attr]
        engine.note(self.last)

    def _captured_step(self) -> None:
        """One step more for Lightning; the trainer runs several at once, up to the next that anybody looks at."""
        engine, trainer = self._engine, self.trainer
        if self._ahead == 0:
            before, due, rate = engine.step, self._next_look(), engine.learning_rate
            while engine.step - before < due and not engine.is_over and engine.step < engine.config.train.steps:
                rate, self.last = engine.learning_rate, engine.advance(due - (engine.step - before))
            self._ahead = engine.step - before
            for group, buffer in zip(self.optimizer.param_groups, engine.optimizer.buffers, strict=True):
                group["lr"] = rate * buffer.rate / engine.config.optim.lr
        if self._ahead:
            self._ahead -= 1
            progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            for tracker in (progress.total, progress.current):
                tracker.ready += 1
                tracker.completed += 1
        if self._ahead == 0:
            if not self._quiet and self.last is not None:
                self._log(*(torch.tensor(value) for value in engine.stepper.newest()))
            self._stop_when_over()

    def _log(self, loss: Tensor, mse: Tensor) -> None:
        """Of the step in hand; the rest is of the last one that was read. A number would be waited for on a GPU."""
        assert self.last is not None
        self.log_dict({"loss": loss, "psnr": -10.0 * torch.log10(mse.clamp(min=1e-12))}, prog_bar=True)
        counts = {"n_rays": self.last.n_rays, "loss_scale": self.last.loss_scale, "skipped": self._engine.skipped}
        self.log_dict({n: torch.full((), float(v), device=self.device) for n, v in counts.items()})

    def _next_look(self) -> int:
        """Steps until a logger, a validation, a checkpoint or a callback of somebody's own looks at this module."""
        trainer: Any = self.trainer
        step, due = trainer.global_step, self.steps_per_call
        every = [trainer.log_every_n_steps] if trainer.loggers else []
        interval = trainer.val_check_batch or 1  # None: by the clock
        every += [int(interval)] if trainer.enable_validation and 0 < interval < float("inf") else []
        for callback in trainer.callbacks:
            hooks = ("on_train_batch_start", "on_train_batch_end")
            if all(getattr(type(callback), hook) is getattr(pl.Callback, hook) for hook in hooks):
                continue
            known = type(callback).__module__.startswith((__name__, "lightning.pytorch.callbacks"))
            if not known or getattr(callback, "_train_time_interval", None) is not None:
                return 1
            own = getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "every_n_steps", 0)
            every += [own] if own else []
        return min(due, *(n - step % n for n in every)) if every else due

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.captured and not self._results and self.last is not None:  # a whole step was made
            self._log(self._made.loss.detach().float(), self._made.mse.float())
            self._stop_when_over()

    def _stop_when_over(self) -> None:
        engine = self._engine
        if engine.step >= engine.config.train.steps or engine.is_over:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """The running mean of the weights is scored, where one is kept, and the clock stands still."""
        if self.engine is not None:
            self._paused.enter_context(self.engine.clock_stopped())
            self._paused.enter_context(self.engine.optimizer.averaged())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        self._paused.close()

    on_test_end = on_predict_end = on_validation_end

    def validation_step(self, batch: int, batch_idx: int) -> None:
        """PSNR of one test view over white, logged as `val_psnr`; in `test` as `test_psnr`."""
        assert self.model is not None
        scene, name = self._data.test_scene, "test_psnr" if self.trainer.testing else "val_psnr"
        value = view_psnr(self.model, scene, int(batch) % len(scene))
        self.log(name, torch.tensor(value, device=self.device), batch_size=1, sync_dist=True)

    test_step = validation_step

    @torch.no_grad()
    def predict_step(self, batch: int, batch_idx: int) -> Tensor:
        """(height, width, 3): a test view, rendered over white."""
        assert self.model is not None
        return self.model.render_image(self._data.test_scene.cameras, int(batch)).rgb

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Of the weights that are trained: saving may come in the middle of a validation of their mean."""
        self._paused.close()
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What a checkpoint of the native trainer holds besides the weights."""
        engine = self._engine
        engine.stepper.finish()
        tensors = {name: value.detach().cpu() for name, value in engine.optimizer.state_tensors().items()}
        checkpoint[LIGHTNING_KEY] = {"state": vars(engine.state()), "optimizer": tensors}
        checkpoint["optimizer_states"] = []  # they are the tensors above

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own: Any = checkpoint.get(LIGHTNING_KEY)
        refuse(own is None, "checkpoint", "one of a NerfModule", "no entry of nerfturbo in it")
        checkpoint["optimizer_states"] = []
        state = CheckpointState(**own["state"])
        self._restored = (state, checkpoint["state_dict"], own["optimizer"])
        if self.engine is not None:
            self._restore(*self._restored)
        elif self.model is None:  # load_from_checkpoint, without a trainer
            plugged = {name: self._options[name] for name in ("field", "sampler")}
            self.model = NerfModel(self.config, SceneBounds.from_dict(state.bounds), **plugged)
            match_shapes(self.model, checkpoint["state_dict"])

    def _restore(self, state: CheckpointState, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        engine = self._engine
        if match_shapes(engine.model, weights):
            engine.restructure()
        engine.model.load_state_dict(field_part(weights, "model."))
        engine.optimizer.load_state_tensors(optimizer)
        engine.restore(state)


def _agreed(flag: str, wanted: Any, configured: Any, neutral: Any) -> Any:
    """What Lightning's flag says, unless the config says something else."""
    name = {"precision": "train.precision", "gradient_clip_val": "optim.clip_norm"}.get(flag, "train.accumulate")
    hint = f"set one of them, or both alike: {name} in the config is {configured!r}"
    refuse(configured not in (neutral, wanted), f"Trainer({flag}=...)", repr(configured), repr(wanted), hint)
    return wanted


def _doubled(draw: Callable[..., PixelBatch]) -> Callable[..., PixelBatch]:
    def drawn(*args: Any) -> PixelBatch:
        batch = draw(*args).arrived()
        rays = replace(batch.rays, origins=batch.rays.origins.double(), directions=batch.rays.directions.double())
        return replace(batch, rays=rays, rgba=batch.rgba.double())

    return drawn


def load_module(path: Path | str) -> NerfModule:
    """The module of Lightning's checkpoint file, to render with or to look at."""
    return NerfModule.load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()


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
        cameras = pl_module._data.test_scene.cameras
        with pl_module._engine.clock_stopped():
            image = pl_module.model.render_image(cameras, self.view).rgb.clamp(0.0, 1.0).cpu()
        board = getattr(trainer.logger, "experiment", None)
        if hasattr(board, "add_image"):
            board.add_image("test_view", image, trainer.global_step, dataformats="HWC")  # type: ignore[union-attr]
            return
        save_image(Path(trainer.log_dir or trainer.default_root_dir) / f"view_{trainer.global_step:08d}.png", image)


class _KeepSignals(pl.Callback):
    """SIGTERM stays with whoever had it before: Lightning's own handler ends a run without a word."""

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)


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
        with warnings.catch_warnings(action="ignore"):
            # No validation: the session scores the test views; here it would render every training view.
            run = {"max_epochs": -1, "limit_val_batches": 0, "callbacks": [_KeepSignals()], **team}
            off = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
            run |= dict.fromkeys(off, False)
            trainer = pl.Trainer(accelerator="gpu" if engine.device.type == "cuda" else "cpu", **run)
            module = NerfModule(engine.config, engine=engine)
            trainer.fit(module, NerfData(engine.config, (engine.scene, engine.scene)))
    finally:
        log.setLevel(level)
    return module.summary or engine.end("interrupted")
