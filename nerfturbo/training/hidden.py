"""What no picture shows: at the end of training the grid gives up the cells that lie behind what the pictures show.

A field is free to put anything where no training pixel can tell, under a table, inside a body: a grid that was learned
from the field keeps it, and a new view from there shows it. So random training pixels are marched once more, and cells
count as shown where some ray still carries light and meets something, and next to such cells. All others become empty.
No training picture changes by it. What the grid has learned stays in `thickness`: training that goes on begins from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..data.batches import PixelSampler
from ..ops.composite import visibility
from ..ops.march import pack_bits, unpack_bits
from ..rendering.model import NerfModel
from ..rendering.render import field_functions, ray_marching
from ..sampling.from_geometry import cells_with_points, grown

LIGHT = 0.1  # of a ray's light must still be there where it shows a cell
ALPHA = 0.01  # and the sample at least so opaque, or half as much as the mean of a grid that is all thin
RAYS = {"cpu": 1 << 17, "cuda": 1 << 21}
RAYS_AT_ONCE = 1 << 13  # of a field that has learned, a few hundred thousand samples: less than a step holds
REHEARSED = 256  # rays through a grid that is still full
PROBED = 1 << 10  # rays that say how many samples all of them would march
FIRST_DRAW = 1 << 30  # draws of pixels that no training step makes


@torch.no_grad()
def shown_cells(model: NerfModel, sampler: PixelSampler, *, n_rays: int, at_once: int) -> Tensor:
    """(levels, resolution, resolution, resolution) bool: cells that some of `n_rays` random training pixels show."""
    grid, settings = model.grid, model.training_settings
    limits = {"early_stop_eps": LIGHT, "alpha_thre": grid.alpha_threshold(ALPHA)}
    levels, r = grid.config.levels, grid.config.resolution
    shown = torch.zeros(levels, r, r, r, dtype=torch.bool, device=model.device)
    for draw in range(-(-n_rays // at_once)):
        rays = sampler.draw(FIRST_DRAW + draw, at_once).rays
        rays = rays if model.photos is None else model.photos.rays(rays)
        near, far = settings.near_plane, settings.far_plane
        samples = ray_marching(rays, grid, near_plane=near, far_plane=far, cone_angle=settings.cone_angle)
        sigma_fn, _ = field_functions(model.field, rays)
        density = sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
        keep = visibility(density, samples, **limits)[: int(samples.n_samples)]
        ray, middle = samples.ray_indices, (samples.t_starts + samples.t_ends) * 0.5
        ray, middle = (value[: keep.shape[0]][keep] for value in (ray.long(), middle))
        shown |= cells_with_points(rays.origins[ray] + rays.directions[ray] * middle[:, None], grid.aabb, r, levels)
    return shown


def hides(model: NerfModel) -> bool:
    """Whether the config asks for it, and a grid decides what is rendered."""
    return model.config.grid.hide_unseen and model.config.grid.enabled and model.proposer is None


@torch.no_grad()
def costs_too_much(model: NerfModel, sampler: PixelSampler, n_rays: int, steps: int) -> bool:
    """Whether `n_rays` would march more samples than the `steps` trained. That is a short run on a CPU, whose grid is
    still full: with a limit of seconds it would go on for minutes to hide little."""
    settings, probe = model.training_settings, min(PROBED, n_rays)
    rays = sampler.draw(FIRST_DRAW, probe).rays
    near, far = settings.near_plane, settings.far_plane
    samples = ray_marching(rays, model.grid, near_plane=near, far_plane=far, cone_angle=settings.cone_angle)
    return int(samples.n_samples) * n_rays > probe * steps * model.config.train.batch_samples


@torch.no_grad()
def hide_unseen(model: NerfModel, sampler: PixelSampler, steps: int | None = None) -> float:
    """Empty the cells of the grid that no training picture shows; returns their share of the occupied ones. On a CPU,
    none after so few `steps` that looking would take longer than they did."""
    grid, pixels = model.grid, int(sampler.scene.cameras.size.long().prod(-1).sum())
    n_rays = min(RAYS.get(model.device.type, RAYS["cpu"]), 2 * pixels)
    if steps is not None and model.device.type == "cpu" and costs_too_much(model, sampler, n_rays, steps):
        return 0.0
    shown = shown_cells(model, sampler, n_rays=n_rays, at_once=min(RAYS_AT_ONCE, n_rays))
    shown, occupied = grown(shown, 1).reshape(-1), unpack_bits(grid.bits).bool()
    grid.bits.copy_(pack_bits(occupied & shown))
    return 1.0 - float((occupied & shown).sum() / occupied.sum().clamp(min=1))


@contextmanager
def unseen_hidden(model: NerfModel, sampler: PixelSampler, steps: int) -> Iterator[None]:
    """Inside, the grid is as it would be if training ended here."""
    if not hides(model):
        yield
        return
    before = model.grid.bits.clone()
    hide_unseen(model, sampler, steps)
    try:
        yield
    finally:
        model.grid.bits.copy_(before)


def rehearse_hiding(model: NerfModel, sampler: PixelSampler) -> None:
    """Compile what the end of training runs, before the clock starts: nothing is changed."""
    if hides(model) and model.device.type != "cpu":
        shown_cells(model, sampler, n_rays=REHEARSED, at_once=REHEARSED)
