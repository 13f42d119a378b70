"""Plug-and-play rendering: `ray_marching` places samples, `volume_rendering` turns them into pixels.

The field stays the user's; two callables are all that is needed:

    def sigma_fn(t_starts, t_ends, ray_indices): ...      # -> density (n,)
    def rgb_sigma_fn(t_starts, t_ends, ray_indices): ...  # -> rgb (n, channels), density (n,)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..fields.field import Field
from ..ops.composite import composite, visibility
from ..ops.march import StepRule, march
from ..ops.packed import compact
from ..ops.random import Stream, random_uniform
from ..sampling.estimator import SigmaFn
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import PackedSamples, Rays, RenderOutput

RgbSigmaFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MarchSettings:
    """How to place samples; `ray_marching` takes the same names as arguments."""

    near_plane: float = 0.0
    far_plane: float = float("inf")
    render_step_size: float | None = None
    cone_angle: float = 0.0
    early_stop_eps: float = 1e-4
    alpha_thre: float = 0.0


@torch.no_grad()
def ray_marching(
    rays: Rays,
    grid: OccupancyGrid,
    *,
    sigma_fn: SigmaFn | None = None,
    near_plane: float = 0.0,
    far_plane: float = float("inf"),
    render_step_size: float | None = None,
    cone_angle: float = 0.0,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    stratified: bool = False,
    seed: int = 0,
    step: int | Tensor = 0,
    capacity: int | None = None,
    n_active: Tensor | None = None,
    first_ray: int = 0,
) -> PackedSamples:
    """Samples of each ray in occupied space; with `sigma_fn`, only those that light reaches. Not differentiable.

    Args:
        sigma_fn: density of samples; samples behind transmittance < early_stop_eps and samples with
            alpha < alpha_thre are dropped. alpha_thre is capped by half the grid's mean thickness, so that it
            does not delete a young field.
        render_step_size: None is the grid's own step.
        stratified: jitter each ray's samples by the draw of (seed, step, ray).
        capacity: fixed length of the marched samples; None gives exact lengths.
        n_active: () int32 on the device; rays from this index on are not marched.
        first_ray: index of the first ray in the step's whole batch, which several processes may share.
    """
    jitter = None
    if stratified:
        jitter = random_uniform(
            len(rays), seed=seed, stream=Stream.JITTER, step=step, first=first_ray, device=rays.device
        )[:, 0]
    rule = StepRule(render_step_size or grid.step_size, near_plane, far_plane, cone_angle)
    samples = march(
        rays.origins, rays.directions, grid.occupancy, rule, jitter=jitter, capacity=capacity, n_active=n_active
    )
    if sigma_fn is None or (early_stop_eps <= 0.0 and alpha_thre <= 0.0):
        return samples
    density = _checked_density(sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices), samples)
    threshold = grid.alpha_threshold(alpha_thre)
    keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=threshold)
    return compact(samples, keep, capacity=capacity)


def volume_rendering(
    rgb_sigma_fn: RgbSigmaFn,
    samples: PackedSamples,
    *,
    background: Tensor | None = None,
    early_stop_eps: float = 0.0,
    alpha_thre: float = 0.0,
) -> RenderOutput:
    """Composite the field over each ray's samples; differentiable to rgb and density.

    `background` is (channels,) or (n_rays, channels), added behind what is not opaque. Depth is divided by opacity.
    """
    rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    density = _checked_density(density, samples)
    out = composite(density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    color = out.rgb if background is None else out.rgb + (1.0 - out.opacity)[:, None] * background
    depth = out.depth / out.opacity.clamp(min=1e-6)
    return RenderOutput(color, out.opacity, depth, out.weights, samples)


def _checked_density(density: Tensor, samples: PackedSamples) -> Tensor:
    if tuple(density.shape) == (samples.capacity,):
        return density
    hint = "squeeze the last dimension" if density.dim() == 2 and density.shape[-1] == 1 else "one value per sample"
    raise InputError("density", f"shape (n_samples,) = ({samples.capacity},)", str(tuple(density.shape)), hint)


def field_functions(field: Field, rays: Rays) -> tuple[SigmaFn, RgbSigmaFn]:
    """The two callables of a field over these rays."""

    def at(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        index = ray_indices.long()
        positions = rays.origins[index] + rays.directions[index] * ((t_starts + t_ends) * 0.5)[:, None]
        return positions, index, None if rays.times is None else rays.times[index]

    def sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
        positions, _, times = at(t_starts, t_ends, ray_indices)
        return field.density(positions, times)

    def rgb_sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
        positions, index, times = at(t_starts, t_ends, ray_indices)
        cameras = None if rays.camera_indices is None else rays.camera_indices[index]
        return field(positions, rays.directions[index], times, cameras)

    return sigma_fn, rgb_sigma_fn


def render_rays(
    field: Field,
    rays: Rays,
    grid: OccupancyGrid,
    *,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    prune: bool = True,
) -> RenderOutput:
    """March and render; differentiable to the field."""
    settings = settings or MarchSettings()
    sigma_fn, rgb_sigma_fn = field_functions(field, rays)
    samples = ray_marching(
        rays,
        grid,
        sigma_fn=sigma_fn if prune else None,
        near_plane=settings.near_plane,
        far_plane=settings.far_plane,
        render_step_size=settings.render_step_size,
        cone_angle=settings.cone_angle,
        early_stop_eps=settings.early_stop_eps,
        alpha_thre=settings.alpha_thre,
    )
    return volume_rendering(rgb_sigma_fn, samples, background=background)
