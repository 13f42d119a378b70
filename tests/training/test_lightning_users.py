"""What people bring to Lightning: finders, minimum steps, several devices, a command line of their own."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")

from nerfturbo.config import Config  # noqa: E402
from nerfturbo.data.formats.transforms import write_blender  # noqa: E402
from nerfturbo.errors import InputError  # noqa: E402
from nerfturbo.ops import use_backend  # noqa: E402
from nerfturbo.training.lightning import NerfData, NerfModule  # noqa: E402
from nerfturbo.training.trainer import Trainer  # noqa: E402

from ..tiny import ball_scene, tiny_config  # noqa: E402
from .workers import QUIET  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]
BOTH = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


@pytest.fixture(autouse=True)
def _quiet() -> object:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with use_backend("auto"):
        yield


def data(config: Config) -> NerfData:
    return NerfData(config, (ball_scene(), ball_scene("test", n_views=2)))


def fit(module: NerfModule, **flags: Any) -> Any:
    trainer = pl.Trainer(**(QUIET | {"accelerator": "cpu", "limit_val_batches": 0} | flags))
    trainer.fit(module, data(module.config))
    return trainer


class Patience(pl.Callback):
    """Ends a run that only pretends to train."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, *rest: Any) -> None:
        self.batches -= 1
        assert self.batches >= 0, "batch after batch, and no step"


@BOTH
def test_minimum_steps_are_met_or_refused(captured: bool) -> None:
    config = tiny_config(steps=6)
    for flags in ({"min_steps": 9}, {"min_epochs": 2}):
        (name,) = flags
        with pytest.raises(InputError, match=rf"Trainer\({name}=\.\.\.\): expected .* of the run"):
            fit(NerfModule(config, captured=captured), callbacks=[Patience(30)], **flags)
    limited = replace(config, train=replace(config.train, time_limit=60.0))
    with pytest.raises(InputError, match=r"Trainer\(min_steps=\.\.\.\): expected .*time_limit"):
        fit(NerfModule(limited, captured=captured), callbacks=[Patience(30)], min_steps=3)
    module = NerfModule(config, captured=captured)
    assert fit(module, min_steps=6, callbacks=[Patience(6)]).global_step == 6 == module.step
    more = NerfModule(replace(config, train=replace(config.train, steps=4)), captured=captured)
    fit(more)
    assert fit(more, max_steps=6, min_steps=2, callbacks=[Patience(2)]).global_step == 2 and more.step == 6


@BOTH
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder_grows_the_samples_of_a_step(captured: bool, mode: str, tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    config, seen = tiny_config(steps=12), {}
    config = replace(config, train=replace(config.train, max_rays=4096))

    class Look(NerfModule):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            assert self.last is not None
            seen[self.batch_size] = self.last.n_samples

    module = Look(config, captured=captured)
    tuner = Tuner(pl.Trainer(**QUIET, accelerator="cpu", default_root_dir=tmp_path, limit_val_batches=0))
    limits = {"init_val": 512, "max_val": 4096, "steps_per_trial": 4, "margin": 0.0}
    found = tuner.scale_batch_size(module, datamodule=data(config), mode=mode, **limits)
    assert found == module.batch_size == 4096
    assert {512, 1024, 2048} <= set(seen) and seen[2048] > 1.5 * seen[512]
    assert module.step == 0 and module.engine is not None and module.engine.config.train.batch_samples == 4096
    seen.clear()
    fit(module)
    assert module.step == 12 and max(seen.values()) > 2048


class Reads(TorchDispatchMode):
    """Counts values that are read by the host one at a time: each would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_eager_step_is_logged_without_reading_values_back() -> None:
    counts: list[tuple[int, int]] = []

    class Counted(NerfModule):
        def optimizer_step(self, *args: Any, **options: Any) -> None:
            with Reads() as self.updating:
                super().optimizer_step(*args, **options)

        def on_train_batch_end(self, *args: Any) -> None:
            with Reads() as logging:
                super().on_train_batch_end(*args)
            counts.append((self.updating.count, logging.count))

    def own(native: Trainer) -> list[int]:
        found = []

        def look(trainer: Any, record: Any) -> None:
            found.append(reads.count)

        native.callbacks.append(look)
        with Reads() as reads:
            native.fit()
        return [after - before for before, after in itertools.pairwise(found)]

    config = tiny_config(steps=6)
    native = own(Trainer(config, ball_scene()))
    fit(Counted(config))
    assert [logging for _, logging in counts] == [0] * 6
    assert max(updating for updating, _ in counts[1:]) <= max(native)


@BOTH
def test_the_progress_bar_shows_loss_and_psnr(captured: bool) -> None:
    module = NerfModule(tiny_config(steps=4), captured=captured)
    shown = fit(module).progress_bar_metrics
    assert module.last is not None and shown["loss"] == pytest.approx(module.last.loss, rel=1e-5)
    assert shown["psnr"] == pytest.approx(-10.0 * math.log10(module.last.mse), abs=1e-3)


@BOTH
def test_the_last_checkpoint_resumes_bit_for_bit(captured: bool, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Crash(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if pl_module.step >= 7:
                raise OSError("the machine is gone")

    def run(*callbacks: pl.Callback, **options: Any) -> NerfModule:
        module = NerfModule(tiny_config(steps=12), captured=captured, steps_per_call=1)
        saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, save_last=True)
        saving.save_on_exception = False
        flags = QUIET | {"accelerator": "cpu", "limit_val_batches": 0, "enable_checkpointing": True}
        trainer = pl.Trainer(**flags, callbacks=[saving, *callbacks])
        trainer.fit(module, data(module.config), **options)
        return module

    whole = NerfModule(tiny_config(steps=12), captured=captured)
    fit(whole)
    with pytest.raises(OSError, match="the machine is gone"):
        run(Crash())
    resumed = run(ckpt_path="last")
    assert whole.model is not None and resumed.model is not None and resumed.step == whole.step == 12
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


@BOTH
def test_a_pretrained_start_is_that_of_the_native_trainer(captured: bool, tmp_path: Path) -> None:
    config = tiny_config(steps=5)
    before = Trainer(replace(config, train=replace(config.train, seed=7)), ball_scene())
    before.fit()
    source = before.save(tmp_path)
    native = Trainer(config, ball_scene())
    native.warm_start(source, keep=0.8)
    native.fit()

    class Warm(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.engine.warm_start(source, keep=0.8)

    module, cold = NerfModule(config, captured=captured), NerfModule(config, captured=captured)
    fit(module, callbacks=[Warm()])
    fit(cold)
    assert module.model is not None and cold.model is not None
    for one, two in zip(native.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(one, two)
    pairs = zip(module.model.parameters(), cold.model.parameters(), strict=True)
    assert not all(torch.equal(one, two) for one, two in pairs)


def test_data_parallel_is_refused_with_the_reason() -> None:
    """A field in it answers (tests/fields/test_data_parallel.py); it is not for training."""
    config = tiny_config(steps=2)
    module = NerfModule(config)
    fit(module)
    assert module.model is not None
    with pytest.raises(InputError, match=r"NerfModule.*DataParallel.*strategy='ddp'"):
        torch.nn.DataParallel(module)(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(InputError, match=r"field: expected .*DataParallel.*torchrun"):
        Trainer(config, ball_scene(), field=torch.nn.DataParallel(module.model.field))


def test_signatures_are_annotated_for_a_command_line() -> None:
    """`LightningCLI` makes flags of them: an argument without a type cannot be one."""
    for kind in (NerfModule, NerfData):
        parameters = inspect.signature(kind.__init__).parameters
        assert [name for name, one in parameters.items() if name != "self" and one.annotation is one.empty] == []
        assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())


def test_lightning_cli_fits_from_flags_and_from_the_file_it_writes(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse: the extra lightning-cli")
    from lightning.pytorch.cli import LightningCLI

    write_blender([ball_scene("train"), ball_scene("test", n_views=2)], tmp_path / "ball")
    small = ["train.steps=2", "train.batch_samples=512", "train.max_rays=64", "train.seed=3", "grid.resolution=8"]
    config = [f"--{part}.config.{value}" for part in ("model", "data") for value in small]
    quiet = [f"--trainer.{name}=false" for name in QUIET]
    flags = [*quiet, "--trainer.accelerator=cpu", "--trainer.limit_val_batches=0", "--model.captured=true", *config]
    flags += [f"--data.config.data.source={tmp_path / 'ball'}", f"--trainer.default_root_dir={tmp_path}"]

    def run(*args: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LightningCLI(NerfModule, NerfData, args=["fit", *args]).model

    from_flags = run(*flags)
    (written,) = tmp_path.glob("**/config.yaml")
    copied = written.rename(tmp_path / "again.yaml")  # Lightning refuses to write over it
    from_file = run("--config", str(copied))
    assert from_flags.step == from_file.step == 2 and from_file.captured and from_file.config.train.seed == 3
    for one, other in zip(from_flags.model.parameters(), from_file.model.parameters(), strict=True):
        assert torch.equal(one, other)
