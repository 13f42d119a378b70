"""Voxels and planes that change their shapes while training: quality, resuming on both sides, nothing visible lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.config import Config, FactorConfig, VoxelConfig
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.evaluation.metrics import constant_baseline_psnr
from nerfturbo.fields import VoxelGrid, field
from nerfturbo.ops import use_backend
from nerfturbo.training import Trainer, load_model, refine
from nerfturbo.training.refine import refine_field

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True, scope="module")
def _short_stages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "MIN_STEPS", 1)
        patch.setitem(refine.MARKED, "cpu", 2048)
        yield


@pytest.fixture(autouse=True)
def _kernels() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's scattered sums on several threads have no order
    with use_backend("auto"):
        yield
    torch.set_num_threads(threads)


def voxel_config(steps: int = 90, **train: Any) -> Config:
    config = tiny_config(steps=steps)
    return replace(
        config,
        field=VoxelConfig(resolutions=(8, 16), subdivide_at=(0.5,), sh_degree=2),
        optim=replace(config.optim, lr=5e-2),
        train=replace(config.train, **train),
    )


def factor_config(steps: int = 90) -> Config:
    return replace(voxel_config(steps), field=FactorConfig((6, 12), (0.4,), components=(3, 3), width=16))


@pytest.fixture(scope="module")
def trained(_short_stages: None) -> Trainer:
    with use_backend("auto"):
        trainer = Trainer(voxel_config(), ball_scene())
        trainer.fit()
        return trainer


def assert_good(trainer: Trainer) -> None:
    test = ball_scene("test")
    found = evaluate(trainer.model, test, with_ssim=False).psnr
    assert found >= constant_baseline_psnr(test) + 6.0


def same(one: Any, two: Any) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_voxels_learn_the_ball(trained: Trainer) -> None:
    field = trained.model.field
    assert isinstance(field, VoxelGrid) and (field.resolution, field.stage) == (16, 1)
    assert field.history.tolist() == [9**3, field.n_nodes] and field.n_nodes < 17**3
    assert_good(trained)


def test_planes_and_lines_learn_the_ball() -> None:
    trainer = Trainer(factor_config(), ball_scene())
    trainer.fit()
    assert trainer.model.field.resolution == 12
    assert_good(trainer)


def test_mixed_precision_learns_it_too() -> None:
    trainer = Trainer(voxel_config(60, precision="fp16"), ball_scene())
    trainer.fit()
    field = trainer.model.field
    assert field.half_table is not None and field.half_table.shape == field.color_table.shape
    assert torch.equal(field.half_table, field.color_table.half())  # the copy follows the new table
    assert_good(trainer)


def test_pruning_never_removes_what_is_visible(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of training and test views are the same before and after voxels were pruned and divided by two."""
    monkeypatch.setitem(refine.MARKED, "cpu", 8192)
    finer = replace(trained.config.field, resolutions=(16, 32), subdivide_at=(0.5,))
    trainer = Trainer(replace(trained.config, field=finer), ball_scene())
    model = trainer.model
    model.load_state_dict(trained.model.state_dict())
    scenes = ball_scene(), ball_scene("test")
    before = [model.render_image(scene.cameras, i).rgb for scene in scenes for i in range(len(scene))]
    nodes = model.field.n_nodes
    model.field.register_buffer("history", model.field.history[:1])  # as at the end of the first stage
    refine_field(model, scenes[0].cameras, step=0)
    assert model.field.resolution == 32 and model.field.n_nodes < 8 * nodes
    after = [model.render_image(scene.cameras, i).rgb for scene in scenes for i in range(len(scene))]
    for old, new in zip(before, after, strict=True):
        assert (old - new).abs().max() < 0.02 and (old - new).abs().mean() < 1e-3


@pytest.mark.parametrize("kind", ["voxels", "factor"])
@pytest.mark.parametrize("stop", [4, 8])
def test_resuming_on_either_side_of_a_subdivision_equals_never_having_stopped(
    tmp_path: Path, kind: str, stop: int
) -> None:
    config = voxel_config(12) if kind == "voxels" else factor_config(12)
    config = replace(config, optim=replace(config.optim, ema_decay=0.9))
    whole = Trainer(config, ball_scene())
    whole.fit()
    first = Trainer(config, ball_scene())
    first.callbacks.append(lambda trainer, record: setattr(trainer, "should_stop", record.step == stop))
    first.fit()
    assert first.model.field.stage == (0 if stop == 4 else 1)
    checkpoint = first.save(tmp_path)
    second = Trainer(config, ball_scene())
    second.resume(checkpoint)
    assert second.model.field.stage == first.model.field.stage
    second.fit()
    assert same(second.model, whole.model)
    moments, truth = second.optimizer.state_tensors(), whole.optimizer.state_tensors()
    assert all(torch.equal(value, truth[name]) for name, value in moments.items())
    loaded = load_model(second.save(tmp_path / "end"))
    with whole.optimizer.averaged():
        for name, value in whole.model.field.state_dict().items():
            assert torch.equal(loaded.field.state_dict()[name], value), name


def test_moments_go_along() -> None:
    trainer = Trainer(voxel_config(), ball_scene())
    for _ in range(4):
        trainer.advance()
    before = {name: value.clone() for name, value in trainer.optimizer.state_tensors().items()}
    steps = int(trainer.optimizer.step_count)
    trainer.restructure(refine_field(trainer.model, ball_scene().cameras, step=4))
    after = trainer.optimizer.state_tensors()
    assert int(trainer.optimizer.step_count) == steps
    for kind in ("first", "second"):
        old, new = before[f"field.density_table.{kind}"], after[f"field.density_table.{kind}"]
        assert old.shape != new.shape and 0.0 < float(new.abs().max()) <= float(old.abs().max()) * 1.0001
    assert float(after["field.density_table.second"].min()) >= 0.0


def test_lightning_resumes_on_either_side_too(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from nerfturbo.training.lightning import NerfData, NerfModule

    from .test_lightning import StopAt
    from .workers import QUIET

    config = voxel_config(8)
    whole = Trainer(config, ball_scene())
    whole.fit()

    def fit(module: Any, steps: int, path: Path | None = None) -> Any:
        trainer = pl.Trainer(accelerator="cpu", callbacks=[StopAt(steps)], **QUIET)
        data = NerfData(config, (ball_scene(), ball_scene("test", n_views=1)))
        trainer.fit(module, data, ckpt_path=path, weights_only=False)
        return trainer

    for captured in (False, True):
        for stop in (3, 6):
            path = tmp_path / f"{captured}-{stop}.ckpt"
            first = NerfModule(config, captured=captured, steps_per_call=3)
            fit(first, stop).save_checkpoint(path)
            again = NerfModule(config, captured=captured, steps_per_call=3)
            fit(again, 8, path)
            assert again.model is not None and again.model.field.stage == 1
            for name, value in whole.model.state_dict().items():
                assert torch.allclose(again.model.state_dict()[name], value, rtol=1e-5, atol=1e-6), name
            native = Trainer(config, ball_scene())
            native.resume(path)
            assert (native.step, native.model.field.stage) == (stop, 0 if stop == 3 else 1)
