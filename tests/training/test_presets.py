"""The presets of scenes that stand still in a box, at a size that one core trains in seconds.

Those that move, that have no end, and those of voxels and planes have the same test in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nerfturbo.config import Config, DataConfig, GridConfig
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.evaluation.metrics import constant_baseline_psnr
from nerfturbo.presets import preset, preset_names, size_notes
from nerfturbo.sampling import OccupancyGrid
from nerfturbo.training import Trainer

from ..tiny import ball_scene


def small(name: str, steps: int) -> Config:
    config = preset(name)
    deep = config.field.kind == "vanilla"
    field = {"width": 48, "depth": 3} if deep else {"log2_entries": 12, "max_resolution": 64, "width": 32}
    train = {"steps": steps, "batch_samples": 1 << 12, "max_rays": 512}
    return replace(
        config,
        grid=replace(config.grid, resolution=16, update_every=4, decay=0.8),
        field=replace(config.field, **field),
        render=replace(config.render, steps_per_diagonal=32),
        optim=replace(config.optim, lr=8e-3 if deep else 2e-2, warmup_steps=10 if deep else 20, ema_decay=0.0),
        train=replace(config.train, **train),
    )


@pytest.mark.parametrize(
    ("name", "steps"), [("ngp", 80), ("ngp-cpu", 150), ("quality", 80), ("quality-cpu", 80), ("vanilla", 150)]
)
def test_every_preset_learns(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseen views: at least 6 dB above the best constant picture."""
    monkeypatch.setattr(OccupancyGrid, "warmup_steps", 64)
    trainer, test = Trainer(small(name, steps), ball_scene(n_views=8)), ball_scene("test")
    trainer.fit()
    assert evaluate(trainer.model, test, with_ssim=False).psnr >= constant_baseline_psnr(test) + 6.0


def test_a_preset_for_gpus_says_so_on_a_cpu() -> None:
    for name in preset_names():
        config = preset(name)
        notes = size_notes(config, "cpu")
        assert size_notes(config, "cuda") == () and (notes == ()) == name.endswith("-cpu"), name
        if notes and f"{name}-cpu" in preset_names():
            assert notes[0].startswith(f"warning: preset {name} ") and f"--preset {name}-cpu" in notes[0]
        smaller = replace(config, train=replace(config.train, batch_samples=4096))
        assert size_notes(smaller, "cpu") == (), "made small by hand"


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: GridConfig(resolution=37), "grid.resolution: expected a multiple of 4, got 37"),
        (lambda: DataConfig(bounds="nonsense"), "data.bounds: expected one of auto, bounded, unbounded, ndc"),
        (lambda: DataConfig(bounds="bounded up q"), "data.bounds: expected .* an axis behind it, got bounded up q"),
    ],
)
def test_configs_refuse_what_nothing_could_be_made_of(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()
    assert DataConfig(bounds="bounded up -y").placing == ("bounded", "-y")
