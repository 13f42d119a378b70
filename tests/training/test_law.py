"""The law: every value of the config, in every trainer, changes the run or is refused by name.

One value at a time is changed in a tiny run under the native trainer, eager and captured Lightning, and each of the
three with two processes. What counts as changed: the weights and grid after any step, the finished ones, a picture of
them, the number of steps, or an error. `python scripts/law_table.py` prints all values and trainers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")

from lightning.pytorch.trainer.connectors import callback_connector  # noqa: E402

from nerfturbo import config as configs  # noqa: E402
from nerfturbo.config import KINDS, Config  # noqa: E402
from nerfturbo.data.options import LoadOptions  # noqa: E402
from nerfturbo.data.scene import Scene, open_scenes  # noqa: E402
from nerfturbo.errors import NerfturboError  # noqa: E402
from nerfturbo.ops import use_backend  # noqa: E402
from nerfturbo.training import stability  # noqa: E402
from nerfturbo.training.distributed import ProcessTeam, Team  # noqa: E402
from nerfturbo.training.lightning import NerfData, NerfModule  # noqa: E402
from nerfturbo.training.loss import Stages, render_and_compare  # noqa: E402
from nerfturbo.training.step import StepRecord  # noqa: E402
from nerfturbo.training.trainer import Trainer  # noqa: E402

from ..data import folders  # noqa: E402
from ..tiny import ball_keypoints, ball_scene, tiny_config  # noqa: E402
from .workers import QUIET, together  # noqa: E402

STEPS = 5  # past two updates of the grid and of the running mean, with the periods of `base_of` and `quietly`

# What each value becomes; the base that it is changed in is `base_of(name)`.
CHANGES: dict[str, Any] = {
    "data.downscale": 2,
    "data.allow_outside": True,
    "data.pixels": "host",
    "data.bounds": "bounded",
    "grid.enabled": False,
    "grid.resolution": 12,
    "grid.levels": 2,
    "grid.contraction": "sphere",
    "grid.update_every": 3,
    "grid.decay": 0.3,
    "grid.moments": 2,
    "grid.cull_unseen": True,
    "field.ngp.n_levels": 3,
    "field.ngp.n_features": 4,
    "field.ngp.log2_entries": 6,
    "field.ngp.max_resolution": 24,
    "field.ngp.width": 32,
    "field.ngp.initial_density": 0.1,
    "field.ngp.anti_alias": 1,
    "field.ngp-time.n_levels": 3,
    "field.ngp-time.n_features": 4,
    "field.ngp-time.log2_entries": 6,
    "field.ngp-time.max_resolution": 24,
    "field.ngp-time.width": 32,
    "field.ngp-time.motion_log2_entries": 5,
    "field.ngp-time.motion_resolution": 16,
    "field.vanilla.width": 24,
    "field.vanilla.depth": 3,
    "field.vanilla.motion": "time",
    "field.voxels.resolutions": (6, 10),
    "field.voxels.subdivide_at": (0.6,),
    "field.voxels.max_nodes": 400,
    "field.voxels.sh_degree": 2,
    "field.factor.resolutions": (6, 10),
    "field.factor.refine_at": (0.6,),
    "field.factor.components": (2, 3),
    "field.factor.width": 24,
    "sampler.grid.cone_angle": 0.3,
    "sampler.grid.alpha_thre": 0.5,
    "sampler.grid.prune": False,
    "sampler.grid.merge_weak_samples": 0.2,
    "sampler.uniform.n_samples": 20,
    "sampler.hierarchy.n_samples": 20,
    "sampler.hierarchy.coarse_samples": 12,
    "sampler.proposal.n_samples": 20,
    "sampler.proposal.coarse_samples": (12, 8),
    "sampler.proposal.anneal_steps": 3,
    "sampler.proposal.levels": 3,
    "sampler.proposal.log2_entries": 6,
    "sampler.proposal.resolutions": (12, 20),
    "sampler.proposal.padding": 0.3,
    "sampler.proposal.blur": 0.1,
    "render.steps_per_diagonal": 32,
    "render.early_stop_eps": 0.3,
    "render.eval_refine": 2,
    "render.eval_rays": 2,
    "loss.kind": "mse",
    "loss.distortion": 0.1,
    "loss.opacity": 0.1,
    "loss.near_gradient": 3.0,
    "loss.depth": 0.5,
    "optim.lr": 2e-2,
    "optim.schedule": "constant",
    "optim.final_lr_fraction": 0.5,
    "optim.warmup_steps": 5,
    "optim.hold_fraction": 0.8,
    "optim.beta2": 0.9,
    "optim.table_decay": 0.1,
    "optim.clip_norm": 1e-3,
    "optim.ema_decay": 0.9,
    "train.steps": STEPS - 1,
    "train.time_limit": 0.01,
    "train.batch_samples": 1 << 10,
    "train.max_rays": 40,
    "train.accumulate": 2,
    "train.precision": "bf16",
    "train.on_instability": "stop",
    "train.target_psnr": 1.0,
    "train.coarse_fraction": 0.5,
    "train.compress_gradients": "bf16",
    "train.background": "white",
    "train.seed": 1,
    "cameras.refine": True,
    "cameras.coarse": True,
    "cameras.focal": True,
    "cameras.distortion": True,
    "photo.exposure": True,
    "photo.appearance": 4,
}
EXCEPTIONS = {
    "preset": "a name of where the values came from",
    "data.source": "which scene: everything differs",
    "data.cache": "where decoded images lie; the numbers are the same (tests/data/test_images.py)",
    "train.capture": "of a GPU alone (tests/training/test_graph.py)",
    "train.checkpointing": "less memory, the same gradients (tests/training/test_techniques.py)",
    "field.custom.source": "a path (tests/training/test_own_field.py)",
    "sampler.custom.source": "a path (tests/training/test_own_field.py)",
}
ONLY_TOGETHER = ("train.compress_gradients",)  # one process sends nothing
FOLDERS = {
    "data.downscale": "blender",
    "data.allow_outside": "outside",
    "data.bounds": "llff",
}


Run = Callable[..., Trainer]  # (config, name of the value, watch)


def all_values() -> list[str]:
    names = []
    for one in dataclasses.fields(Config):
        if one.name in KINDS:
            for kind, section in KINDS[one.name].items():
                names += [f"{one.name}.{kind}.{leaf.name}" for leaf in dataclasses.fields(section)]
        elif dataclasses.is_dataclass(one.default):
            names += [f"{one.name}.{leaf.name}" for leaf in dataclasses.fields(one.default)]
        else:
            names.append(one.name)
    return names


def base_of(name: str, folder: Path) -> Config:
    """A tiny config in which the value can act."""
    config = tiny_config(steps=STEPS)
    config = replace(config, grid=replace(config.grid, update_every=2))
    parts = name.split(".")
    fields = {
        "ngp": config.field,
        "ngp-time": configs.DynamicNgpConfig(2, 2, 8, 32, 16, motion_log2_entries=8, motion_resolution=8),
        "vanilla": configs.VanillaConfig(width=16, depth=2),
        "voxels": configs.VoxelConfig((6, 12), (0.3,), sh_degree=1),
        "factor": configs.FactorConfig((6, 12), (0.3,), (2, 2), 16),
    }
    samplers = {
        "grid": config.sampler,
        "uniform": configs.UniformSamplerConfig(16),
        "hierarchy": configs.HierarchySamplerConfig(16, 8),
        "proposal": configs.ProposalSamplerConfig(16, (16, 8), 10, 2, 8, (16, 24)),
    }
    if parts[0] == "field":
        config = replace(config, field=fields[parts[1]])
    if parts[0] == "sampler":
        config = replace(config, sampler=samplers[parts[1]])
    if parts[0] == "sampler" and parts[1] != "grid":
        config = replace(config, grid=replace(config.grid, enabled=False))
    if name == "grid.moments":
        config = replace(config, field=fields["ngp-time"])
    if name == "sampler.grid.prune":  # where there is something to prune
        config = replace(config, render=replace(config.render, early_stop_eps=0.5))
    if name == "train.batch_samples":
        config = replace(config, train=replace(config.train, batch_samples=1 << 12, max_rays=256))
    if name == "grid.cull_unseen":  # opaque, so that the inside is hidden, and long enough to be worth a look
        config = replace(config, train=replace(config.train, batch_samples=1 << 13, max_rays=256))
        config = replace(config, field=replace(config.field, initial_density=100.0))
        config = replace(config, grid=replace(config.grid, resolution=24))
    if name == "cameras.coarse":
        config = replace(config, cameras=configs.CameraConfig(refine=True))
    if name in FOLDERS:
        kind = FOLDERS[name]
        config = replace(config, data=replace(config.data, source=str(folder / kind)))
    return config


def changed(config: Config, name: str, value: Any) -> Config:
    section, leaf = name.split(".")[0], name.split(".")[-1]
    return replace(config, **{section: replace(getattr(config, section), **{leaf: value})})


@cache
def ball_scenes() -> tuple[Scene, Scene]:
    return replace(ball_scene(), keypoints=ball_keypoints(ball_scene())), ball_scene("test", n_views=2)


def scenes_of(config: Config) -> tuple[Scene, Scene]:
    if config.data.source.startswith("builtin"):
        return ball_scenes()
    return open_scenes(config.data.source, LoadOptions.of(config.data))


def stages_of(name: str) -> Stages | None:
    """The first steps fail where what is done about it is the question."""
    if name != "train.on_instability":
        return None
    calls = 0

    def broken(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        loss, mse = render_and_compare(*args)
        return loss * (float("nan") if calls <= stability.FALLS + 1 else 1.0), mse

    return Stages(compare=broken)


def digest_of(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class PartedError(Exception):
    """Nothing else is to happen."""


class Watch(pl.Callback):
    """What weights and grid were after each step; ends a run at the first step where they are not the `expected`."""

    def __init__(self, expected: list[str] | None = None) -> None:
        self.expected, self.seen, self.parted = expected, [], False

    def has_parted(self, model: torch.nn.Module) -> bool:
        self.seen.append(digest_of(*model.state_dict().values()))
        if self.expected is not None:
            self.parted |= self.seen != self.expected[: len(self.seen)]
        return self.parted

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        trainer.should_stop |= self.has_parted(trainer.model)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        trainer.should_stop |= self.has_parted(pl_module.model)

    @contextmanager
    def from_inside(self) -> Iterator[None]:
        """Looks from inside of the steps, where no callback is to know of it."""
        advance = Trainer.advance

        def watched(trainer: Trainer, *options: Any) -> Any:
            record = advance(trainer, *options)
            if self.has_parted(trainer.model):
                raise PartedError
            return record

        with suppress(PartedError), patch.object(Trainer, "advance", watched):
            yield


def native(config: Config, name: str, watch: Watch, team: Team | None = None) -> Trainer:
    if team is not None:
        team = ProcessTeam(compression=config.train.compress_gradients)
    train, test = scenes_of(config)
    trainer = Trainer(config, train, stages=stages_of(name), callbacks=[watch], team=team)
    trainer.test_scene = test
    trainer.fit()
    return trainer


def lightning(config: Config, name: str, watch: Watch, *, captured: bool, devices: int = 1) -> Trainer:
    module = NerfModule(config, captured=captured, stages=stages_of(name))
    scenes = scenes_of(config) if config.data.source.startswith("builtin") else None  # else the data module opens them
    callbacks = [] if captured else [watch]  # captured steps are queued at once where nobody looks in between
    flags = QUIET | {"accelerator": "cpu", "limit_val_batches": 0, "devices": devices, "callbacks": callbacks}
    trainer = pl.Trainer(**flags, strategy="ddp" if devices > 1 else "auto")
    with watch.from_inside() if captured else nullcontext():
        trainer.fit(module, NerfData(config, scenes))
    assert module.engine is not None
    return module.engine


def outcome(run: Callable[[], Trainer], watch: Watch) -> str:
    """What a run ended as: where it parted from the expected one, a digest of all that can differ, or its error."""
    try:
        trainer = run()
    except NerfturboError as error:
        return f"{type(error).__name__}: {str(error)[:40]}"
    if watch.parted:
        return f"parted after {len(watch.seen)} steps"
    with trainer.as_finished():
        image = trainer.model.render_image(trainer.scene.cameras, 0).rgb
        return f"{trainer.step} {trainer.pixels.on_host} {digest_of(*trainer.model.state_dict().values(), image)}"


def walk(run: Run, folder: Path, names: list[str]) -> dict[str, str]:
    """What each value did: "changes", "refused", or "SILENT"."""
    bases: dict[Any, tuple[str, list[str]]] = {}
    table = {}
    for name in names:
        base = base_of(name, folder)
        key = (base, stages_of(name) is None)
        if key not in bases:
            watch = Watch()
            bases[key] = outcome(partial(run, base, name, watch), watch), watch.seen
        expected, seen = bases[key]
        watch = Watch(seen)
        found = outcome(partial(run, changed(base, name, CHANGES[name]), name, watch), watch)
        table[name] = "SILENT" if found == expected else "refused" if ": " in found else "changes"
    return table


def silent(table: dict[str, str]) -> list[str]:
    return [name for name, word in table.items() if word == "SILENT"]


def write_scenes(folder: Path) -> Path:
    folders.write_blender_json(folder / "blender")
    folders.write_llff(folder / "llff")
    outside = folders.write_blender_json(folder / "outside")
    (outside / "images").rename(folder / "elsewhere")
    for file in outside.glob("transforms_*.json"):
        file.write_text(file.read_text().replace("./images/", "../elsewhere/"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("law"))


def quietly(run: Callable[[], Any]) -> Any:
    shorter = {"training.optim.EMA_EVERY": 2, "fields.field.MIN_STEPS": 1}
    shorter |= {"training.stability.FALLS": 2, "training.refine.MARKED": {"cpu": 256}}  # fewer failures, fewer rays
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)  # later tests want to hear it
        logging.disable(logging.CRITICAL)
        for name, value in shorter.items():
            stack.enter_context(patch(f"nerfturbo.{name}", value))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(use_backend("cpu"))  # three times as fast as the reference
        stack.enter_context(patch.object(NerfModule, "_log"))  # a fifth of the time, and no value acts there
        stack.enter_context(patch(f"{callback_connector.__name__}._load_external_callbacks", return_value=[]))
        warnings.simplefilter("ignore")
        return run()


def test_every_value_has_a_change_or_a_reason() -> None:
    assert sorted([*CHANGES, *EXCEPTIONS]) == sorted(all_values())


ALONE: dict[str, Run] = {
    "native": native,
    "eager": partial(lightning, captured=False),
    "captured": partial(lightning, captured=True),
}


def walk_alone(trainer: str, folder: Path) -> dict[str, str]:
    names = [name for name in CHANGES if name not in ONLY_TOGETHER]
    return quietly(lambda: walk(ALONE[trainer], folder, names))


@pytest.mark.parametrize("trainer", ALONE)
def test_no_value_is_silently_ignored(trainer: str, folder: Path) -> None:
    assert silent(walk_alone(trainer, folder)) == []


def walk_together(team: Team, folder: str) -> dict[str, dict[str, str]]:
    """All trainers after each other: a start of the processes costs more than many runs."""
    scenes, names = Path(os.environ["NERFTURBO_LAW_SCENES"]), list(CHANGES)
    runs = {
        "native": partial(native, team=team),
        "eager": partial(lightning, captured=False, devices=2),
        "captured": partial(lightning, captured=True, devices=2),
    }
    return {trainer: quietly(lambda run=run: walk(run, scenes, names)) for trainer, run in runs.items()}


def walk_in_two(scenes: Path, folder: Path) -> list[dict[str, dict[str, str]]]:
    with patch.dict(os.environ, {"NERFTURBO_LAW_SCENES": str(scenes)}):
        return together(2, walk_together, folder, seconds=900.0)  # three walks, on cores that others may use


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    return walk_in_two(folder, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("trainer", ALONE)
def test_no_value_is_silently_ignored_by_two_processes(two: list[dict[str, dict[str, str]]], trainer: str) -> None:
    assert [silent(found[trainer]) for found in two] == [[], []]


def test_the_walk_notices_a_value_that_does_nothing(folder: Path) -> None:
    def deaf(config: Config, name: str, watch: Watch) -> Trainer:
        return native(replace(config, optim=replace(config.optim, clip_norm=0.0)), name, watch)

    names = ["optim.clip_norm", "optim.beta2"]
    assert quietly(lambda: walk(deaf, folder, names)) == {"optim.clip_norm": "SILENT", "optim.beta2": "changes"}
