"""Every preset, made so small that a step costs milliseconds, under both trainers, in both precisions, by one process
and by two: what the processes of `test_matrix.py` run.

Presets come from `presets.py`; a new one joins by itself. Where a preset has a twin for CPUs, the full one is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.config import Config, from_dict, to_dict
from nerfturbo.data.scene import Scene
from nerfturbo.fields import field
from nerfturbo.fields.field import is_adaptive
from nerfturbo.ops import use_backend
from nerfturbo.presets import preset, preset_names
from nerfturbo.sampling.grid import OccupancyGrid
from nerfturbo.training import refine
from nerfturbo.training.distributed import Team
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene
from .workers import QUIET

STEPS = 4
RESUMED = ("voxels", "fp32", "resumed on rank 0")

# The most that a setting may be, wherever a config has one of this name: numbers, or each number of a tuple.
MOST = {
    "resolution": 8,
    "warmup_steps": 4,
    "n_levels": 2,
    "log2_entries": 8,
    "max_resolution": 32,
    "motion_log2_entries": 8,
    "motion_resolution": 16,
    "width": 16,
    "depth": 3,
    "steps_per_diagonal": 24,
    "batch_samples": 512,
    "max_rays": 64,
    "components": 2,
    "n_samples": 8,
    "coarse_samples": 8,
    "levels": 2,
    "resolutions": 16,
}


def names() -> list[str]:
    known = preset_names()
    return [name for name in known if not (name.endswith("-cpu") and name.removesuffix("-cpu") in known)]


def tiny_preset(name: str, *, rays: int = 1, precision: str = "fp32") -> Config:
    """The preset with everything shrunken; subdivisions come in the middle of the run."""
    values = to_dict(preset(name))
    for section in values.values():
        if isinstance(section, dict):
            for key, most in MOST.items():
                if key in section:
                    old = section[key]
                    section[key] = [min(v, most) for v in old] if isinstance(old, list | tuple) else min(old, most)
    for share in ("subdivide_at", "refine_at"):
        if share in values["field"]:
            values["field"] |= {"resolutions": [4, 8], share: [0.5]}
    values["train"] |= {"steps": STEPS, "precision": precision}
    for key in ("batch_samples", "max_rays"):
        values["train"][key] *= rays
    return from_dict(Config, values)


@contextmanager
def small_constants() -> Iterator[None]:
    """Inside, stages may be a step long, and few rays say what is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "MIN_STEPS", 1)
        patch.setitem(refine.MARKED, "cpu", 256)
        patch.setattr(OccupancyGrid, "warmup_steps", 4)
        yield


def scene_for(config: Config, split: str = "train") -> Scene:
    scene = ball_scene(split)
    if not config.follows_time:
        return scene
    times = torch.linspace(0.0, 1.0, len(scene))
    return dataclasses.replace(scene, cameras=replace(scene.cameras, times=times))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one training."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    stage: int | None  # of a field that changes its shapes


def outcome(losses: list[float], model: Any) -> Outcome:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    field = model.field
    return Outcome(losses, state, getattr(field, "stage", None) if is_adaptive(field) else None)


def train_native(name: str, team: Team, precision: str) -> Outcome:
    config, losses = tiny_preset(name, rays=2 // team.world, precision=precision), []
    trainer = Trainer(config, scene_for(config), team=team)
    trainer.callbacks.append(lambda _, record: losses.append(record.loss))
    trainer.fit()
    return outcome(losses, trainer.model)


def train_lightning(name: str, team: Team, precision: str) -> Outcome:
    import lightning.pytorch as pl

    from nerfturbo.training.lightning import NerfData, NerfModule

    losses: list[float] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
            losses.append(float(pl_module.last.loss))

    config = tiny_preset(name, rays=2 // team.world, precision="auto")  # the flag decides
    module = NerfModule(config)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=team.world,
        strategy="auto" if team.alone else "ddp",
        precision="32-true" if precision == "fp32" else "bf16-mixed",
        callbacks=[Keep()],
        limit_val_batches=1,  # a view of it at the end, which takes as long as all steps
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, NerfData(config, (scene_for(config), scene_for(config, "test"))))
    return outcome(losses, module.model)


def resume_on_first(team: Team, folder: str) -> Outcome:
    """Rank 0 alone reads a checkpoint of voxels that were subdivided; the others take shapes and values from it."""
    config, losses = tiny_preset("voxels", rays=2 // team.world), []
    first = Trainer(config, scene_for(config), team=team)
    first.callbacks.append(lambda trainer, record: setattr(trainer, "should_stop", record.step == STEPS - 1))
    first.fit()
    second = Trainer(config, scene_for(config), team=team)
    if team.rank == 0:
        second.resume(first.save(Path(folder) / "checkpoints"))
    second.callbacks.append(lambda _, record: losses.append(record.loss))
    second.fit()
    return outcome(losses, second.model)


def run_matrix(team: Team, folder: str) -> dict[tuple[str, str, str], Outcome | str]:
    """What each cell came to; an error as its text, so that one cell does not hide the others."""
    with small_constants(), use_backend("cpu"):
        return _run_matrix(team, folder)


def _run_matrix(team: Team, folder: str) -> dict[tuple[str, str, str], Outcome | str]:
    found: dict[tuple[str, str, str], Outcome | str] = {RESUMED: resume_on_first(team, folder)}
    for name in names():
        for precision in ("fp32", "mixed"):
            for trainer, train in (("native", train_native), ("lightning", train_lightning)):
                try:
                    found[name, precision, trainer] = train(name, team, "fp32" if precision == "fp32" else "fp16")
                except Exception as error:
                    found[name, precision, trainer] = f"{type(error).__name__}: {error}"
    return found
