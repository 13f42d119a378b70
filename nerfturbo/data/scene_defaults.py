"""A config made to fit a scene: one that moves needs a field that sees time; one without an end is folded (proposals,
contracted grids), or needs nested grids, growing steps and a finer hash grid; and the preset that `auto` stands for,
once the scene is known."""

from __future__ import annotations

from dataclasses import fields, replace

from ..config import Config, DynamicNgpConfig, GridSamplerConfig, NgpConfig
from ..presets import preset
from .scene import Scene

UNBOUNDED_CONE_STEPS = 4.0  # over the steps per diagonal: 1/256 for 1024 of them, as instant-ngp has it
UNBOUNDED_ALPHA_THRE = 1e-2
UNBOUNDED_NEAR_GRADIENT = 1.0  # half boxes before the cameras, where floaters grow: docs/unbounded.md has the scores
UNBOUNDED_PRESETS = {"ngp": "proposal", "ngp-cpu": "proposal-cpu"}  # what `auto` takes in place of the first
MOVING_PRESETS = {"ngp": "dynamic", "ngp-cpu": "dynamic-cpu"}  # and of a scene that moves
_MAX_RESOLUTION = 1 << 15
_COARSE_STEPS = 512  # per diagonal: a preset for CPUs, where far rays must not cost hundreds of samples
_LEVELS_AT_FULL_RESOLUTION = 3  # of a grid, before it costs more than it saves on a CPU


def fitted_config(config: Config, scene: Scene, *, auto: Config | None = None) -> tuple[Config, tuple[str, ...]]:
    """The config with what the scene asks for, and what was changed. Values chosen by hand (other than the plain
    defaults) stay, and a config that was fitted before stays as it is. `auto` is the preset that the config began as,
    where nobody chose one: a scene may then take another in its place."""
    chosen: tuple[str, ...] = ()
    if auto is not None and scene.cameras.times is not None and auto.preset in MOVING_PRESETS:
        why = "the pictures have times: this field follows what moves"
        config, chosen = _in_its_place(config, auto, MOVING_PRESETS[auto.preset], why)
        auto = None
    chosen += motion_notes(config, scene)
    levels = scene.grid_levels
    if levels == 1 or config.grid.levels != 1:
        return config, chosen
    if auto is not None and auto.preset in UNBOUNDED_PRESETS:
        why = "the scene has no end: proposal networks find its surfaces near and far"
        config, chosen = _in_its_place(config, auto, UNBOUNDED_PRESETS[auto.preset], why, "for nested grids")
    if config.sampler.kind != "grid" or config.grid.contraction != "none":
        config, notes = _folded(config, levels)
    else:
        config, notes = _nested(config, levels)
    return config, (*chosen, *notes)


def motion_notes(config: Config, scene: Scene) -> tuple[str, ...]:
    """What is wrong between a scene that moves and a field that does not see time, or the other way round."""
    moving, kind = scene.cameras.times is not None, config.field.kind
    if moving and not config.follows_time:
        advice = "--preset auto, dynamic, tnerf or dnerf follow what moves"
        return (f"warning: the pictures have times, which field.kind {kind} does not see: {advice}",)
    if config.follows_time and not moving and kind != "custom":
        return (f"warning: no picture has a time: field.kind {kind} learns nothing here that ngp does not",)
    return ()


def _in_its_place(
    config: Config, auto: Config, name: str, why: str, otherwise: str = "keeps the other"
) -> tuple[Config, tuple[str, ...]]:
    """The preset `name` in place of `auto`; what differs from `auto` was chosen and stays."""
    if config.sampler != auto.sampler or config.grid.contraction != auto.grid.contraction:
        return config, ()
    if config.field.kind != auto.field.kind:
        return config, ()
    made = replace(preset(name), data=config.data)
    if config.field.kind == "custom":  # keeps its place in the other preset
        made = replace(made, field=config.field)
    for stage in (one.name for one in fields(Config) if one.name not in ("preset", "data")):
        own, before = getattr(config, stage), getattr(auto, stage)
        given = {one.name: getattr(own, one.name) for one in fields(own)}
        there = {one.name for one in fields(getattr(made, stage))}  # another field or sampler has other values
        kept = {leaf: value for leaf, value in given.items() if leaf in there and value != getattr(before, leaf)}
        made = replace(made, **{stage: replace(getattr(made, stage), **kept)})
    return made, (f"preset {name}, because {why} (--preset {auto.preset} {otherwise})",)


def _folded(config: Config, levels: int) -> tuple[Config, tuple[str, ...]]:
    """All of space in one field: the box of the cameras' surroundings inside, everything else around it."""
    grid, notes = config.grid, []
    if grid.contraction == "none":
        fold = "sphere" if config.field.kind == "vanilla" else "cube"
        grid = replace(grid, contraction=fold)
        notes.append(f"grid.contraction {fold}")
    notes.append(f"grid.levels {levels}")
    return replace(config, grid=replace(grid, levels=levels)), ("unbounded: " + ", ".join(notes),)


def _nested(config: Config, levels: int) -> tuple[Config, tuple[str, ...]]:
    """Boxes in boxes, each twice as large as the one before, with steps that grow as they do."""
    grid, render, field, loss, sampler = config.grid, config.render, config.field, config.loss, config.sampler
    assert isinstance(sampler, GridSamplerConfig)
    notes = [f"unbounded: grid.levels {levels}"]
    grid = replace(grid, levels=levels)
    if render.steps_per_diagonal == _COARSE_STEPS:
        render = replace(render, steps_per_diagonal=_COARSE_STEPS // 2)
        notes.append(f"render.steps_per_diagonal {render.steps_per_diagonal}")
    if sampler.cone_angle == 0.0:
        sampler = replace(sampler, cone_angle=UNBOUNDED_CONE_STEPS / render.steps_per_diagonal)
        notes.append(f"sampler.cone_angle {sampler.cone_angle:.4f}")
    if sampler.alpha_thre == 0.0:
        sampler = replace(sampler, alpha_thre=UNBOUNDED_ALPHA_THRE)
        notes.append(f"sampler.alpha_thre {UNBOUNDED_ALPHA_THRE:g}")
    if isinstance(field, NgpConfig | DynamicNgpConfig):
        finest = min(_MAX_RESOLUTION, field.max_resolution << (levels - 1))  # cells of the inner box stay as small
        if finest > field.max_resolution:
            field = replace(field, max_resolution=finest)
            notes.append(f"field.max_resolution {finest}")
    if levels > _LEVELS_AT_FULL_RESOLUTION and 32 < grid.resolution <= 64:
        grid = replace(grid, resolution=32)
        notes.append("grid.resolution 32")
    if loss.near_gradient == 0.0:
        loss = replace(loss, near_gradient=UNBOUNDED_NEAR_GRADIENT)
        notes.append(f"loss.near_gradient {UNBOUNDED_NEAR_GRADIENT:g}")
    return replace(config, grid=grid, render=render, field=field, sampler=sampler, loss=loss), (", ".join(notes),)
