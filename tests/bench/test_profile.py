"""What is profiled is the step that trains, with everything that a config turns on; and its stages add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nerfturbo.bench.profile import STAGES, StageClock, step_timed
from nerfturbo.config import CameraConfig, Config, LossConfig, PhotoConfig, VanillaConfig
from nerfturbo.data.keypoints import Keypoints
from nerfturbo.data.scene import Scene
from nerfturbo.fields import InstantNGP
from nerfturbo.ops import use_backend
from nerfturbo.training.loss import Stages, place_samples
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, tiny_config

STEPS = 3
CORRECTED = CameraConfig(refine=True, focal=True)


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with use_backend("reference"):
        yield


def keypoints(scene: Scene) -> Keypoints:
    """The pixels in the middle of each picture of a ball, whose near side is known."""
    index = torch.arange(len(scene))
    rays = scene.cameras.rays(index, *(scene.cameras.size / 2.0).unbind(-1))
    return Keypoints(rays, rays.origins.norm(dim=-1) - 0.9, torch.ones(len(scene)))


def config_with(what: str) -> Config:
    config = tiny_config(steps=STEPS)
    train = config.train
    return {
        "plain": config,
        "depth": replace(config, loss=LossConfig(depth=0.5)),
        "cameras": replace(config, cameras=CORRECTED, photo=PhotoConfig(exposure=True)),
        "losses": replace(config, loss=LossConfig(distortion=0.1, opacity=0.1)),
        "batches": replace(config, train=replace(train, accumulate=2)),
        "vanilla": replace(config, field=VanillaConfig(width=16, depth=2), loss=LossConfig(depth=0.5)),
    }[what]


def trainer_with(what: str) -> Trainer:
    config, scene = config_with(what), ball_scene()
    return Trainer(config, replace(scene, keypoints=keypoints(scene) if config.loss.depth else None))


@pytest.mark.parametrize("what", ["plain", "depth", "cameras", "losses", "batches", "vanilla"])
def test_profiled_steps_train_the_same_parameters(what: str) -> None:
    trained, profiled, before = trainer_with(what), trainer_with(what), trainer_with(what)
    trained.fit()
    step_timed(profiled, StageClock(torch.device("cpu")), STEPS)
    assert profiled.step == trained.step == STEPS
    found, moved = dict(profiled.model.named_parameters()), set()
    start = dict(before.model.named_parameters())
    for name, value in trained.model.named_parameters():
        assert torch.equal(found[name], value), name
        if not torch.equal(value, start[name]):
            moved.add(name.split(".")[0])
    assert moved == ({"field", "photos"} if what == "cameras" else {"field"})


def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def waiting(*given: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*given, **options)

    return waiting


def test_every_part_counts_where_it_belongs_and_the_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels and features of depth supervision both have rays to correct, samples to place and a field to ask."""
    config = replace(tiny_config(steps=2), cameras=CORRECTED, loss=LossConfig(depth=0.5))
    scene, device = ball_scene(), torch.device("cpu")
    scene = replace(scene, keypoints=keypoints(scene))
    trainer = Trainer(config, scene, stages=Stages(place=slow(place_samples, 0.1)))
    field, photos = trainer.model.field, trainer.model.photos
    assert isinstance(field, InstantNGP) and photos is not None
    monkeypatch.setattr(field, "sample_logits", slow(field.sample_logits, 0.15))
    monkeypatch.setattr(photos, "rays", slow(photos.rays, 0.2))
    step_timed(trainer, StageClock(device), 1)
    clock, begun = StageClock(device), time.perf_counter()
    step_timed(trainer, clock, 1)
    total, found = time.perf_counter() - begun, clock.seconds
    assert set(found) == set(STAGES) and clock.now is None
    assert found["march"] >= 0.2 and found["field"] >= 0.3 and found["rays"] >= 0.4
    assert all(found[name] > 0.0 for name in ("composite", "backward", "optimizer"))
    assert sum(found.values()) <= total and found["composite"] + found["march"] < total - 0.7
