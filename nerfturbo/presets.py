"""Named starting points. `auto` picks by device; every value can still be overridden."""

from __future__ import annotations

from dataclasses import replace

from .config import Config, FieldConfig, GridConfig, OptimConfig, RenderConfig, TrainConfig, VoxelConfig
from .errors import InputError

_PRESETS: dict[str, Config] = {
    "ngp": Config(
        preset="ngp",
        field=FieldConfig(n_levels=8, n_features=4, max_resolution=1024),
        optim=OptimConfig(
            hold_fraction=0.2,
            final_lr_fraction=0.05,
            weight_decay=0.0,
            skip_untouched=False,
            ema_decay=0.999,
            ema_every=16,
        ),
    ),
    "ngp-cpu": Config(
        preset="ngp-cpu",
        grid=GridConfig(resolution=64, warmup_steps=128, decay=0.8),
        field=FieldConfig(n_levels=8, n_features=4, log2_entries=15, max_resolution=512, width=32),
        render=RenderConfig(steps_per_diagonal=512, alpha_thre=0.01),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, skip_untouched=False),
        train=TrainConfig(steps=1500, batch_samples=1 << 14, max_rays=8192, initial_rays=256),
    ),
    "vanilla": Config(
        preset="vanilla",
        grid=GridConfig(resolution=96),
        render=RenderConfig(prune=False),
        field=FieldConfig(kind="vanilla", width=256, depth=8),
        optim=OptimConfig(lr=5e-4, final_lr_fraction=0.1, warmup_steps=200, eps=1e-8, weight_decay=0.0),
        train=TrainConfig(steps=50_000, batch_samples=1 << 16, max_rays=1 << 14, initial_rays=1024),
    ),
    "voxels": Config(
        preset="voxels",
        field=FieldConfig(kind="voxels", sh_degree=3),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, final_lr_fraction=0.05),
    ),
    "voxels-cpu": Config(
        preset="voxels-cpu",
        grid=GridConfig(resolution=64, warmup_steps=128, decay=0.8),
        field=FieldConfig(kind="voxels", sh_degree=2),
        voxels=VoxelConfig(resolutions=(32, 64, 128), subdivide_at=(0.08, 0.3), prune_rays=1 << 16, max_nodes=400_000),
        render=RenderConfig(steps_per_diagonal=512, alpha_thre=0.01),
        optim=OptimConfig(lr=3e-2, weight_decay=0.0),
        train=TrainConfig(steps=1500, batch_samples=1 << 14, max_rays=8192, initial_rays=256),
    ),
}


def preset_names() -> list[str]:
    return sorted(_PRESETS)


def preset(name: str, device: str = "cpu") -> Config:
    """A preset by name; "auto" is ngp on a GPU and ngp-cpu on a CPU.

    >>> preset("auto", "cpu").preset
    'ngp-cpu'
    """
    if name == "auto":
        name = "ngp-cpu" if device == "cpu" else "ngp"
    if name not in _PRESETS:
        raise InputError("preset", "one of auto, " + ", ".join(preset_names()), repr(name))
    return replace(_PRESETS[name])
