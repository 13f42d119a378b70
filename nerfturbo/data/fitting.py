"""A config made to fit a scene: one without an end needs nested grids, growing steps and a finer hash grid."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
from .scene import Scene

UNBOUNDED_CONE_STEPS = 4.0  # over the steps per diagonal: 1/256 for 1024 of them, as instant-ngp has it
UNBOUNDED_ALPHA_THRE = 1e-2
_MAX_RESOLUTION = 1 << 15
_COARSE_STEPS = 512  # per diagonal: a preset for CPUs, where far rays must not cost hundreds of samples
_LEVELS_AT_FULL_RESOLUTION = (
    3  # levels a grid can have at its full resolution before it costs more than it saves on a CPU
)


def fitted_config(config: Config, scene: Scene) -> tuple[Config, tuple[str, ...]]:
    """The config with what the scene asks for, and what was changed. Values chosen by hand (other than the plain
    defaults) stay, and a config that was fitted before stays as it is."""
    levels = scene.grid_levels
    if levels == 1 or config.grid.levels != 1:
        return config, ()
    grid, render, field = config.grid, config.render, config.field
    notes = [f"unbounded: grid.levels {levels}"]
    grid = replace(grid, levels=levels)
    if render.steps_per_diagonal == _COARSE_STEPS:
        render = replace(render, steps_per_diagonal=_COARSE_STEPS // 2)
        notes.append(f"render.steps_per_diagonal {render.steps_per_diagonal}")
    if render.cone_angle == 0.0:
        render = replace(render, cone_angle=UNBOUNDED_CONE_STEPS / render.steps_per_diagonal)
        notes.append(f"render.cone_angle {render.cone_angle:.4f}")
    if render.alpha_thre == 0.0:
        render = replace(render, alpha_thre=UNBOUNDED_ALPHA_THRE)
        notes.append(f"render.alpha_thre {UNBOUNDED_ALPHA_THRE:g}")
    finest = min(_MAX_RESOLUTION, field.max_resolution << (levels - 1))  # cells of the inner box stay as small
    if field.kind == "ngp" and finest > field.max_resolution:
        field = replace(field, max_resolution=finest)
        notes.append(f"field.max_resolution {finest}")
    if levels > _LEVELS_AT_FULL_RESOLUTION and 32 < grid.resolution <= 64:
        grid = replace(grid, resolution=32)
        notes.append("grid.resolution 32")
    return replace(config, grid=grid, render=render, field=field), (", ".join(notes),)
