"""One chain from samples to loss: what five copies of it once got wrong, each as a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nerfturbo.config import Config, FactorConfig, LossConfig, NgpConfig, OptimConfig, VanillaConfig
from nerfturbo.errors import InputError
from nerfturbo.fields.field import offers, table_parameters
from nerfturbo.ops import use_backend
from nerfturbo.training import loss as loss_module
from nerfturbo.training.loss import compute_loss, draw_background
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, moving_ball_scene, tiny_config
from .matrix import tiny_preset
from .workers import QUIET

FIELDS = {
    "ngp": NgpConfig(n_levels=2, log2_entries=8, max_resolution=32, width=16),
    "vanilla": VanillaConfig(width=16, depth=3),
    "factor": FactorConfig(resolutions=(8, 16), refine_at=(0.5,), components=(2, 2), width=16),
}


def gradient_norm(config: Config) -> float:
    trainer = Trainer(config, ball_scene())
    batch = trainer.pixels.draw(0, 64)
    compute_loss(trainer.model, batch, draw_background(config, 0, 64, torch.device("cpu")), step=0).loss.backward()
    return float(torch.cat([p.grad.reshape(-1) for p in trainer.model.field.parameters()]).norm())


@pytest.mark.parametrize("field", FIELDS)
def test_near_gradients_count_for_every_field(field: str) -> None:
    config = replace(tiny_config(), field=FIELDS[field])
    near = replace(config, loss=LossConfig(near_gradient=100.0))  # everything is nearer than that
    assert 0.0 < gradient_norm(near) < 0.01 * gradient_norm(config)


def test_losses_are_the_same_with_and_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, compositing and losses in one op, or one after another."""
    losses = LossConfig(distortion=0.3, opacity=0.5)
    config, found = replace(tiny_config(), field=FIELDS["ngp"], loss=losses), []
    for hidden in ("", "sample_logits"):
        monkeypatch.setattr(loss_module, "offers", lambda x, name, hidden=hidden: name != hidden and offers(x, name))
        trainer = Trainer(config, ball_scene())
        result = compute_loss(trainer.model, trainer.pixels.draw(0, 64), torch.zeros(64, 3), step=0)
        found.append([result.loss.item(), result.mse.item()])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0][0] > 2.0 * found[0][1]


def lightning_model(config: Config, scene: Any, steps: int) -> Any:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from nerfturbo.training.lightning import NerfData, NerfModule

    module = NerfModule(config)
    pl.Trainer(max_steps=steps, accelerator="cpu", **QUIET).fit(module, NerfData(config, (scene, scene)))
    return module.model


@pytest.mark.filterwarnings("ignore")
def test_every_table_learns_under_eager_lightning() -> None:
    config, scene = tiny_preset("dynamic"), moving_ball_scene(n_views=6)
    start = [table.detach().clone() for table in table_parameters(Trainer(config, scene).model)]
    model = lightning_model(config, scene, 4)
    tables = table_parameters(model)
    assert len(tables) == len(start) == 4
    for before, after in zip(start, tables, strict=True):
        assert not torch.equal(before, after)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", FIELDS)
def test_lightning_computes_in_the_config_s_precision_for_every_field(field: str) -> None:
    config = replace(tiny_config(steps=3), field=FIELDS[field])
    half = replace(config, train=replace(config.train, precision="bf16"))
    native = Trainer(half, ball_scene())
    with use_backend("reference"):
        exact, told = (lightning_model(one, ball_scene(), 3).state_dict() for one in (config, half))
        native.fit()
    assert any(not torch.equal(value, told[name]) for name, value in exact.items())
    for name, value in native.model.state_dict().items():
        assert torch.allclose(value.float(), told[name].float(), atol=1e-6), name


def test_ranges_are_checked_by_the_library() -> None:
    with pytest.raises(InputError, match=r"optim.lr: expected a number > 0 and <= 1000, got -1"):
        OptimConfig(lr=-1)
