"""A checkpoint that is restored into a trainer that went on."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nerfturbo.config import Config, FactorConfig, VoxelConfig
from nerfturbo.errors import CheckpointError
from nerfturbo.ops import use_backend
from nerfturbo.training import refine
from nerfturbo.training.callbacks import every, save_checkpoints
from nerfturbo.training.checkpoint import list_checkpoints
from nerfturbo.training.trainer import Trainer, load_model

from ..tiny import ball_scene, tiny_config
from .workers import QUIET

STEPS, SAVED, STOPPED = 24, 9, 17
WARNINGS = ["ignore::UserWarning", "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"]


@pytest.fixture(autouse=True)
def _shorter(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr("nerfturbo.fields.field.MIN_STEPS", 2)
    monkeypatch.setitem(refine.MARKED, "cpu", 512)  # rays of a look, which would take longer than all steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with use_backend("auto"):
        yield


def scene(size: int = 32) -> Any:
    return ball_scene(size=size)


def config_of(kind: str) -> Config:
    """Something that changes between the saved step and the one where the trainer stops."""
    config = tiny_config(steps=STEPS)
    if kind == "voxels":
        return replace(config, field=VoxelConfig((6, 12), (0.5,), sh_degree=1))
    if kind == "factor":
        return replace(config, field=FactorConfig((6, 12), (0.5,), (2, 2), 16))
    if kind == "culled":
        grid = replace(config.grid, cull_unseen=True, resolution=24)
        train = replace(config.train, batch_samples=1 << 13, max_rays=256)
        return replace(config, grid=grid, train=train, field=replace(config.field, initial_density=100.0))
    changes = {"plain": {}, "coarse": {"coarse_fraction": 0.5}}
    return replace(config, train=replace(config.train, **changes[kind]))


def assert_same(one: Trainer, two: Trainer) -> None:
    found, wanted = ({**t.model.state_dict(), **t.optimizer.state_tensors()} for t in (one, two))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert one.pixels.scene.images.n_pixels == two.pixels.scene.images.n_pixels
    counts = [(t.step, t.stepper.n_rays, t.rays, t.samples, t.skipped, t.should_stop) for t in (one, two)]
    assert counts[0] == counts[1]


KINDS = ["plain", "coarse", "voxels", "factor", "culled"]


def resumed_losses(trainer: Trainer, checkpoint: Path) -> list[float]:
    losses: list[float] = []
    trainer.callbacks = [lambda _, record: losses.append(record.loss)]
    trainer.resume(checkpoint)
    assert trainer.step == SAVED and not trainer.should_stop
    assert trainer.fit().stopped_by == "steps"
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_checkpoint_restores_into_a_trainer_that_went_on(tmp_path: Path, kind: str) -> None:
    def look(trainer: Trainer, record: Any) -> None:
        if record.step == SAVED:
            trainer.save(tmp_path)
        if record.step == STOPPED:
            trainer.stop("target psnr")

    used, fresh = Trainer(config_of(kind), scene(), callbacks=[look]), Trainer(config_of(kind), scene())
    assert used.fit().stopped_by == "target psnr" and used.step == STOPPED
    (path,) = list_checkpoints(tmp_path)
    assert resumed_losses(used, path) == resumed_losses(fresh, path)
    assert_same(used, fresh)


def test_a_checkpoint_of_error_guided_draws_opens_and_resumes(tmp_path: Path) -> None:
    trainer = Trainer(config_of("plain"), scene())
    path = trainer.save(tmp_path)
    tensors, state = load_file(path / "tensors.safetensors"), json.loads((path / "state.json").read_text())
    save_file(tensors | {"optimizer.error_map": torch.zeros(3, 27)}, path / "tensors.safetensors")
    state["config"]["train"]["draw"] = "error"
    (path / "state.json").write_text(json.dumps(state))
    assert load_model(path).config == trainer.model.config
    trainer.resume(path)
    assert trainer.step == 0


def test_what_the_optimizer_lacks_is_named(tmp_path: Path) -> None:
    trainer = Trainer(config_of("plain"), scene())
    path = trainer.save(tmp_path)
    tensors = load_file(path / "tensors.safetensors")
    lost = next(name for name in sorted(tensors) if name.startswith("optimizer."))
    save_file({name: value for name, value in tensors.items() if name != lost}, path / "tensors.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(lost)} is missing; training cannot go on"):
        trainer.resume(path)


@pytest.mark.parametrize("kind", ["plain", "coarse"])
def test_a_restored_run_is_the_one_that_never_stopped(tmp_path: Path, kind: str) -> None:
    config = config_of(kind)
    whole = Trainer(config, scene())
    whole.callbacks.append(every(SAVED, save_checkpoints(tmp_path, keep=9)))
    whole.fit()
    again = Trainer(config, scene())
    again.resume(list_checkpoints(tmp_path)[0])
    again.fit()
    again.rays, again.samples = whole.rays, whole.samples  # of this run alone
    assert_same(again, whole)


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["coarse", "voxels"])
def test_under_lightning_too(tmp_path: Path, kind: str, captured: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from nerfturbo.training.lightning import NerfData, NerfModule

    config = config_of(kind)

    def fit(module: Any, **options: Any) -> None:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
        flags = QUIET | {"enable_checkpointing": True, "accelerator": "cpu", "limit_val_batches": 0}
        trainer = pl.Trainer(**flags, callbacks=[saving])
        trainer.fit(module, NerfData(config, (scene(), scene())), weights_only=False, **options)

    whole, fresh = NerfModule(config, captured=captured), NerfModule(config, captured=captured)
    fit(whole)
    assert whole.engine is not None
    kept = {name: value.clone() for name, value in whole.engine.model.state_dict().items()}
    for module in (whole, fresh):
        fit(module, ckpt_path=tmp_path / f"step={SAVED}.ckpt")
        assert all(torch.equal(value, kept[name]) for name, value in module.engine.model.state_dict().items())
    assert_same(whole.engine, fresh.engine)


@pytest.mark.gpu
def test_a_recorded_step_counts_from_the_checkpoint_it_is_restored_to(tmp_path: Path) -> None:
    """What was queued before is neither reported nor counted; a batch of another size is recorded anew."""
    config, reports = tiny_config(steps=64), {}
    with use_backend("triton"):
        used = Trainer(config, scene(), device="cuda", callbacks=[every(16, save_checkpoints(tmp_path, keep=9))])
        used.fit()
        path = list_checkpoints(tmp_path)[0]
        for trainer in (used, Trainer(config, scene(), device="cuda")):
            records: list[Any] = []
            trainer.callbacks = [lambda _, record, records=records: records.append(record)]
            trainer.resume(path)
            first = trainer.step
            trainer.fit()
            reports[trainer is used] = records
            assert trainer.step == 64 and 0 < trainer.rays <= 64 * (64 - first)
        assert [r.step for r in reports[True]] == [r.step for r in reports[False]]
        assert reports[True][0].loss == pytest.approx(reports[False][0].loss, rel=0.05)
        assert reports[True][0].total_rays == pytest.approx(reports[False][0].total_rays, rel=0.05)
        used.reconfigure(replace(config, train=replace(config.train, batch_samples=2048, max_rays=1024, steps=128)))
        used.fit()
        assert used.step == 128 and 1024 < reports[True][-1].n_samples <= 2048
