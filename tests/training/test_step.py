"""One step: closed forms where nothing is in the way, empty batches, and the ray count that fills the budget."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import Config
from nerfturbo.data.batches import PixelBatch
from nerfturbo.ops import use_backend
from nerfturbo.training import Trainer
from nerfturbo.training.loss import compute_loss, draw_background, target_over
from nerfturbo.types import Rays

from ..tiny import ball_scene, tiny_config

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def trainer(config: Config | None = None) -> Trainer:
    return Trainer(config or tiny_config(steps=2), ball_scene())


def empty_grid(made: Trainer) -> Trainer:
    made.model.grid.set_occupied(torch.zeros(1, 8, 8, 8, dtype=torch.bool))
    return made


def test_target_is_the_picture_over_the_background() -> None:
    rays = Rays(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 1.0]]).expand(2, 3))
    rgba = torch.tensor([[1.0, 0.0, 0.0, 0.25], [0.0, 1.0, 0.0, 1.0]])
    target = target_over(PixelBatch(rays, rgba), torch.full((2, 3), 0.5))
    assert torch.allclose(target, torch.tensor([[0.625, 0.375, 0.375], [0.0, 1.0, 0.0]]))
    assert target_over(PixelBatch(rays, rgba[:, :3]), torch.zeros(2, 3)) is not None


@pytest.mark.parametrize(("kind", "value"), [("white", 1.0), ("black", 0.0)])
def test_constant_backgrounds(kind: str, value: float) -> None:
    config = tiny_config()
    config = replace(config, train=replace(config.train, background=kind))
    assert torch.equal(draw_background(config, 0, 5, torch.device("cpu")), torch.full((5, 3), value))


def test_random_backgrounds_depend_on_step_and_index_alone() -> None:
    device = torch.device("cpu")
    whole = draw_background(tiny_config(), 3, 8, device)
    assert torch.equal(whole[5:], draw_background(tiny_config(), 3, 3, device, first=5))
    assert not torch.equal(whole, draw_background(tiny_config(), 4, 8, device))
    assert float(whole.min()) >= 0.0 and float(whole.max()) < 1.0


def test_in_an_empty_grid_the_error_is_that_of_the_background_alone() -> None:
    made = empty_grid(trainer())
    batch = made.pixels.draw(0, 50)
    background = draw_background(made.config, 0, 50, made.device)
    result = compute_loss(made.model, batch, background, step=0)
    expected = (background - target_over(batch, background)).square().mean()
    assert int(result.n_samples) == 0
    assert float(result.mse) == pytest.approx(float(expected), rel=1e-4)


def test_a_step_without_any_sample_changes_nothing_and_breaks_nothing() -> None:
    made = empty_grid(trainer())
    made.model.grid.update = lambda *args, **kwargs: None  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in made.model.named_parameters() if name.endswith("table")}
    summary = made.fit()
    assert (summary.steps, summary.samples) == (2, 0)
    for name, value in made.model.named_parameters():
        assert torch.isfinite(value).all()
        if name in before:
            assert torch.equal(before[name], value)


def test_the_number_of_rays_follows_the_sample_budget() -> None:
    config = tiny_config()
    made = trainer(replace(config, train=replace(config.train, batch_samples=1000, max_rays=300)))
    stepper = made.stepper
    stepper.n_rays = 100
    stepper.adapt(n_samples=2000, n_marched=2000)  # twice too many
    assert stepper.n_rays == 64  # 50, but never fewer than 64
    stepper.n_rays = 200
    stepper.adapt(n_samples=1600, n_marched=1600)
    assert stepper.n_rays == 125
    stepper.adapt(n_samples=1, n_marched=1)  # far too few: at most doubled
    assert stepper.n_rays == 250
    stepper.adapt(n_samples=1, n_marched=1)
    assert stepper.n_rays == 300  # the limit
    stepper.adapt(n_samples=100, n_marched=100 * 1000 * 8)  # the visibility pass is what is full
    assert stepper.n_rays == 64


def test_a_step_imports_no_compiler() -> None:
    """torch's compiler and the algebra it brings take seconds, which a first step would wait for."""
    program = """
import sys
from nerfturbo.training import Trainer
from tests.tiny import ball_scene, tiny_config
from dataclasses import replace
config = tiny_config()
config = replace(config, train=replace(config.train, steps=1, precision="fp16"))
trainer = Trainer(config, ball_scene())
trainer.fit()
assert trainer.optimizer.loss_scale is not None
print(sorted(set(sys.modules) & {"sympy", "torchmetrics", "torch._dynamo"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[-2] == "[]"
