"""Precision, accumulation, running mean, skipped steps and other pictures in the captured step."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from nerfturbo.config import VanillaConfig
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.scene import Scene
from nerfturbo.training import Trainer
from nerfturbo.training.stability import first_bad_tensor

from .test_graph import SMALL, deterministic, make_step, run, soon_warm

pytestmark = pytest.mark.gpu
__all__ = ["deterministic", "soon_warm"]


@pytest.fixture(scope="module")
def scene() -> Scene:
    return builtin_scene("toybox", "train", resolution=100, n_views=12)


CHANGES = {
    "bf16": {"train": {"precision": "bf16"}},
    "fp32": {"train": {"precision": "fp32"}},
    "accumulate": {"train": {"accumulate": 3}},
    "mean": {"optim": {"ema_decay": 0.9}},
    "clip": {"optim": {"clip_norm": 1e-3}},
    "no grid": {"grid": {"enabled": False}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_captured_equals_eager(scene: Scene, deterministic: None, name: str):
    config = SMALL
    for stage, values in CHANGES[name].items():
        config = replace(config, **{stage: replace(getattr(config, stage), **values)})
    steps = [make_step(scene, config, capture=capture) for capture in (True, False)]
    states = [run(step, 40) for step in steps]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    for one, two in zip(steps[0].optimizer.averages, steps[1].optimizer.averages, strict=True):
        assert torch.equal(one, two)


def test_skipped_steps_reach_the_host_and_lower_the_scale(scene: Scene):
    trainer = Trainer(SMALL, scene, device="cuda")
    trainer.stepper.prepare()
    trainer.optimizer.scale.fill_(1e30)  # every gradient overflows until the scale has fallen
    trainer.fit()
    trainer.stepper.finish()
    counted = int(trainer.optimizer.skipped)
    assert counted > 0 and int(trainer.optimizer.step_count) == SMALL.train.steps - counted
    assert 0 < trainer.skipped <= counted  # the last chunk is reported one chunk later
    assert all(
        torch.isfinite(value).all() for value in trainer.model.state_dict().values() if value.is_floating_point()
    )
    assert first_bad_tensor(trainer).startswith("none any more")


def test_coarse_pictures_first_record_the_step_anew(scene: Scene):
    config = replace(SMALL, train=replace(SMALL.train, coarse_fraction=0.3))
    losses: list[float] = []
    trainer = Trainer(config, scene, device="cuda", callbacks=[lambda _, record: losses.append(record.mse)])
    trainer.fit()
    assert trainer.pixels.scene.cameras.size[0, 0] == 100 and sum(losses[-5:]) / 5 < 0.6 * losses[0]


@pytest.mark.parametrize("capture", [False, True])
def test_checkpointing_trains_vanilla_in_less_memory(scene: Scene, capture: bool):
    """2^17 samples keep about 5 KB of layers each; a grid of 64^3 cells, weights and pictures are small beside that."""
    peaks = []
    for checkpointing in (False, True):
        field = VanillaConfig(width=256, depth=8)
        config = replace(SMALL, field=field, sampler=replace(SMALL.sampler, prune=False))
        train = {"steps": 4, "capture": capture, "batch_samples": 1 << 17, "max_rays": 1 << 14}
        train["checkpointing"] = checkpointing
        config = replace(config, train=replace(config.train, **train))
        gc.collect()  # a trainer is freed in cycles: the first one must not be counted with the second
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        Trainer(config, scene, device="cuda").fit()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.5 * peaks[0]
