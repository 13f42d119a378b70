"""Named starting points. `auto` picks by device; every value can still be overridden. And how poses are found."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from . import config as c
from .config import Config
from .errors import did_you_mean, refuse

_CPU_GRID = c.GridConfig(resolution=64, decay=0.8, cull_unseen=True)
_CPU_TRAIN = c.TrainConfig(steps=1500, batch_samples=1 << 14, max_rays=8192)
_CPU_SAMPLER, _CPU_RENDER = c.GridSamplerConfig(alpha_thre=0.01), c.RenderConfig(steps_per_diagonal=512)
_CPU = Config(grid=_CPU_GRID, sampler=_CPU_SAMPLER, render=_CPU_RENDER, train=_CPU_TRAIN)
_CPU_HASH: dict[str, Any] = {"n_levels": 8, "n_features": 4, "log2_entries": 15, "width": 32}
_NGP = c.OptimConfig(hold_fraction=0.2, final_lr_fraction=0.05, table_decay=0.01, ema_decay=0.999)
_VANILLA = c.OptimConfig(lr=2e-3, beta2=0.999, final_lr_fraction=0.1, warmup_steps=200)

_PRESETS: dict[str, Config] = {
    "ngp": Config(
        grid=c.GridConfig(cull_unseen=True),
        field=c.NgpConfig(n_levels=8, n_features=4, max_resolution=1024),
        sampler=c.GridSamplerConfig(alpha_thre=0.01),
        render=c.RenderConfig(steps_per_diagonal=1280, eval_refine=2),
        optim=replace(_NGP, lr=2e-2, schedule="inverse", hold_fraction=0.7, final_lr_fraction=0.15, ema_decay=0.9998),
    ),
    "ngp-cpu": replace(
        _CPU,
        field=replace(c.NgpConfig(**_CPU_HASH), log2_entries=16, max_resolution=512),
        optim=c.OptimConfig(lr=2e-2, hold_fraction=0.6, final_lr_fraction=0.2, ema_decay=0.99),
    ),
    "vanilla": Config(
        grid=c.GridConfig(resolution=96, cull_unseen=True),
        field=c.VanillaConfig(),
        sampler=c.GridSamplerConfig(prune=False),
        optim=_VANILLA,
        train=c.TrainConfig(steps=50_000, batch_samples=1 << 16, max_rays=1 << 14),
    ),
    "factor": Config(
        grid=c.GridConfig(cull_unseen=True),
        field=c.FactorConfig(),
        optim=c.OptimConfig(lr=2e-2, final_lr_fraction=0.05),
        train=c.TrainConfig(batch_samples=1 << 17, max_rays=1 << 15),
    ),
    "factor-cpu": replace(
        _CPU,
        field=c.FactorConfig(resolutions=(64, 128), refine_at=(0.2,), components=(4, 8), width=32),
        optim=c.OptimConfig(lr=2e-2),
        train=replace(_CPU_TRAIN, batch_samples=1 << 13),
    ),
    "voxels": Config(
        grid=c.GridConfig(cull_unseen=True), field=c.VoxelConfig(), optim=c.OptimConfig(lr=2e-2, final_lr_fraction=0.05)
    ),
    "voxels-cpu": replace(
        _CPU,
        field=c.VoxelConfig(resolutions=(32, 64, 128), subdivide_at=(0.08, 0.3), max_nodes=400_000, sh_degree=2),
        optim=c.OptimConfig(lr=3e-2),
    ),
    "proposal": Config(
        grid=c.GridConfig(resolution=64, update_every=64),
        field=c.NgpConfig(n_levels=8, n_features=4, log2_entries=20, max_resolution=4096, initial_density=0.25),
        sampler=c.ProposalSamplerConfig(),
        loss=c.LossConfig(distortion=0.01, near_gradient=1.0),
        optim=c.OptimConfig(hold_fraction=0.5, final_lr_fraction=0.1, table_decay=0.1, ema_decay=0.999),
        train=c.TrainConfig(batch_samples=48 * 8192, max_rays=8192),
    ),
    "proposal-cpu": Config(
        grid=c.GridConfig(resolution=32, update_every=64, decay=0.8),
        field=c.NgpConfig(**_CPU_HASH, max_resolution=1024, initial_density=0.25),
        sampler=c.ProposalSamplerConfig(24, (48, 24), 200, (4,), (13,), (64, 128), padding=0.03),
        loss=c.LossConfig(distortion=0.002, near_gradient=0.2),
        render=_CPU_RENDER,
        optim=c.OptimConfig(lr=2e-2, table_decay=0.1),
        train=c.TrainConfig(steps=1500, batch_samples=24 * 512, max_rays=512),
    ),
    "hierarchy": Config(
        grid=c.GridConfig(resolution=64, update_every=256),
        field=c.VanillaConfig(),
        sampler=c.HierarchySamplerConfig(),
        optim=_VANILLA,
        train=c.TrainConfig(steps=50_000, batch_samples=192 * 2048, max_rays=2048),
    ),
}

# Captures of many photos hold more detail than those sizes do, and enough views to do with less regularisation.
_PRESETS["proposal-large"] = replace(
    _PRESETS["proposal"],
    field=c.NgpConfig(n_levels=10, n_features=4, log2_entries=22, max_resolution=8192, initial_density=0.25),
    sampler=c.ProposalSamplerConfig(
        32, (64, 64), levels=(5, 7), log2_entries=(17, 20), resolutions=(256, 2048), padding=0.003
    ),
    render=c.RenderConfig(eval_rays=2),
    loss=replace(_PRESETS["proposal"].loss, distortion=0.003),
    optim=replace(_PRESETS["proposal"].optim, table_decay=0.02),
    train=c.TrainConfig(batch_samples=32 * 65_536, max_rays=65_536),
)

# Dynamic scenes. A cell is occupied if it ever is: where an update looks at one moment, the grid forgets slower.
_PRESETS |= {
    "dynamic": replace(
        _PRESETS["ngp"],
        grid=c.GridConfig(moments=2, cull_unseen=True),
        field=c.DynamicNgpConfig(n_levels=8, n_features=4, max_resolution=1024),
        sampler=c.GridSamplerConfig(),
        render=replace(_PRESETS["ngp"].render, steps_per_diagonal=1536),
        optim=_NGP,
    ),
    "dynamic-cpu": replace(
        _PRESETS["ngp-cpu"],
        grid=replace(_CPU_GRID, moments=2, decay=0.9),
        field=c.DynamicNgpConfig(**_CPU_HASH, max_resolution=512, motion_log2_entries=14, motion_resolution=64),
        optim=c.OptimConfig(lr=2e-2, table_decay=0.01),
        sampler=c.GridSamplerConfig(),  # what is thin at first must not be skipped for good
    ),
    "tnerf": replace(
        _PRESETS["vanilla"],
        grid=replace(_PRESETS["vanilla"].grid, moments=1, decay=0.97),
        field=c.VanillaConfig(motion="time"),
        optim=replace(_VANILLA, lr=5e-4, beta2=0.99),
    ),
}
_PRESETS["dnerf"] = replace(_PRESETS["tnerf"], field=c.VanillaConfig(motion="deform"))

# What helped views that were never seen, whatever it costs in time: docs/quality.md has the measurements.
_PRESETS["quality"] = replace(
    _PRESETS["ngp"],
    field=c.NgpConfig(n_levels=12, n_features=4, max_resolution=1024),
    sampler=c.GridSamplerConfig(),
    render=replace(_PRESETS["ngp"].render, steps_per_diagonal=1536, eval_rays=2),
    optim=_NGP,
    train=c.TrainConfig(steps=50_000),
)
_PRESETS["quality-cpu"] = replace(
    _PRESETS["ngp-cpu"],
    sampler=replace(_CPU_SAMPLER, merge_weak_samples=0.05),
    optim=replace(_PRESETS["ngp-cpu"].optim, table_decay=0.1),
)
_PRESETS = {name: replace(config, preset=name) for name, config in _PRESETS.items()}

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
    """A preset by name; "auto" is ngp on a GPU and ngp-cpu on a CPU (an unbounded or dynamic scene then takes another:
    `nerfturbo.data.scene_defaults`).

    >>> preset("auto", "cpu").preset
    'ngp-cpu'
    """
    if name == "auto":
        name = "ngp-cpu" if device == "cpu" else "ngp"
    hint = did_you_mean(name, preset_names())
    refuse(name not in _PRESETS, "preset", "one of auto, " + ", ".join(preset_names()), repr(name), hint)
    return _PRESETS[name]


CameraChoice = Literal[
    "auto", "SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE"
]


@dataclass(frozen=True)
class ProcessConfig:
    """How the poses of photos and videos are found (`nerfturbo process`); the defaults fit phones and cameras."""

    frames: int | None = None
    """Frames to take from a video: the sharpest of as many equal windows. Three a second, 30 to 200, unless given."""
    matcher: Literal["auto", "exhaustive", "sequential"] = "auto"
    """Which images are compared: all pairs, or neighbours in the order of names; auto decides by their number."""
    camera_model: CameraChoice = "auto"
    """COLMAP's lens model: auto takes OPENCV for 20 or more images of one camera, else SIMPLE_RADIAL."""
    max_size: int = 1600
    """Features are looked for in images of at most this many pixels a side."""
    max_features: int | None = None
    """Features per image; 4096 on a CPU and 8192 on a GPU unless given."""
    tool: Literal["auto", "colmap", "pycolmap"] = "auto"
    """The program colmap or the package pycolmap; auto takes the first that is installed."""
