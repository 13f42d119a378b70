"""Scenes that move, trained: every preset learns, resuming changes nothing, renders follow the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import Config, VanillaConfig
from nerfturbo.data.images import composite_over
from nerfturbo.data.scene import Scene
from nerfturbo.data.scene_defaults import fitted_config, motion_notes
from nerfturbo.evaluation.camera_path import still_path, with_times
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.evaluation.metrics import constant_baseline_psnr
from nerfturbo.fields import ngp_time, vanilla
from nerfturbo.ops import use_backend
from nerfturbo.presets import preset
from nerfturbo.sampling import OccupancyGrid
from nerfturbo.training.checkpoint import latest_checkpoint
from nerfturbo.training.trainer import Trainer, load_model

from ..tiny import ball_scene, moving_ball_pictures, moving_ball_scene


@pytest.fixture(scope="module")
def scenes() -> tuple[Scene, Scene]:
    return moving_ball_scene("train"), moving_ball_scene("test", n_views=5)


@pytest.fixture(autouse=True)
def _short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ball that crosses the box needs few cells and sines of time, and its grid is soon warm."""
    monkeypatch.setattr(ngp_time, "TIME_RESOLUTION", 6)
    monkeypatch.setattr(vanilla, "TIME_FREQUENCIES", 2)
    monkeypatch.setattr(OccupancyGrid, "warmup_steps", 64)


def small(name: str, steps: int, **train: object) -> Config:
    """A preset at a size that two cores train in seconds."""
    config = preset(name)
    deep = isinstance(config.field, VanillaConfig)
    field = {"width": 64, "depth": 4} if deep else {"log2_entries": 12, "max_resolution": 64, "width": 32}
    field |= {} if deep else {"motion_log2_entries": 10, "motion_resolution": 32}
    optim = {"lr": 4e-3, "warmup_steps": 10} if deep else {"lr": 2e-2}
    values = {"steps": steps, "batch_samples": 1 << 12, "max_rays": 1024, **train}
    return replace(
        config,
        grid=replace(config.grid, resolution=16, update_every=4, decay=0.8),
        field=replace(config.field, **field),
        render=replace(config.render, steps_per_diagonal=32),
        optim=replace(config.optim, **optim, ema_decay=0.0),
        train=replace(config.train, **values),
    )


@pytest.mark.parametrize(("name", "steps"), [("dynamic", 100), ("dynamic-cpu", 200), ("tnerf", 120), ("dnerf", 110)])
def test_every_preset_learns(name: str, steps: int, scenes: tuple[Scene, Scene]) -> None:
    """Unseen views at unseen times: at least 6 dB above the best constant picture."""
    trainer = Trainer(small(name, steps), scenes[0])
    trainer.fit()
    reached = evaluate(trainer.model, scenes[1], with_ssim=False).psnr
    assert reached >= constant_baseline_psnr(scenes[1]) + 6.0
    if name == "dynamic-cpu":
        _renders_follow_the_time(trainer, scenes[1])


def _renders_follow_the_time(trainer: Trainer, scene: Scene) -> None:
    """From one camera: other times, other pictures; near times, near pictures; each is nearest to its own truth."""
    path = with_times(still_path(scene.cameras, 2, 5), None)
    assert path.times is not None and path.times.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    shown = torch.stack([trainer.model.render_image(path, index).rgb for index in range(5)])
    truth = composite_over(moving_ball_pictures(path).float() / 255.0, 1.0)
    errors = (shown[:, None] - truth[None]).square().mean((2, 3, 4))
    assert torch.equal(errors.argmin(1), torch.arange(5)), errors
    between = replace(path, times=torch.tensor([0.5, 0.51, 0.5, 0.5, 0.5]))
    near = (trainer.model.render_image(between, 1).rgb - shown[2]).square().mean()
    assert near < 0.2 * (shown[3] - shown[2]).square().mean()


def test_half_precision_trains_too(scenes: tuple[Scene, Scene]) -> None:
    """fp16 tables with a loss scale: the loss falls, nothing is skipped for ever, and rendering reads the halves."""
    losses: list[float] = []
    with use_backend("reference"):  # numba would compile its half kernels for this alone
        trainer = Trainer(small("dynamic-cpu", 20, precision="fp16", batch_samples=1 << 10), scenes[0])
        trainer.callbacks.append(lambda _, record: losses.append(record.mse))
        trainer.fit()
    grids = [trainer.model.field.encoding, *trainer.model.field.motion_grids]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4]) and trainer.skipped < 5
    assert all(grid.half is not None and grid.half.dtype == torch.float16 for grid in grids)


def test_save_and_resume_is_never_stopped(scenes: tuple[Scene, Scene], tmp_path: Path) -> None:
    whole = Trainer(small("dynamic-cpu", 12), scenes[0])
    whole.fit()
    first = Trainer(small("dynamic-cpu", 12), scenes[0], callbacks=[lambda t, r: t.stop() if r.step == 6 else None])
    first.fit()
    assert first.step == 6
    first.save(tmp_path / "checkpoints")
    second = Trainer(small("dynamic-cpu", 12), scenes[0])
    second.resume(latest_checkpoint(tmp_path))
    second.fit()
    for (name, one), other in zip(whole.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    second.save(tmp_path / "checkpoints")
    loaded = load_model(latest_checkpoint(tmp_path))
    camera = scenes[1].cameras
    assert torch.equal(loaded.render_image(camera, 1).rgb, second.model.render_image(camera, 1).rgb)


def test_lightning_trains_it(scenes: tuple[Scene, Scene]) -> None:
    pytest.importorskip("lightning")
    from nerfturbo.training.lightning import fit_with_lightning

    made = [Trainer(small("dynamic-cpu", 6), scenes[0]) for _ in range(2)]
    made[0].fit()
    fit_with_lightning(made[1])
    assert made[1].step == 6
    for (name, one), other in zip(made[0].model.state_dict().items(), made[1].model.state_dict().values(), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-5), name


def test_auto_picks_by_scene_and_keeps_what_was_chosen(scenes: tuple[Scene, Scene]) -> None:
    start = preset("auto", "cpu")
    by_hand = replace(start, train=replace(start.train, steps=7), grid=replace(start.grid, resolution=32))
    config, notes = fitted_config(by_hand, scenes[0], auto=start)
    assert config.preset == "dynamic-cpu" and config.field.kind == "ngp-time" and "dynamic-cpu" in notes[0]
    assert config.train.steps == 7 and config.grid.resolution == 32
    assert config.grid.moments == preset("dynamic-cpu").grid.moments
    gpu = preset("auto", "cuda")
    assert fitted_config(gpu, scenes[0], auto=gpu)[0] == preset("dynamic")
    kept, notes = fitted_config(by_hand, scenes[0])
    assert kept == by_hand and "warning" in notes[0] and "dynamic" in notes[0]
    still = ball_scene()
    assert fitted_config(start, still, auto=start) == (start, ())
    assert "no picture has a time" in motion_notes(preset("tnerf"), still)[0]
    assert Trainer.for_scene(scenes[0], steps=1).config.preset == "dynamic-cpu"
