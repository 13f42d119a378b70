"""A config made to fit a scene: one that moves needs a field that sees time; one without an end is folded (proposals,
contracted grids), or needs nested grids, growing steps and a finer hash grid. And the preset that `auto` stands for."""

from dataclasses import fields, replace
from typing import Any

import torch

from ..config import Config, DynamicNgpConfig, GridSamplerConfig, NgpConfig
from ..presets import preset
from .scene import Scene

UNBOUNDED_CONE_STEPS = 4.0  # over the steps per diagonal: 1/256 for 1024 of them, as instant-ngp has it
UNBOUNDED_ALPHA_THRE = 1e-2
UNBOUNDED_NEAR_GRADIENT = 1.0  # half boxes before the cameras, where floaters grow: docs/unbounded.md has the scores
UNBOUNDED_PRESETS = {"ngp": "proposal", "ngp-cpu": "proposal-cpu"}  # what `auto` takes in place of the first
MANY_PHOTOS, LARGE_PRESETS = 100, {"proposal": "proposal-large"}  # and of a capture of so many photos
LONG_RUN, LONG_SAMPLES = 120.0, 64  # seconds from which such a preset has time for so many samples a ray,
LONG_ENTRIES, LONG_DECAY, LONG_WIDTH, WIDE_SHARED = 23, 0.08, 128, 200 << 10  # and for these, where shared memory is
MOVING_PRESETS = {"ngp": "dynamic", "ngp-cpu": "dynamic-cpu"}  # and of a scene that moves
_MAX_RESOLUTION = 1 << 15
_COARSE_STEPS = 512  # per diagonal: a preset for CPUs, where far rays must not cost hundreds of samples
_LEVELS_AT_FULL_RESOLUTION = 3  # of a grid, before it costs more than it saves on a CPU


def fitted_config(config: Config, scene: Scene, *, auto: Config | None = None) -> tuple[Config, tuple[str, ...]]:
    """The config with what the scene asks for, and what was changed. Values chosen by hand stay, and so does a config
    that was fitted before. `auto` is the preset it began as where nobody chose one: a scene may then take another."""
    chosen: tuple[str, ...] = ()
    if auto is not None and scene.cameras.times is not None and auto.preset in MOVING_PRESETS:
        why = "the images have times: this field follows what moves"
        config, chosen = _in_its_place(config, auto, preset(MOVING_PRESETS[auto.preset]), why)
        auto = None
    chosen += motion_notes(config, scene)
    levels = scene.grid_levels
    if levels == 1 or config.grid.levels != 1:
        return config, chosen
    if auto is not None and auto.preset in UNBOUNDED_PRESETS:
        name, why = UNBOUNDED_PRESETS[auto.preset], "the scene is unbounded: proposal networks find its surfaces"
        made = preset(name)
        if len(scene) >= MANY_PHOTOS and name in LARGE_PRESETS:
            made, why = preset(LARGE_PRESETS[name]), f"{why}, and {len(scene)} photos need large tables"
            if (config.train.time_limit or 0.0) >= LONG_RUN:
                parts: Any = made
                train = replace(made.train, batch_samples=LONG_SAMPLES * made.train.max_rays)
                made = replace(made, sampler=replace(parts.sampler, n_samples=LONG_SAMPLES), train=train)
                why += f"; {config.train.time_limit:g} s are enough for {LONG_SAMPLES} samples a ray"
                gpus = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
                shared = min((getattr(gpu, "shared_memory_per_block_optin", 0) for gpu in gpus), default=0)
                if shared >= WIDE_SHARED and config.train.precision != "fp32" and config.field == auto.field:
                    field = replace(parts.field, log2_entries=LONG_ENTRIES, width=LONG_WIDTH)
                    made = replace(made, field=field, optim=replace(made.optim, table_decay=LONG_DECAY))
                    why += f", 2^{LONG_ENTRIES} entries, decayed by {LONG_DECAY}, and networks {LONG_WIDTH} wide"
        config, chosen = _in_its_place(config, auto, made, why, "for nested grids")
    folds = config.sampler.kind != "grid" or config.grid.contraction != "none"
    config, notes = (_folded if folds else _nested)(config, levels)
    return config, (*chosen, *notes)


def motion_notes(config: Config, scene: Scene) -> tuple[str, ...]:
    """What is wrong between a scene that moves and a field that does not see time, or the other way round."""
    moving, kind = scene.cameras.times is not None, config.field.kind
    if moving and not config.follows_time:
        advice = "--preset auto, dynamic, tnerf or dnerf follow what moves"
        return (f"warning: the images have times, which field.kind {kind} does not see: {advice}",)
    if config.follows_time and not moving and kind != "custom":
        return (f"warning: no picture has a time: field.kind {kind} learns nothing here that ngp does not",)
    return ()


def _in_its_place(
    config: Config, auto: Config, made: Config, why: str, otherwise: str = "keeps the other"
) -> tuple[Config, tuple[str, ...]]:
    """The preset `made` in place of `auto`; what differs from `auto` was chosen and stays."""
    chosen = config.sampler != auto.sampler or config.grid.contraction != auto.grid.contraction
    if chosen or config.field.kind != auto.field.kind:
        return config, ()
    made = replace(made, data=config.data)
    if config.field.kind == "custom":  # keeps its place in the other preset
        made = replace(made, field=config.field)
    for stage in (one.name for one in fields(Config) if one.name not in ("preset", "data")):
        own, before = getattr(config, stage), getattr(auto, stage)
        given = {one.name: getattr(own, one.name) for one in fields(own)}
        there = {one.name for one in fields(getattr(made, stage))}  # another field or sampler has other values
        kept = {leaf: value for leaf, value in given.items() if leaf in there and value != getattr(before, leaf)}
        made = replace(made, **{stage: replace(getattr(made, stage), **kept)})
    return made, (f"preset {made.preset}, because {why} (--preset {auto.preset} {otherwise})",)


def _folded(config: Config, levels: int) -> tuple[Config, tuple[str, ...]]:
    """All of space in one field: the box of the cameras' surroundings inside, everything else around it."""
    grid, note = replace(config.grid, levels=levels), f"grid.levels {levels}"
    if grid.contraction == "none":
        grid = replace(grid, contraction="sphere" if config.field.kind == "vanilla" else "cube")
        note = f"grid.contraction {grid.contraction}, {note}"
    return replace(config, grid=grid), (f"unbounded: {note}",)


def _nested(config: Config, levels: int) -> tuple[Config, tuple[str, ...]]:
    """Boxes in boxes, each twice as large as the one before, with steps that grow as they do."""
    render, field, sampler = config.render, config.field, config.sampler
    assert isinstance(sampler, GridSamplerConfig)
    notes: list[str] = []

    def change(stage: str, leaf: str, value: float, form: str = "") -> None:
        nonlocal config
        config = replace(config, **{stage: replace(getattr(config, stage), **{leaf: value})})
        notes.append(f"{stage}.{leaf} {value:{form}}")

    change("grid", "levels", levels)
    if render.steps_per_diagonal == _COARSE_STEPS:
        change("render", "steps_per_diagonal", _COARSE_STEPS // 2)
    if sampler.cone_angle == 0.0:
        change("sampler", "cone_angle", UNBOUNDED_CONE_STEPS / config.render.steps_per_diagonal, ".4f")
    if sampler.alpha_thre == 0.0:
        change("sampler", "alpha_thre", UNBOUNDED_ALPHA_THRE, "g")
    if isinstance(field, NgpConfig | DynamicNgpConfig):
        finest = min(_MAX_RESOLUTION, field.max_resolution << (levels - 1))  # cells of the inner box stay as small
        if finest > field.max_resolution:
            change("field", "max_resolution", finest)
    if levels > _LEVELS_AT_FULL_RESOLUTION and 32 < config.grid.resolution <= 64:
        change("grid", "resolution", 32)
    if config.loss.near_gradient == 0.0:
        change("loss", "near_gradient", UNBOUNDED_NEAR_GRADIENT, "g")
    return config, ("unbounded: " + ", ".join(notes),)
