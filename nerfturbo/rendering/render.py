"""Plug-and-play rendering: `ray_marching` places samples, `volume_rendering` turns them into pixels.

The field stays the user's; two callables are all that is needed:

    def sigma_fn(t_starts, t_ends, ray_indices): ...      # -> density (n,)
    def rgb_sigma_fn(t_starts, t_ends, ray_indices): ...  # -> rgb (n, channels), density (n,)
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..fields.field import Field
from ..ops.composite import composite, visibility
from ..ops.march import StepRule, march
from ..ops.packed import compact, take_rows
from ..ops.random import Stream
from ..sampling.grid import MarchSettings, OccupancyGrid, march_scenes
from ..sampling.sampler import Draw, SigmaFn
from ..types import PackedSamples, Rays, RenderOutput

RgbSigmaFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
TAPS = 32  # places about each point whose normal is looked for
# In steps of marching. Nearer places see the noise of the finest hash levels; farther ones round corners off.
REACH = 4.0
NORMALS_AT_ONCE = 1 << 15


@torch.no_grad()
def ray_marching(
    rays: Rays, grid: OccupancyGrid | Sequence[OccupancyGrid], *, sigma_fn: SigmaFn | None = None,
    scene_indices: Tensor | None = None, near_plane: float = 0.0, far_plane: float = float("inf"),
    render_step_size: float | None = None, cone_angle: float = 0.0, early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0, stratified: bool = False, seed: int = 0, step: int | Tensor = 0,
    capacity: int | None = None, n_active: Tensor | None = None, first_ray: int = 0,
) -> PackedSamples:  # fmt: skip
    """Samples of each ray in occupied space; with `sigma_fn`, only those that light reaches. Not differentiable.

    Args:
        sigma_fn: density (n,) of samples; those behind transmittance < early_stop_eps or with alpha < alpha_thre are
            dropped. alpha_thre is capped by half the grid's mean thickness, not to delete a young field.
        scene_indices: (n_rays,) int64, when `grid` is one grid per scene: the scene of each ray.
        render_step_size: None is the (first) grid's own step. Steps grow to cone_angle * t where that is longer.
        stratified: jitter each ray's samples by the draw of (seed, step, ray).
        capacity: fixed length of the marched samples; None gives exact lengths.
        n_active: () int32 on the device; rays from this index on are not marched.
        first_ray: index of the first ray in the step's whole batch, which several processes may share.

    >>> from nerfturbo import Aabb
    >>> from nerfturbo.config import GridConfig
    >>> grid = OccupancyGrid(Aabb.cube(1.0), GridConfig(resolution=4), step_size=0.5)
    >>> rays = Rays(torch.tensor([[0.0, 0.0, -2.0]]), torch.tensor([[0.0, 0.0, 1.0]]))
    >>> ray_marching(rays, grid).t_starts.tolist()
    [1.0, 1.5, 2.0, 2.5]
    """
    jitter = Draw(stratified, seed, step, first_ray).jitter(rays, 1, Stream.JITTER)[0]
    jitter = None if jitter is None else jitter[:, 0]
    grids = list(grid) if isinstance(grid, Sequence) else [grid]
    rule = StepRule(render_step_size or grids[0].step_size, near_plane, far_plane, cone_angle)
    if scene_indices is None:
        refuse(len(grids) != 1, "scene_indices", f"the scene of each ray, beside {len(grids)} grids", "none")
        options = {"jitter": jitter, "capacity": capacity, "n_active": n_active}
        samples = march(rays.origins, rays.directions, grids[0].occupancy, rule, **options)
    else:
        fixed = capacity is not None or n_active is not None
        refuse(fixed, "capacity and n_active", "none beside scene_indices", "one of them")
        samples = march_scenes(rays, grids, scene_indices, rule, jitter=jitter)
    if sigma_fn is None or (early_stop_eps <= 0.0 and alpha_thre <= 0.0):
        return samples
    density = _checked_density(sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices), samples)
    threshold = grids[0].alpha_threshold(alpha_thre)
    if len(grids) > 1 and alpha_thre > 0.0:  # the youngest field decides
        threshold = torch.stack([torch.as_tensor(one.alpha_threshold(alpha_thre)) for one in grids]).amin()
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
    """Composite the field over each ray's samples: C = sum_i w_i c_i + (1 - sum_i w_i) background, with

        w_i = T_i (1 - exp(-density_i * length_i)),    T_i = exp(-sum_{j < i} density_j * length_j).

    `rgb_sigma_fn(t_starts, t_ends, ray_indices)` returns colours (n, channels), of any number of channels, and
    densities (n,). `background` is (channels,) or (n_rays, channels). Depth is sum_i w_i t_i divided by the opacity.
    Differentiable to colours, densities and background; not to t. The thresholds are those of `ops.composite`.

    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    >>> out = volume_rendering(lambda *_: (torch.eye(2), torch.tensor([1.0, 100.0])), samples)
    >>> [round(value, 3) for value in out.rgb[0].tolist()], round(out.depth.item(), 3)  # 1 - 1/e, and the rest
    ([0.632, 0.368], 1.868)
    """
    rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    density = _checked_density(density, samples)
    out = composite(density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    color = out.rgb if background is None else out.rgb + (1.0 - out.opacity)[:, None] * background
    return RenderOutput(color, out.opacity, out.depth / out.opacity.clamp(min=1e-6), out.weights, samples)


def _checked_density(density: Tensor, samples: PackedSamples) -> Tensor:
    if tuple(density.shape) == (samples.capacity,):
        return density
    hint = "squeeze the last dimension" if density.dim() == 2 and density.shape[-1] == 1 else "one value per sample"
    raise InputError("density", f"shape (n_samples,) = ({samples.capacity},)", str(tuple(density.shape)), hint)


def ask_field(field: Field, rays: Rays, positions: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """rgb and density of a field at positions (n, 3) on the rays with these indices (n,)."""
    times = None if rays.times is None else rays.times[index]
    cameras = None if rays.camera_indices is None else rays.camera_indices[index]
    return field(positions, take_rows(rays.directions, index), times, cameras)


def field_functions(field: Field, rays: Rays) -> tuple[SigmaFn, RgbSigmaFn]:
    """The two callables of a field over these rays."""

    def at(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
        index = ray_indices.long()
        middle = ((t_starts + t_ends) * 0.5)[:, None]
        return take_rows(rays.origins, index) + take_rows(rays.directions, index) * middle, index

    def sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
        positions, index = at(t_starts, t_ends, ray_indices)
        return field.density(positions, None if rays.times is None else rays.times[index])

    def rgb_sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
        return ask_field(field, rays, *at(t_starts, t_ends, ray_indices))

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
    """`ray_marching` and `volume_rendering` of a field, an object as in `nerfturbo.fields.field`. Differentiable to it.
    `prune` leaves out samples that no light reaches, by a first pass over the densities alone."""
    sigma_fn, rgb_sigma_fn = field_functions(field, rays)
    samples = ray_marching(rays, grid, sigma_fn=sigma_fn if prune else None, **vars(settings or MarchSettings()))
    return volume_rendering(rgb_sigma_fn, samples, background=background)


@functools.lru_cache(maxsize=8)
def _sphere(device: torch.device) -> Tensor:
    """(TAPS, 3) directions spread evenly over the sphere, on a spiral of golden turns."""
    index = torch.arange(TAPS, dtype=torch.float64) + 0.5
    z = 1.0 - 2.0 * index / TAPS
    angle = index * math.pi * (3.0 - math.sqrt(5.0))
    flat = (1.0 - z * z).sqrt()
    return torch.stack([flat * angle.cos(), flat * angle.sin(), z], dim=-1).float().to(device)


@torch.no_grad()
def surface_normals(field: Field, grid: OccupancyGrid, positions: Tensor, times: Tensor | None = None) -> Tensor:
    """(n, 3) unit vectors out of the surface at positions (n, 3); zero where nothing is around. Minus the mean
    direction of what lies on a small sphere about the point, weighed by opacity rather than density: it is bounded, so
    that a few very dense places do not drown the rest. At a sharp border, half of the sphere is opaque and its mean
    direction is the normal; differences along three axes would know only their signs."""
    reach = REACH * grid.step_size
    directions = _sphere(positions.device)
    parts = []
    for start in range(0, positions.shape[0], NORMALS_AT_ONCE):
        part = positions[start : start + NORMALS_AT_ONCE]
        around = (part[:, None, :] + directions * reach).reshape(-1, 3)
        when = None if times is None else times[start : start + NORMALS_AT_ONCE].repeat_interleave(TAPS)
        alpha = -torch.expm1(-field.density(around, when).float() * reach).view(-1, TAPS)
        alpha = alpha - alpha.mean(1, keepdim=True)  # the directions' own mean is not exactly zero
        parts.append(torch.nn.functional.normalize(-alpha @ directions, dim=-1, eps=1e-6))
    return torch.cat(parts) if parts else positions.new_zeros(0, 3)
