"""What the processes of the multi-process tests run: each gets its rank's environment and writes what it found."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp

from nerfturbo.config import Config
from nerfturbo.data.batches import PixelBatch, PixelSampler
from nerfturbo.errors import DistributedError
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training import distributed, optim
from nerfturbo.training.checkpoint import latest_checkpoint
from nerfturbo.training.distributed import ProcessTeam, RayShare, Team, join_team
from nerfturbo.training.loss import Stages
from nerfturbo.training.optim import Optimizer
from nerfturbo.training.step import StepRecord, TrainingStep
from nerfturbo.training.trainer import Trainer
from nerfturbo.types import Rays

from ..tiny import ball_scene, tiny_config

Work = Callable[..., Any]
HANG = 3.0  # for the 60 s of `distributed.HANG_SECONDS`
TWO_PIECES = 38_000  # values, of the 77,200 of the table of `config_for`
MEAN_EVERY = 4  # for the 16 steps of `optim.EMA_EVERY`
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(rank: int, world: int, port: int, work: Work, folder: str, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test"}  # by which Lightning knows that torchrun started it
    with use_backend("reference"):
        team = join_team()
        torch.save(work(team, folder), Path(folder) / f"{rank}.pt")
        team.close()


def together(
    world: int, work: Work, folder: Path, *, expected: list[int] | None = None, seconds: float = 300.0
) -> list[Any]:
    """Run `work` in `world` processes over gloo; what each returned, or those that are expected to live. They are
    forked from one process that has imported what takes seconds and did nothing else, in the environment of now."""
    folder.mkdir(parents=True, exist_ok=True)
    context, port, environment = mp.get_context("forkserver"), free_port(), dict(os.environ)
    context.set_forkserver_preload([__name__, "lightning.pytorch", "nerfturbo.ops._cpu"])  # what is missing is left out
    processes = [
        context.Process(target=_run, args=(rank, world, port, work, str(folder), environment)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    survivors = list(range(world)) if expected is None else expected
    assert [rank for rank in range(world) if processes[rank].exitcode == 0] == survivors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in survivors]


def alone(work: Work, folder: Path) -> Any:
    with use_backend("reference"):
        return work(Team(), str(folder))


def config_for(team_size: int, *, of: int = 2, steps: int = 50) -> Config:
    """The same training for any size of team: together `of` times the rays of `tiny_config`."""
    config, factor = tiny_config(steps=steps), of // team_size
    field = replace(config.field, n_levels=3, log2_entries=14, max_resolution=48)  # few collisions: 50 steps teach it
    config = replace(config, field=field, optim=replace(config.optim, ema_decay=0.9))
    train = config.train
    grown = {name: getattr(train, name) * factor for name in ("batch_samples", "max_rays")}
    return replace(config, train=replace(train, **grown))


def state_of(model: NerfModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Weights and grid, and the running means of the weights."""
    means = {f"mean {index}": mean for index, mean in enumerate(optimizer.averages)}
    assert means
    return model.state_dict() | means


def draw_double(sampler: PixelSampler, step: int, share: RayShare) -> PixelBatch:
    batch = sampler.draw(step, share.count, first=share.first)
    rays = Rays(batch.rays.origins.double(), batch.rays.directions.double(), None, batch.rays.camera_indices)
    return PixelBatch(rays, batch.rgba.double())


def uneven(step: int, rank: int, world: int, n_rays: int) -> RayShare:
    """Rank 0 takes a fifth of the rays, the last rank the rest."""
    if world == 1:
        return RayShare(0, n_rays)
    return RayShare(0, n_rays // 5) if rank == 0 else RayShare(n_rays // 5, n_rays - n_rays // 5)


def nothing_for_rank_0(step: int, rank: int, world: int, n_rays: int) -> RayShare:
    if world == 1:
        return RayShare(0, n_rays)
    return RayShare(0, 0) if rank == 0 else RayShare(0, n_rays)


def train_double(team: Team, n_steps: int = 50, split: Any = None, parts: int = 1) -> dict[str, Any]:
    """Parameters and grid in float64 after some steps, each of `parts` batches."""
    config = config_for(team.world)
    config = replace(config, train=replace(config.train, accumulate=parts))
    torch.set_default_dtype(torch.float64)
    try:
        model = NerfModel(config, SceneBounds.of(ball_scene())).double()
    finally:
        torch.set_default_dtype(torch.float32)
    stages = Stages(draw=draw_double) if split is None else Stages(draw=draw_double, split=split)
    optimizer = Optimizer(model, config.optim)
    stepper = TrainingStep(model, PixelSampler(ball_scene()), optimizer, stages=stages, team=team)
    records = [stepper.advance(step, 1) for step in range(n_steps)]
    losses, counts = [record.loss for record in records], [record.n_samples for record in records]
    pieces = [buffer.pieces for buffer in optimizer.buffers]
    state = state_of(model, optimizer)
    return {"state": state, "losses": losses, "counts": counts, "rays": stepper.n_rays, "pieces": pieces}


def train_single(team: Team, compression: Any = None) -> dict[str, Any]:
    """First moments after one step, which are the first gradients, and the losses, in fp32 through the trainer."""
    if compression is not None:
        team = ProcessTeam(compression=compression)
    moments, losses = [], []

    def look(trainer: Trainer, record: StepRecord) -> None:
        losses.append(record.loss)
        if record.step == 1:
            moments.append(torch.cat([buffer.state.first for buffer in trainer.optimizer.buffers]).clone())

    trainer = Trainer(config_for(team.world, steps=20), ball_scene(), callbacks=[look], team=team)
    summary, state = trainer.fit(), state_of(trainer.model, trainer.optimizer)
    pieces = [buffer.pieces for buffer in trainer.optimizer.buffers]
    return {"moments": moments[0], "losses": losses, "state": state, "summary": summary, "pieces": pieces}


def raise_flag(team: Team) -> dict[str, Any]:
    """A table's backward on the last rank meets what is not finite in step 2: which steps are skipped, and the end."""

    def draw(sampler: PixelSampler, step: int, share: RayShare) -> PixelBatch:
        if step == 2 and team.rank == team.world - 1:
            trainer.optimizer.found_inf.fill_(1.0)
        return sampler.draw(step, share.count, first=share.first)

    trainer = Trainer(config_for(team.world), ball_scene(), team=team, stages=Stages(draw=draw))
    skipped = [trainer.stepper.advance(step, 1).skipped for step in range(5)]
    return {"skipped": skipped, "state": state_of(trainer.model, trainer.optimizer)}


def stop_early(team: Team) -> tuple[int, str]:
    """The last rank wants to stop after step 3: all of them do."""

    def stop(trainer: Trainer, record: StepRecord) -> None:
        trainer.should_stop = trainer.team.rank == trainer.team.world - 1 and record.step >= 3

    summary = Trainer(config_for(team.world), ball_scene(), callbacks=[stop], team=team).fit()
    return summary.steps, summary.stopped_by


def follow_one_clock(team: Team) -> tuple[int, dict[str, Any]]:
    """A time limit: the clocks of the ranks differ, their learning rates must not."""
    config = config_for(team.world, steps=100_000)
    config = replace(config, train=replace(config.train, time_limit=0.4))
    trainer = Trainer(config, ball_scene(), team=team)
    return trainer.fit().steps, trainer.model.state_dict()


def save_and_go_on(team: Team, folder: str) -> dict[str, Any]:
    """Rank 0 saves at step 10, reads that and hands it to the others; all of them train on to step 20."""
    config = config_for(team.world, steps=20)
    first = Trainer(config, ball_scene(), team=team)
    first.callbacks.append(lambda trainer, record: setattr(trainer, "should_stop", record.step == 10))
    first.fit()
    if team.rank == 0:
        first.save(Path(folder) / "checkpoints")
    team.agree(False)  # the others wait until it is written
    second = Trainer(config, ball_scene(), team=team)
    if team.rank == 0:
        second.resume(latest_checkpoint(Path(folder)))
    second.fit()
    return state_of(second.model, second.optimizer)


def meet_trouble(team: Team, folder: str) -> dict[str, Any]:
    """Rank 1 is slow, has other data, another config, and is killed in the middle of training: what rank 0 is told."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("nerfturbo.training.distributed").addHandler(handler)
    distributed.SLOW_SECONDS, distributed.SILENT_SECONDS = 0.5, 1.0

    def stall(trainer: Trainer, record: StepRecord) -> None:
        time.sleep(2.0 if trainer.team.rank == 1 and record.step == 2 else 0.0)

    def die(trainer: Trainer, record: StepRecord) -> None:
        if trainer.team.rank == 1 and record.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    scene = ball_scene()
    dark = replace(scene, images=replace(scene.images, pixels=scene.images.pixels // 2))
    config, other = config_for(team.world, steps=5), config_for(team.world, steps=6)
    first = team.rank == 0
    found: dict[str, Any] = {"begun": time.monotonic(), "warned": warned}
    for name, own, given, callback in (
        ("slow", config, scene, stall),
        ("pixels", config, scene if first else dark, stall),
        ("views", config, scene if first else ball_scene(n_views=3), stall),
        ("config", config if first else other, scene, stall),
        ("killed", config, scene, die),
    ):
        try:
            found[name] = Trainer(own, given, callbacks=[callback], team=team).fit().steps
        except DistributedError as error:
            found[name] = str(error)
    return found | {"seconds": time.monotonic() - found["begun"]}


def wait_for_one(team: Team, folder: str) -> dict[str, Any]:
    """Rank 2 loads and rank 0 is busy for longer than ranks wait, rank 1 is slow, then stops without dying."""
    distributed.HANG_SECONDS, distributed.SILENT_SECONDS = HANG, 4.0
    (Path(folder) / f"{team.rank}.pid").write_text(str(os.getpid()))
    found: dict[str, Any] = {}
    time.sleep(1.7 * HANG if team.rank == 2 else 0.0)

    def sleep(trainer: Trainer, record: StepRecord) -> None:
        time.sleep(0.5 * HANG if trainer.team.rank == 1 and record.step == 2 else 0.0)

    def look(trainer: Trainer, record: StepRecord) -> None:
        if trainer.team.rank == 0 and record.step == 2:
            with trainer.clock_stopped():
                time.sleep(1.7 * HANG)

    def stop(trainer: Trainer, record: StepRecord) -> None:
        if trainer.team.rank == 1 and record.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.9 * HANG if trainer.team.rank == 2 and record.step == 3 else 0.0)  # waits less than the first

    for name, callback in (("slow", sleep), ("busy", look), ("stopped", stop)):
        begun = time.monotonic()
        try:
            found[name] = Trainer(config_for(1, steps=5), ball_scene(), callbacks=[callback], team=team).fit().steps
        except DistributedError as error:
            found[name] = str(error)
        found[f"{name} seconds"] = time.monotonic() - begun
    if team.rank == 0:
        os.kill(int((Path(folder) / "1.pid").read_text()), signal.SIGKILL)
    return found


def train_lightning(team: Team, *, double: bool) -> dict[str, Any]:
    """The same training under Lightning's DDP, or under one process of it."""
    import lightning.pytorch as pl

    from nerfturbo.training.lightning import NerfData, NerfModule

    losses: list[float] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
            losses.append(float(pl_module.last.loss))

    config = config_for(team.world, steps=20)
    module = NerfModule(config, stages=Stages(draw=draw_double, split=uneven) if double else None)
    trainer = pl.Trainer(
        max_steps=config.train.steps,
        accelerator="cpu",
        devices=team.world,
        strategy="auto" if team.alone else "ddp",
        precision="64-true" if double else "32-true",
        callbacks=[Keep()],
        **QUIET,
    )
    trainer.fit(module, NerfData(config, (ball_scene(), ball_scene("test"))))
    assert trainer.world_size == team.world
    state = {name: v.clone() for name, v in module.model.state_dict().items()}
    return {"losses": losses, "state": state, "summary": module.summary}


def find_rate(team: Team, folder: str) -> list[float]:
    """Lightning's range test of learning rates, which begins before `on_fit_start` of the module."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    from nerfturbo.training.lightning import NerfData, NerfModule

    losses: list[float] = []

    class Kept(NerfModule):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            assert self.last is not None
            losses.append(self.last.loss)  # of all ranks; what the finder sees is of one

    config = config_for(team.world, steps=60)
    flags = QUIET | {"accelerator": "cpu", "devices": team.world, "limit_val_batches": 0}
    trainer = pl.Trainer(**flags, strategy="auto" if team.alone else "ddp", default_root_dir=folder)
    data = NerfData(config, (ball_scene(), ball_scene("test")))
    found = Tuner(trainer).lr_find(Kept(config), datamodule=data, num_training=12, update_attr=False)
    assert found is not None
    return losses


def everything(team: Team, folder: str) -> dict[str, Any]:
    """One start of the processes for all tests: starting them is what takes long. Tables are cut into more pieces than
    they have levels, if that were possible; then into two, and not at all."""
    with patch.object(optim, "EMA_EVERY", MEAN_EVERY):
        with patch.object(optim, "PIECE", 1):
            found = _everything(team, folder)
        for name, piece in (("two pieces", TWO_PIECES), ("one piece", 1 << 40)):
            with patch.object(optim, "PIECE", piece):
                for compression in (None, "bf16", "fp16") if not team.alone else ():
                    found[f"{compression or 'single'}, {name}"] = train_single(team, compression)
        return found


def _everything(team: Team, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "double": train_double(team),
        "uneven": train_double(team, 20, uneven),
        "idle": train_double(team, 20, nothing_for_rank_0),
        "parts": train_double(team, 20, uneven, 3),
        "flag": raise_flag(team),
        "single": train_single(team),
        "resumed": save_and_go_on(team, folder),
        "stopped": stop_early(team),
        "clock": follow_one_clock(team),
    }
    for compression in ("bf16", "fp16"):
        found[compression] = None if team.alone else train_single(team, compression)
    found["lightning double"] = train_lightning(team, double=True)
    found["lightning single"] = train_lightning(team, double=False)
    found["lightning rates"] = find_rate(team, folder)
    return found
