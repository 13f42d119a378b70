"""The same training written five ways, each as short as it gets: what `benchmarks/trainers.py` runs and counts.

Each function trains `config.train.steps` steps and calls `tick(steps done, loss)` after every step, or after as many as
are queued at once. `plain` is the loop one writes by hand in PyTorch; the others are what takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nerfturbo.config import Config
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.scene import Scene
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.optim import FieldAdam, learning_rate
from nerfturbo.training.step import TrainingStep
from nerfturbo.training.trainer import Trainer, mark_unseen_cells

Tick = Callable[[int, float], None]
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "limit_val_batches": 0,  # none of the other loops validates
    "logger": False,
}


def plain(config: Config, scene: Scene, device: torch.device, tick: Tick) -> NerfModel:
    model = NerfModel(config, SceneBounds.of(scene)).to(device)
    mark_unseen_cells(model, scene)
    optimizer = FieldAdam(model, config.optim)
    batches = TrainingStep(model, PixelSampler(scene, device, config.train.seed), optimizer.native)
    for step in range(config.train.steps):
        if step % config.grid.update_every == 0:
            model.grid.update(step, model.field.density)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, step / config.train.steps)
        result = batches.loss(step)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        batches.adapt(int(result.n_samples), int(result.n_marched))
        tick(step + 1, float(result.loss.detach()))
    return model


def native(config: Config, scene: Scene, device: torch.device, tick: Tick) -> NerfModel:
    trainer = Trainer(config, scene, device=device)
    trainer.callbacks.append(lambda trainer, record: tick(record.step, record.loss))
    trainer.fit()
    return trainer.model


def lightning(config: Config, scene: Scene, device: torch.device, tick: Tick) -> NerfModel:
    from nerfturbo.training.lightning import NerfData, NerfModule, pl

    class Tell(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            tick(pl_module.step, pl_module.last.loss)

    module = NerfModule(config)
    pl.Trainer(accelerator=_kind(device), devices=1, callbacks=[Tell()], **QUIET).fit(
        module, NerfData(config, (scene, scene))
    )
    assert module.model is not None
    return module.model


def lightning_captured(config: Config, scene: Scene, device: torch.device, tick: Tick) -> NerfModel:
    from nerfturbo.training.lightning import NerfData, NerfModule, pl

    engine = Trainer(config, scene, device=device, callbacks=[lambda _, record: tick(record.step, record.loss)])
    module = NerfModule(config, engine=engine)
    pl.Trainer(accelerator=_kind(device), devices=1, **QUIET).fit(module, NerfData(config, (scene, scene)))
    return engine.model


def fabric(config: Config, scene: Scene, device: torch.device, tick: Tick) -> NerfModel:
    from lightning.fabric import Fabric

    made = Fabric(accelerator=_kind(device), devices=1)
    model = NerfModel(config, SceneBounds.of(scene)).to(device)
    mark_unseen_cells(model, scene)
    adam = FieldAdam(model, config.optim)
    batches = TrainingStep(model, PixelSampler(scene, device, config.train.seed), adam.native)
    optimizer: Any = made.setup_optimizers(adam)
    for step in range(config.train.steps):
        if step % config.grid.update_every == 0:
            model.grid.update(step, model.field.density)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, step / config.train.steps)
        result = batches.loss(step)
        optimizer.zero_grad()
        made.backward(result.loss)
        optimizer.step()
        batches.adapt(int(result.n_samples), int(result.n_marched))
        tick(step + 1, float(result.loss.detach()))
    return model


def _kind(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else "cpu"
