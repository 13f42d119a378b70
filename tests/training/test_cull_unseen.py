"""What no picture shows is emptied, and no picture changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nerfturbo.data.batches import PixelSampler
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import unpack_bits
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training import Trainer
from nerfturbo.training.refine import cull_unseen, shown_cells

from ..tiny import ball_scene, tiny_config
from .workers import QUIET


class BallAndCore(torch.nn.Module):
    """An opaque shell between radii 0.3 and 0.5, and something inside it that nobody sees."""

    strength = 400.0

    def density(self, positions: Tensor, *_: Tensor) -> Tensor:
        radius = positions.norm(dim=-1)
        return self.strength * ((radius < 0.5) & (radius > 0.3) | (radius < 0.15)).to(positions.dtype)

    def forward(self, positions: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return positions.abs().clamp(max=1.0), self.density(positions)


def learned_model(strength: float = 400.0) -> tuple[NerfModel, PixelSampler]:
    scene, config = ball_scene(), tiny_config()
    config = replace(config, grid=replace(config.grid, resolution=32))
    model = NerfModel(config, SceneBounds.of(scene))
    model.field = BallAndCore()
    model.field.strength = strength
    model.grid.update(0, model.field.density, all_cells=True)
    return model, PixelSampler(scene, torch.device("cpu"), 0)


def test_the_inside_of_a_body_is_emptied_and_no_picture_changes() -> None:
    with use_backend("reference"):
        model, sampler = learned_model()
        before = model.render_image(ball_scene().cameras, 0)
        radius = model.grid.cell_positions(torch.arange(model.grid.n_cells)).norm(dim=-1)
        held = unpack_bits(model.grid.bits).bool()
        assert held[radius < 0.12].all()
        share = cull_unseen(model, sampler)
        kept = unpack_bits(model.grid.bits).bool()
        after = model.render_image(ball_scene().cameras, 0)
    assert not kept[radius < 0.2].any(), "nobody sees the core"
    assert not (kept & ~held).any(), "nothing appears"
    model.grid.recall()
    assert torch.equal(unpack_bits(model.grid.bits).bool(), held), "what was learned is not lost"
    assert abs(share - float((held & ~kept).sum() / held.sum())) < 1e-6
    assert 0.0 < share < 0.9
    torch.testing.assert_close(after.rgb, before.rgb, atol=2e-3, rtol=0.0)
    torch.testing.assert_close(after.opacity, before.opacity, atol=2e-3, rtol=0.0)


def test_only_cells_with_light_and_substance_count_as_shown() -> None:
    with use_backend("reference"):
        model, sampler = learned_model()
        shown = shown_cells(model, sampler, n_rays=1 << 13, at_once=1 << 12).reshape(-1)
    radius = model.grid.cell_positions(torch.arange(model.grid.n_cells)).norm(dim=-1)
    assert shown.any() and not shown[radius > 0.6].any() and not shown[radius < 0.28].any()


def test_a_fog_that_all_rays_pass_stays() -> None:
    step_size = NerfModel(tiny_config(), SceneBounds.of(ball_scene())).grid.step_size
    with use_backend("reference"):
        model, sampler = learned_model(strength=4e-3 / step_size)
        assert 0.0 < float(model.grid.thickness.max()) < 0.01, "no sample is as opaque as 1%"
        before = model.render_image(ball_scene().cameras, 0).opacity
        assert cull_unseen(model, sampler) < 0.02, "the few cells that none of so few rays met"
        after = model.render_image(ball_scene().cameras, 0).opacity
    assert float(before.max()) > 5e-3
    torch.testing.assert_close(after, before, atol=5e-4, rtol=0.0)


def test_a_run_that_ends_is_emptied_and_one_that_is_interrupted_is_not() -> None:
    config = tiny_config()
    grid, train = replace(config.grid, cull_unseen=True), replace(config.train, batch_samples=1 << 15)
    config = replace(config, grid=grid, train=train)  # three steps of that many are worth a look
    ended, stopped = Trainer(config, ball_scene()), Trainer(config, ball_scene())
    with use_backend("reference"):
        for trainer in (ended, stopped):
            trainer.begin()
            for _ in range(3):
                trainer.advance()
            trainer.model.field = BallAndCore()  # what was learned: three steps alone hide nothing
            trainer.model.grid.update(0, trainer.model.field.density, all_cells=True)
        bits = stopped.model.grid.bits.clone()
        stopped.end("interrupted")
        assert torch.equal(stopped.model.grid.bits, bits), "resuming must go on as if never interrupted"
        assert torch.equal(ended.model.grid.bits, bits)
        ended.end("steps")
    ended_bits = ended.model.grid.bits.clone()
    fewer = unpack_bits(ended.model.grid.bits).bool() <= unpack_bits(bits).bool()
    assert fewer.all()
    kept = float(unpack_bits(ended.model.grid.bits).sum() / unpack_bits(bits).sum())
    assert 0.0 < ended.culled_fraction < 1.0
    assert abs(ended.culled_fraction - (1.0 - kept)) < 1e-6
    with use_backend("reference"):
        ended.begin()
        assert torch.equal(ended.model.grid.bits, bits), "going on begins where training was"
        with ended.as_finished():
            assert torch.equal(ended.model.grid.bits, ended_bits)
        assert torch.equal(ended.model.grid.bits, bits)


def test_a_run_on_a_cpu_that_is_shorter_than_the_look_hides_nothing() -> None:
    config = tiny_config()
    config = replace(config, grid=replace(config.grid, cull_unseen=True))
    trainer = Trainer(config, ball_scene())
    with use_backend("reference"):
        trainer.begin()
        trainer.advance()
        trainer.model.field = BallAndCore()
        trainer.model.grid.update(0, trainer.model.field.density, all_cells=True)
        bits = trainer.model.grid.bits.clone()
        assert trainer.end("steps").steps == 1 and trainer.culled_fraction == 0.0
        assert torch.equal(trainer.model.grid.bits, bits)
        with trainer.as_finished():
            assert torch.equal(trainer.model.grid.bits, bits)
        assert cull_unseen(trainer.model, trainer.pixels) > 0.0, "there is something to hide, if one looks"


@pytest.mark.filterwarnings("ignore")
def test_under_lightning_it_happens_too_and_a_resumed_run_begins_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from nerfturbo.training import lightning

    config = tiny_config(steps=6)
    config = replace(config, grid=replace(config.grid, cull_unseen=True))
    begun: list[float] = []

    def cull_all(model: NerfModel, pixels: PixelSampler, steps: int) -> float:
        model.grid.bits.zero_()
        return 1.0

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: object, module: lightning.NerfModule, *rest: object) -> None:
            assert module.model is not None
            begun.append(float(module.model.grid.occupied_fraction()))

    monkeypatch.setattr("nerfturbo.training.refine.cull_unseen", cull_all)
    path = None
    with use_backend("reference"):
        for steps in (3, 6):
            module = lightning.NerfModule(config)
            trainer = pl.Trainer(max_steps=steps, accelerator="cpu", callbacks=[Look()], **QUIET)
            data = lightning.NerfData(config, (ball_scene(), ball_scene("test", n_views=1)))
            trainer.fit(module, data, ckpt_path=path, weights_only=False)
            assert module.model is not None and not unpack_bits(module.model.grid.bits).any()
            path = tmp_path / f"{steps}.ckpt"
            trainer.save_checkpoint(path)
    assert len(begun) == 6 and min(begun) > 0.1, begun
