"""Under Lightning: the native trainer's curve, every flag people use, checkpoints that either trainer reads."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")

from nerfturbo.config import (  # noqa: E402
    Config,
    DataConfig,
    FactorConfig,
    FieldConfig,
    VanillaConfig,
    VoxelConfig,
)
from nerfturbo.errors import CheckpointError, InputError  # noqa: E402
from nerfturbo.ops import use_backend  # noqa: E402
from nerfturbo.training.checkpoint import native_from_lightning, read_state  # noqa: E402
from nerfturbo.training.lightning import (  # noqa: E402
    ImageLog,
    NerfData,
    NerfModule,
    fit_with_lightning,
    load_module,
)
from nerfturbo.training.loss import Stages, render_and_compare  # noqa: E402
from nerfturbo.training.optim import learning_rate  # noqa: E402
from nerfturbo.training.stability import UnstableError  # noqa: E402
from nerfturbo.training.trainer import Trainer  # noqa: E402

from ..data import folders  # noqa: E402
from ..tiny import ball_scene, tiny_config  # noqa: E402
from .workers import QUIET  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> object:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with use_backend("auto"):
        yield


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if module.last is not None:
            self.values.append(float(module.last.loss))


class StopAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        trainer.should_stop |= module.step >= self.step


def data(config: Config) -> NerfData:
    return NerfData(config, (ball_scene(), ball_scene("test", n_views=2)))


def fit(module: NerfModule, ckpt_path: Path | None = None, **flags: Any) -> Any:
    trainer = pl.Trainer(**(QUIET | {"accelerator": "cpu"} | flags))
    trainer.fit(module, data(module.config), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def native(config: Config) -> tuple[Trainer, list[float]]:
    losses: list[float] = []
    trainer = Trainer(config, ball_scene(), callbacks=[lambda _, record: losses.append(record.loss)])
    trainer.fit()
    return trainer, losses


def same(one: Any, two: Any, tolerance: float = 1e-6) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance) for a, b in pairs)


def test_scenes_are_opened_as_the_config_says(tmp_path: Path) -> None:
    """Bounds and trust as for `nerfturbo train`; without a test split some of the training views are held out."""
    folder = folders.write_blender_json(tmp_path / "scene")
    config = replace(tiny_config(), data=DataConfig(source=str(folder), bounds="unbounded"))
    assert NerfData(config).train_scene.grid_levels > 1
    file = folder / "transforms_train.json"
    (folder / "images").rename(tmp_path / "elsewhere")
    file.write_text(file.read_text().replace("./images/", "../elsewhere/"))
    with pytest.raises(InputError, match="allow-outside"):
        NerfData(config).setup()
    data = NerfData(replace(config, data=replace(config.data, allow_outside=True)))
    assert len(data.train_scene) > 0 and len(data.test_scene) > 0


def test_the_loss_curve_is_that_of_the_native_trainer() -> None:
    config, losses, module = tiny_config(steps=40), Losses(), NerfModule(tiny_config(steps=40))
    trainer, truth = native(config)
    lightning = fit(module, max_steps=40, callbacks=[losses])
    assert lightning.global_step == 40
    assert losses.values == pytest.approx(truth, rel=1e-5)
    assert same(module.model, trainer.model)


@pytest.mark.parametrize(
    "field",
    [tiny_config().field, VanillaConfig(width=16), FactorConfig(), VoxelConfig((16,), ())],
    ids=lambda field: field.kind,
)
def test_a_default_device_of_lightning_s_moves_nothing(field: FieldConfig) -> None:
    """It makes its own device the default while the model is built; "meta" stands for a GPU here."""

    class Elsewhere(NerfModule):
        def configure_model(self) -> None:
            with torch.device("meta"):
                super().configure_model()

    config = replace(tiny_config(steps=2), field=field)
    module = Elsewhere(config)
    fit(module, max_steps=2)
    assert module.model is not None and module.step == 2
    tensors = [*module.model.parameters(), *module.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert same(module.model, native(config)[0].model, 1e-4)


def test_captured_steps_are_the_native_trainer_and_count_as_steps() -> None:
    config = tiny_config(steps=40)
    seen: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            seen.append(trainer.global_step)

    module = NerfModule(config, captured=True, steps_per_call=16)
    lightning = fit(module, max_steps=37, callbacks=[Count()])
    assert seen == [*range(1, 38)] and lightning.global_step == 37
    trainer = Trainer(tiny_config(steps=37), ball_scene())
    trainer.fit()
    assert same(module.model, trainer.model, 0.0)
    whole = NerfModule(config, captured=True)
    assert fit(whole).global_step == 40  # without max_steps the config's steps end it


@pytest.mark.parametrize(
    "flags",
    [{"overfit_batches": 2}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_that_contradict_the_captured_step_are_refused_by_name(flags: dict[str, Any]) -> None:
    name, config = next(iter(flags)), tiny_config()
    with pytest.raises(InputError, match=rf"Trainer\({name}=\.\.\.\).*captured=True"):
        fit(NerfModule(config, captured=True), max_steps=2, **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "bf16-mixed", "max_steps": 2},
        {"gradient_clip_val": 0.5, "max_steps": 2},
        {"accumulate_grad_batches": 2, "max_steps": 2},
        {"fast_dev_run": 2},
        {"profiler": "simple", "max_steps": 2},
        {"max_time": "00:01:00:00", "max_steps": 3},
        {"devices": 1, "strategy": "auto", "limit_val_batches": 1, "max_steps": 2, "val_check_interval": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_of_the_trainer_work(flags: dict[str, Any], tmp_path: Path) -> None:
    module = NerfModule(tiny_config(steps=4))
    trainer = fit(module, default_root_dir=tmp_path, **flags)
    assert trainer.global_step == min(trainer.max_steps, 4)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_accumulated_batches_are_those_of_the_native_trainer() -> None:
    config = tiny_config(steps=6)
    truth = Trainer(replace(config, train=replace(config.train, accumulate=2)), ball_scene())
    truth.fit()
    module = NerfModule(config)
    fit(module, max_steps=6, accumulate_grad_batches=2)
    assert same(module.model, truth.model, 1e-5)


def test_loggers_callbacks_and_validation(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    flags = {"logger": CSVLogger(tmp_path), "enable_checkpointing": True, "log_every_n_steps": 2}
    callbacks = [saving, LearningRateMonitor("step"), ImageLog(every_n_steps=3)]
    trainer = fit(NerfModule(tiny_config(steps=4)), max_steps=4, callbacks=callbacks, **flags)
    names = (Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "loss" in names and "lr-FieldAdam" in names
    assert len(list(Path(trainer.log_dir).glob("view_*.png"))) == 1
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]
    assert 3.0 < trainer.validate(trainer.lightning_module, trainer.datamodule, verbose=False)[0]["val_psnr"] < 40.0


@pytest.mark.parametrize("captured", [False, True])
def test_callbacks_count_optimizer_steps_and_see_the_step_in_hand(tmp_path: Path, captured: bool) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    config = tiny_config(steps=30)
    _, losses = native(config)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=12, save_top_k=-1)
    flags = {"logger": CSVLogger(tmp_path), "enable_checkpointing": True, "log_every_n_steps": 10}
    made = fit(NerfModule(config, captured=captured), callbacks=[saving, LearningRateMonitor()], **flags)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=12.ckpt", "step=24.ckpt"]
    with (Path(made.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]}
    assert logged == pytest.approx({9: losses[9], 19: losses[19], 29: losses[29]}, rel=1e-5)
    rates = {int(row["step"]): float(row["lr-FieldAdam/pg1"]) for row in rows if row["lr-FieldAdam/pg1"]}
    assert rates[29] == pytest.approx(learning_rate(config.optim, 29, 29 / 30), rel=1e-6)

    stop = EarlyStopping("val_psnr", mode="max", patience=1, min_delta=100.0)
    checks = {"val_check_interval": 10, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    assert fit(NerfModule(config, captured=captured), callbacks=[stop], **checks).global_step == 20


@pytest.mark.parametrize("captured", [False, True])
def test_a_run_that_crashes_leaves_a_checkpoint_to_resume(tmp_path: Path, captured: bool) -> None:
    class Crash(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if module.step == 7:
                raise ValueError("crash")

    config = tiny_config(steps=14)
    whole, _ = native(config)
    flags = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.raises(ValueError, match="crash"):
        fit(NerfModule(config, captured=captured), callbacks=[Crash()], **flags)
    (path,) = tmp_path.rglob("*.ckpt")
    again = NerfModule(config, captured=captured)
    fit(again, ckpt_path=path)
    assert again.step == 14 and same(again.model, whole.model, 0.0)


@pytest.mark.parametrize("captured", [False, True])
def test_a_checkpoint_of_a_validation_holds_the_weights_not_their_mean(tmp_path: Path, captured: bool) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    config = tiny_config(steps=40)
    config = replace(config, optim=replace(config.optim, ema_decay=0.9))
    whole, _ = native(config)
    saving = ModelCheckpoint(tmp_path, monitor="val_psnr", filename="{step}", save_top_k=-1)
    checks = {"val_check_interval": 20, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    fit(NerfModule(config, captured=captured), callbacks=[saving], **checks)
    again = NerfModule(config, captured=captured)
    fit(again, ckpt_path=tmp_path / "step=20.ckpt", limit_val_batches=0)
    assert again.step == 40 and same(again.model, whole.model, 0.0)


def test_flags_of_one_run_are_not_those_of_the_next() -> None:
    config = tiny_config(steps=6)
    module = NerfModule(config)
    fit(module, fast_dev_run=2)
    fit(module, num_sanity_val_steps=0)
    assert module.step == 6 and module.summary is not None and module.summary.stopped_by == "steps"
    with pytest.raises(InputError, match="Trainer: expected the precision and clipping of the module's first run"):
        fit(module, gradient_clip_val=0.5)


def test_what_lightning_users_expect(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    config = tiny_config(steps=6)
    module = NerfModule(config)
    trainer = fit(module)
    assert [image.shape for image in trainer.predict(module, data(config))] == [(16, 16, 3)] * 2
    assert 3.0 < trainer.test(module, data(config), verbose=False)[0]["test_psnr"] < 40.0
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    loaded = NerfModule.load_from_checkpoint(tmp_path / "six.ckpt")
    assert same(loaded.model, module.model, 0.0)
    assert fit(loaded, max_steps=9).global_step == 3 and loaded.step == 9  # goes on where it stopped
    assert fit(NerfModule(config), overfit_batches=2, max_epochs=2).global_step == 4
    config = tiny_config(steps=60)
    tuned = NerfModule(config)
    tuner = Tuner(pl.Trainer(**QUIET, accelerator="cpu", default_root_dir=tmp_path))
    found = tuner.lr_find(tuned, datamodule=data(config), num_training=20)
    assert found is not None and tuned.lr == found.suggestion() != config.optim.lr


def test_a_grad_scaler_scales_skips_and_is_saved(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    calls = 0

    def overflows(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        loss, mse = render_and_compare(*args)
        return loss * (float("inf") if calls == 3 else 1.0), mse

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    module = NerfModule(tiny_config(steps=6), stages=Stages(compare=overflows))
    trainer = fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaler.get_scale() == 128.0 and module.summary is not None and module.summary.skipped == 1
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    saved = torch.load(tmp_path / "six.ckpt", weights_only=False)
    assert saved["MixedPrecision"]["scale"] == 128.0 == float(saved["nerfturbo"]["optimizer"]["scale"])
    assert int(saved["nerfturbo"]["optimizer"]["skipped"]) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_checkpoints_go_both_ways(tmp_path: Path, captured: bool) -> None:
    """Half the steps under one trainer and half under the other equal all of them under one."""
    config = tiny_config(steps=20)
    whole, _ = native(config)

    first = NerfModule(config, captured=captured, steps_per_call=5)
    fit(first, callbacks=[StopAt(10)]).save_checkpoint(tmp_path / "ten.ckpt")
    second = Trainer(config, ball_scene())
    second.resume(tmp_path / "ten.ckpt")  # Lightning -> native
    assert second.step == 10
    second.fit()
    assert same(second.model, whole.model)

    again = NerfModule(config, captured=captured)
    trainer = fit(again, ckpt_path=tmp_path / "ten.ckpt", max_steps=20)  # Lightning -> Lightning
    assert trainer.global_step == 20 and same(again.model, whole.model)

    folder = native_from_lightning(tmp_path / "ten.ckpt", tmp_path / "checkpoints")
    assert read_state(folder).step == 10
    third = NerfModule(config, captured=captured, start=folder)  # native -> Lightning
    fit(third)
    assert third.step == 20 and same(third.model, whole.model)


def test_a_module_is_loaded_to_render(tmp_path: Path) -> None:
    module = NerfModule(tiny_config(steps=2))
    fit(module, max_steps=2).save_checkpoint(tmp_path / "two.ckpt")
    loaded = load_module(tmp_path / "two.ckpt")
    cameras = ball_scene("test").cameras
    assert torch.equal(loaded.model.render_image(cameras, 0).rgb, module.model.render_image(cameras, 0).rgb)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"nothing")
    for name in ("other", "broken", "missing"):
        with pytest.raises(CheckpointError, match=rf"{name}\.ckpt: "):
            Trainer(tiny_config(), ball_scene()).resume(tmp_path / f"{name}.ckpt")


@pytest.mark.parametrize("captured", [False, True])
def test_a_run_that_is_not_finite_ends_with_an_error(captured: bool) -> None:
    def broken(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, mse = render_and_compare(*args)
        return loss * float("nan"), mse

    module = NerfModule(tiny_config(steps=60), captured=captured, stages=Stages(compare=broken))
    with pytest.raises(UnstableError, match="20 steps in a row were not finite; first bad tensor: loss"):
        fit(module)
    assert module.step == 20 and all(torch.isfinite(parameter).all() for parameter in module.parameters())
    short = NerfModule(tiny_config(steps=7), captured=captured, stages=Stages(compare=broken))
    with pytest.raises(UnstableError, match="7 of 7 steps were not finite; first bad tensor: loss"):
        fit(short)


def test_a_module_without_its_data_says_so() -> None:
    from torch.utils.data import DataLoader

    module = NerfModule(tiny_config(steps=2))
    with pytest.raises(InputError, match="datamodule: expected a NerfData"):
        pl.Trainer(**QUIET, accelerator="cpu", max_steps=1).fit(module, DataLoader([1, 2]))  # type: ignore[arg-type]


class ApplySpy(pl.Callback):
    """Counts what moves or converts a model from the end of fitting on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.count = model, 0

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        before = self.model._apply

        def counted(*args: Any, **options: Any) -> torch.nn.Module:
            self.count += 1
            return before(*args, **options)

        self.model._apply = counted  # type: ignore[method-assign]


def test_a_captured_module_stays_on_its_device_when_lightning_ends() -> None:
    """Lightning moves every module to the CPU at its end: graphs and buffers of a captured one would stay behind."""
    config = tiny_config(steps=2)
    engine = Trainer(config, ball_scene())
    module, spy = NerfModule(config, engine=engine), ApplySpy(engine.model)
    fit(module, callbacks=[spy], limit_val_batches=0)
    assert spy.count == 0
    pl.LightningModule.cpu(module)  # what it does to others
    assert spy.count == 1


@pytest.mark.gpu
def test_a_captured_module_on_a_gpu_ends_where_the_native_trainer_does() -> None:
    config = replace(tiny_config(steps=32), preset="ngp")
    ends = []
    with use_backend("triton"):
        for under_lightning in (False, True):
            engine = Trainer(config, ball_scene(), device="cuda")
            if under_lightning:
                fit_with_lightning(engine)
            else:
                engine.fit()
            assert engine.model.device.type == "cuda" and engine.step == 32
            ends.append(engine.model.render_image(ball_scene("test").cameras, 0).rgb.cpu())
    assert (ends[0] - ends[1]).abs().mean() < 0.02
