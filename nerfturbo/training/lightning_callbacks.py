"""What hangs on the native loop, as callbacks of Lightning: the grid's update, the non-finite guard, pictures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ..data.images import save_image
from ..fields.field import AdaptiveField
from .lightning import NerfModule
from .refine import is_due, refine_field
from .torch_adam import FieldAdam

LOG = logging.getLogger("nerfturbo")


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
        if not isinstance(batches.model.field, AdaptiveField) or step == self._last:  # never between accumulated parts
            return
        self._last = step
        if not is_due(batches.model, pl_module.progress, step):
            return
        cameras = batches.sampler.scene.cameras
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
