"""Named starting points. `auto` picks by device; every value can still be overridden."""

from __future__ import annotations

from dataclasses import replace

from .config import (
    Config,
    FactorConfig,
    FieldConfig,
    GridConfig,
    MotionConfig,
    OptimConfig,
    RenderConfig,
    SamplingConfig,
    TrainConfig,
    VoxelConfig,
)
from .errors import InputError

_PRESETS: dict[str, Config] = {
    "ngp": Config(
        preset="ngp",
        grid=GridConfig(hide_unseen=True),
        field=FieldConfig(n_levels=8, n_features=4, max_resolution=1024),
        render=RenderConfig(steps_per_diagonal=1536, eval_refine=2),
        optim=OptimConfig(
            hold_fraction=0.2,
            final_lr_fraction=0.05,
            weight_decay=0.0,
            table_decay=0.01,
            skip_untouched=False,
            ema_decay=0.999,
            ema_every=16,
        ),
    ),
    "ngp-cpu": Config(
        preset="ngp-cpu",
        grid=GridConfig(resolution=64, warmup_steps=128, decay=0.8, hide_unseen=True),
        field=FieldConfig(n_levels=8, n_features=4, log2_entries=15, max_resolution=512, width=32),
        render=RenderConfig(steps_per_diagonal=512, alpha_thre=0.01),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, skip_untouched=False),
        train=TrainConfig(steps=1500, batch_samples=1 << 14, max_rays=8192, initial_rays=256),
    ),
    "vanilla": Config(
        preset="vanilla",
        grid=GridConfig(resolution=96, hide_unseen=True),
        render=RenderConfig(prune=False),
        field=FieldConfig(kind="vanilla", width=256, depth=8),
        optim=OptimConfig(lr=2e-3, beta2=0.999, final_lr_fraction=0.1, warmup_steps=200, eps=1e-8, weight_decay=0.0),
        train=TrainConfig(steps=50_000, batch_samples=1 << 16, max_rays=1 << 14, initial_rays=1024),
    ),
    "factor": Config(
        preset="factor",
        grid=GridConfig(hide_unseen=True),
        field=FieldConfig(kind="factor"),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, final_lr_fraction=0.05, eps=1e-8),
        train=TrainConfig(batch_samples=1 << 17, max_rays=1 << 15, initial_rays=2048),
    ),
    "factor-cpu": Config(
        preset="factor-cpu",
        grid=GridConfig(resolution=64, warmup_steps=128, decay=0.8, hide_unseen=True),
        field=FieldConfig(kind="factor", width=32),
        factor=FactorConfig(resolutions=(64, 128), refine_at=(0.2,), density_components=4, color_components=8),
        render=RenderConfig(steps_per_diagonal=512, alpha_thre=0.01),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, eps=1e-8),
        train=TrainConfig(steps=1500, batch_samples=1 << 13, max_rays=8192, initial_rays=256),
    ),
    "voxels": Config(
        preset="voxels",
        grid=GridConfig(hide_unseen=True),
        field=FieldConfig(kind="voxels", sh_degree=3),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, final_lr_fraction=0.05),
    ),
    "voxels-cpu": Config(
        preset="voxels-cpu",
        grid=GridConfig(resolution=64, warmup_steps=128, decay=0.8, hide_unseen=True),
        field=FieldConfig(kind="voxels", sh_degree=2),
        voxels=VoxelConfig(resolutions=(32, 64, 128), subdivide_at=(0.08, 0.3), prune_rays=1 << 16, max_nodes=400_000),
        render=RenderConfig(steps_per_diagonal=512, alpha_thre=0.01),
        optim=OptimConfig(lr=3e-2, weight_decay=0.0),
        train=TrainConfig(steps=1500, batch_samples=1 << 14, max_rays=8192, initial_rays=256),
    ),
    "proposal": Config(
        preset="proposal",
        grid=GridConfig(resolution=64, update_every=64),
        field=FieldConfig(n_levels=8, n_features=4, log2_entries=20, max_resolution=4096, initial_density=0.25),
        sampling=SamplingConfig(
            kind="proposal", n_samples=48, coarse_samples=(256, 96), distortion=0.01, near_gradient=1.0
        ),
        optim=OptimConfig(
            hold_fraction=0.2,
            final_lr_fraction=0.03,
            weight_decay=0.0,
            table_decay=0.1,
            skip_untouched=False,
            ema_decay=0.999,
            ema_every=16,
        ),
        train=TrainConfig(batch_samples=48 * 8192, max_rays=8192, initial_rays=8192),
    ),
    "proposal-cpu": Config(
        preset="proposal-cpu",
        grid=GridConfig(resolution=32, update_every=64, warmup_steps=128, decay=0.8),
        field=FieldConfig(
            n_levels=8, n_features=4, log2_entries=15, max_resolution=1024, width=32, initial_density=0.25
        ),
        sampling=SamplingConfig(
            kind="proposal",
            n_samples=24,
            coarse_samples=(48, 24),
            anneal_steps=200,
            near_gradient=0.2,
            proposal_levels=4,
            proposal_log2_entries=13,
            proposal_resolutions=(64, 128),
        ),
        render=RenderConfig(steps_per_diagonal=512),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, table_decay=0.1, skip_untouched=False),
        train=TrainConfig(steps=1500, batch_samples=24 * 512, max_rays=512, initial_rays=512),
    ),
    "hierarchy": Config(
        preset="hierarchy",
        grid=GridConfig(resolution=64, update_every=256),
        field=FieldConfig(kind="vanilla", width=256, depth=8),
        sampling=SamplingConfig(kind="hierarchy", n_samples=128, coarse_samples=(64,), spacing="uniform"),
        optim=OptimConfig(lr=5e-4, final_lr_fraction=0.1, warmup_steps=200, eps=1e-8, weight_decay=0.0),
        train=TrainConfig(steps=50_000, batch_samples=192 * 1024, max_rays=1024, initial_rays=1024),
    ),
}

# For scenes that move. A cell is occupied if it ever is: where an update looks at one moment, the grid forgets slower.
_PRESETS |= {
    "dynamic": replace(
        _PRESETS["ngp"],
        preset="dynamic",
        grid=GridConfig(moments=2, hide_unseen=True),
        field=replace(_PRESETS["ngp"].field, kind="ngp-time"),
    ),
    "dynamic-cpu": replace(
        _PRESETS["ngp-cpu"],
        preset="dynamic-cpu",
        grid=replace(_PRESETS["ngp-cpu"].grid, moments=2, decay=0.9),
        field=replace(_PRESETS["ngp-cpu"].field, kind="ngp-time"),
        motion=MotionConfig(n_levels=4, log2_entries=14, max_resolution=64),
        optim=replace(_PRESETS["ngp-cpu"].optim, table_decay=0.01),
        render=replace(
            _PRESETS["ngp-cpu"].render, alpha_thre=0.0
        ),  # what is thin at first must not be skipped for good
    ),
    **{
        kind: replace(
            _PRESETS["vanilla"],
            preset=kind,
            grid=replace(_PRESETS["vanilla"].grid, moments=1, decay=0.97),
            field=replace(_PRESETS["vanilla"].field, kind=kind),
            optim=replace(_PRESETS["vanilla"].optim, lr=5e-4, beta2=0.99),
        )
        for kind in ("tnerf", "dnerf")
    },
}


# What helped views that were never seen, whatever it costs in time: docs/quality.md has the measurements.
_PRESETS["quality"] = replace(
    _PRESETS["ngp"],
    preset="quality",
    field=replace(_PRESETS["ngp"].field, n_levels=12),
    render=replace(_PRESETS["ngp"].render, eval_rays=2),
    train=TrainConfig(steps=50_000),
)

_PRESETS["quality-cpu"] = replace(
    _PRESETS["ngp-cpu"],
    preset="quality-cpu",
    render=replace(_PRESETS["ngp-cpu"].render, thin=0.05),
    optim=replace(_PRESETS["ngp-cpu"].optim, table_decay=0.1),
)


CPU_SAMPLES = 1 << 15  # a step: twice what the presets for CPUs have, half of the least that one for GPUs has


def preset_names() -> list[str]:
    return sorted(_PRESETS)


def size_notes(config: Config, device: str) -> tuple[str, ...]:
    """What to say of a config that was made for a GPU and is to be trained on a CPU.

    >>> size_notes(preset("quality"), "cpu")[0]
    'warning: preset quality is sized for a GPU (262144 samples a step): on this CPU take --preset quality-cpu'
    """
    samples, twin = config.train.batch_samples, f"{config.preset}-cpu"
    if not device.startswith("cpu") or samples <= CPU_SAMPLES or config.preset not in _PRESETS:
        return ()
    advice = "a step takes long, unless --train.batch-samples is 4096 or so"
    advice = f"take --preset {twin}" if twin in _PRESETS else advice
    return (f"warning: preset {config.preset} is sized for a GPU ({samples} samples a step): on this CPU {advice}",)


def preset(name: str, device: str = "cpu") -> Config:
    """A preset by name; "auto" is ngp on a GPU and ngp-cpu on a CPU (a scene without an end, or one that moves, then
    takes another: `nerfturbo.data.fitting`).

    >>> preset("auto", "cpu").preset
    'ngp-cpu'
    """
    if name == "auto":
        name = "ngp-cpu" if device == "cpu" else "ngp"
    if name not in _PRESETS:
        raise InputError("preset", "one of auto, " + ", ".join(preset_names()), repr(name))
    return replace(_PRESETS[name])
