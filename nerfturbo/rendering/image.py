"""Whole images in a fixed amount of memory, whatever their size and however full the grid is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..fields.field import Field, RayField
from ..ops.composite import visibility
from ..ops.packed import compact
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import PackedSamples, Rays, RenderOutput
from .render import MarchSettings, field_functions, ray_marching, volume_rendering

DEFAULT_MEMORY = {"cpu": 1 << 26, "cuda": 1 << 29}  # bytes; on a CPU about what its caches hold
BYTES_PER_SAMPLE = {True: 256, False: 8192}  # of a fused field, and of one that keeps wide hidden layers
LEAST_SAMPLES = 1 << 12


@dataclass(frozen=True)
class RenderedImage:
    """Pictures of one camera, row-major."""

    rgb: Tensor  # (height, width, channels)
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width)


@torch.no_grad()
def render_image(
    field: Field,
    grid: OccupancyGrid,
    rays: Rays,
    *,
    height: int,
    width: int,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    max_memory: int | None = None,
) -> RenderedImage:
    """Render all rays of an image (height * width, row-major), as many at a time as `max_memory` bytes allow."""
    settings = settings or MarchSettings()
    capacity = sample_budget(field, rays.device, max_memory)
    parts: list[RenderOutput] = []
    start, at_once = 0, capacity // 8
    while start < len(rays) or not parts:
        part = _render_first(field, rays[slice(start, start + at_once)], grid, settings, capacity)
        n_rays, n_samples = part.opacity.shape[0], 0 if part.samples is None else part.samples.capacity
        if n_rays == 0 and start < len(rays):
            capacity *= 2  # one ray alone is more than fits
            continue
        parts.append(part)
        start += n_rays
        at_once = max(1, int(n_rays * min(0.9 * capacity / max(n_samples, 1), 4.0)))
    rgb, opacity, depth = (
        torch.cat(column) for column in zip(*((p.rgb, p.opacity, p.depth) for p in parts), strict=True)
    )
    if background is not None:
        rgb = rgb + (1.0 - opacity)[:, None] * background
    return RenderedImage(
        rgb.reshape(height, width, rgb.shape[1]).clamp(0.0, 1.0),
        opacity.reshape(height, width),
        depth.reshape(height, width),
    )


def sample_budget(field: Field, device: torch.device, max_memory: int | None) -> int:
    """How many samples may be in flight."""
    if max_memory is None:
        max_memory = DEFAULT_MEMORY.get(device.type, DEFAULT_MEMORY["cpu"])
    if max_memory < 1:
        raise InputError("max_memory", "a number of bytes > 0", str(max_memory))
    return max(LEAST_SAMPLES, max_memory // BYTES_PER_SAMPLE[isinstance(field, RayField)])


def _render_first(
    field: Field, rays: Rays, grid: OccupancyGrid, settings: MarchSettings, capacity: int
) -> RenderOutput:
    """The first rays, as many as fit, without background; `samples` are those before the visibility pass."""
    marched = ray_marching(
        rays,
        grid,
        near_plane=settings.near_plane,
        far_plane=settings.far_plane,
        render_step_size=settings.render_step_size,
        cone_angle=settings.cone_angle,
        capacity=capacity,
    )
    assert marched.n_rays_kept is not None
    n_rays, n_samples = torch.stack([marched.n_rays_kept, marched.n_samples]).tolist()  # the one read-back
    rays, marched = rays[slice(0, n_rays)], _head(marched, n_rays, n_samples)
    sigma_fn, rgb_sigma_fn = field_functions(field, rays)
    seen = marched
    if settings.early_stop_eps > 0.0 or settings.alpha_thre > 0.0:
        density = sigma_fn(marched.t_starts, marched.t_ends, marched.ray_indices)
        threshold = settings.alpha_thre
        keep = visibility(
            density,
            marched,
            early_stop_eps=settings.early_stop_eps,
            alpha_thre=threshold if threshold <= 0.0 else grid.mean.clamp(max=threshold),
        )
        seen = compact(marched, keep)
    return replace(volume_rendering(rgb_sigma_fn, seen), samples=marched)


def _head(samples: PackedSamples, n_rays: int, n_samples: int) -> PackedSamples:
    return PackedSamples(
        samples.t_starts[:n_samples],
        samples.t_ends[:n_samples],
        samples.ray_indices[:n_samples],
        samples.offsets[: n_rays + 1],
    )
