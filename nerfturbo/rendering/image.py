"""Whole images in a fixed amount of memory, whatever their size and however full the grid is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.conventions import PIXEL_CENTER
from ..data.lens_table import picture_directions
from ..errors import InputError
from ..fields.field import Field
from ..fields.ngp import InstantNGP
from ..fields.voxels import VoxelGrid
from ..ops.frame import FinishedRays
from ..ops.precompile import compile_only
from ..sampling.occupancy_grid import OccupancyGrid
from ..sampling.proposals import RayEstimator
from ..types import Rays
from .estimated import finish_part, part_memory, rays_at_once
from .render import MarchSettings
from .rounds import STRIP, Budget, bytes_per_sample, render_budget, render_part, strip_order


@dataclass(frozen=True)
class RenderedImage:
    """Pictures of one camera, row-major."""

    rgb: Tensor  # (height, width, channels)
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width)


@torch.no_grad()
def render_image(
    field: Field,
    grid: OccupancyGrid | RayEstimator,
    rays: Rays,
    *,
    height: int,
    width: int,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    max_memory: int | None = None,
) -> RenderedImage:
    """Render all rays of an image (height * width, row-major); the pixels are those of `render_rays`.

    `grid` is what places the samples: an occupancy grid or an estimator such as `ProposalEstimator`. With a grid,
    rays are followed front to back in rounds of a few samples and leave when they are opaque; as many at a time as
    `max_memory` bytes allow (None: 256 MiB on a GPU, 1 GiB there for fields that are no hash grid and no voxels, 1 to
    4 GiB without a grid, a 32nd of its memory; 64 MiB on a CPU; the picture itself comes on top).
    """
    if len(rays) != height * width:
        raise InputError("rays", f"height * width = {height * width} rays", str(len(rays)))

    def render(first: int, rows: int, samples: int) -> FinishedRays:
        part = slice(first * width, (first + rows) * width)
        behind = background if background is None or background.dim() == 1 else background[part]
        if isinstance(grid, RayEstimator):
            return finish_part(field, rays[part], grid, behind)
        order = strip_order(rows, width, rays.device)
        chosen = settings or MarchSettings()
        return render_part(field, rays[part], grid, settings=chosen, rows=samples, order=order, background=behind)

    budget = _budget(field, grid, rays.device, max_memory)
    return _in_parts(lambda first, rows: render(first, rows, budget.samples), height, width, budget.rays)


@torch.no_grad()
def compile_image(
    field: Field, grid: OccupancyGrid | RayEstimator, rays: Rays, settings: MarchSettings | None = None
) -> None:
    """Compile the kernels of `render_image` ahead, all at once, where the field is read without a look at counts."""
    if not isinstance(field, InstantNGP | VoxelGrid) or isinstance(grid, RayEstimator):
        return
    with compile_only(rays.device) as compiling:
        if compiling:
            options = {"settings": settings or MarchSettings(), "rows": render_budget(field, rays.device).samples}
            order = strip_order(1, len(rays), rays.device)
            background = torch.ones(3, device=rays.device)
            # Two rounds, since the queue has two sides; to the end it would never come, with no kernel running.
            render_part(field, rays, grid, order=order, background=background, rounds=2, **options)


@torch.no_grad()
def render_view(
    field: Field,
    grid: OccupancyGrid | RayEstimator,
    cameras: Cameras,
    index: int,
    *,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    max_memory: int | None = None,
) -> RenderedImage:
    """Picture `index` of the cameras, as `render_image` renders it; rays are made part by part, on the grid's device.

    `background` is (channels,).
    """
    width, height = (int(side) for side in cameras.size[index])
    device = device_of(field, grid)
    local = picture_directions(cameras, index, device)
    cameras = cameras.to(device)
    budget = _budget(field, grid, device, max_memory)
    x = torch.arange(width, device=device) + PIXEL_CENTER

    def render(first: int, rows: int) -> FinishedRays:
        indices = torch.full((rows * width,), index, dtype=torch.int64, device=device)
        if local is None:
            y = torch.arange(first, first + rows, device=device) + PIXEL_CENTER
            rays = cameras.rays(indices, x.repeat(rows), y.repeat_interleave(width))
        else:
            rays = cameras.rays_along(indices, local[first * width : (first + rows) * width])
        if isinstance(grid, RayEstimator):
            return finish_part(field, rays, grid, background)
        order = strip_order(rows, width, device)
        chosen = settings or MarchSettings()
        return render_part(field, rays, grid, settings=chosen, rows=budget.samples, order=order, background=background)

    return _in_parts(render, height, width, budget.rays)


def device_of(field: Field, grid: OccupancyGrid | RayEstimator) -> torch.device:
    """Where rendering happens: on the grid's device, or that of the field's weights."""
    if isinstance(grid, OccupancyGrid):
        return grid.bits.device
    modules = [module for module in (field, grid) if isinstance(module, torch.nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return tensors[0].device if tensors else torch.device("cpu")


def _budget(field: Field, grid: OccupancyGrid | RayEstimator, device: torch.device, max_memory: int | None) -> Budget:
    if isinstance(grid, OccupancyGrid):
        return render_budget(field, device, max_memory)
    memory = part_memory(device) if max_memory is None else max_memory
    return Budget(rays_at_once(grid, memory, bytes_per_sample(field)), 0)


def supersampled(render: Callable[[tuple[float, float]], RenderedImage], n: int) -> RenderedImage:
    """The mean of n x n pictures, `render((dx, dy))` through points so far from the pixels' centres, in pixels."""
    if n < 1:
        raise InputError("render.eval_rays", "at least 1", str(n))
    places = [(index + 0.5) / n - 0.5 for index in range(n)]
    whole: RenderedImage | None = None
    for shift in [(x, y) for y in places for x in places]:
        part = render(shift)
        if n == 1:
            return part
        seen = part.depth * part.opacity  # a pixel's depth is that of what it sees
        if whole is None:
            whole = RenderedImage(part.rgb.clone(), part.opacity.clone(), seen)
        else:
            for total, piece in ((whole.rgb, part.rgb), (whole.opacity, part.opacity), (whole.depth, seen)):
                total.add_(piece)
    assert whole is not None
    depth = whole.depth / whole.opacity.clamp(min=1e-6)
    return RenderedImage(whole.rgb / n**2, whole.opacity / n**2, depth)


def _in_parts(render: Callable[[int, int], FinishedRays], height: int, width: int, n_rays: int) -> RenderedImage:
    """The picture from its parts: `render(first row, rows)` for as many rows at a time as the rays allow."""
    band = max(1, rows_at_once(height, width, n_rays))
    whole: FinishedRays | None = None
    for first in range(0, max(height, 1), band):
        part = render(first, min(band, height - first))
        if band >= height:
            whole = part
            break
        if whole is None:  # one picture and one part at any moment, however many parts there are
            whole = FinishedRays(*(column.new_empty(height * width, *column.shape[1:]) for column in part))
        for column, piece in zip(whole, part, strict=True):
            column[first * width : first * width + len(piece)] = piece
    assert whole is not None
    rgb, opacity, depth = whole
    return RenderedImage(rgb.view(height, width, rgb.shape[1]), opacity.view(height, width), depth.view(height, width))


def rows_at_once(height: int, width: int, n_rays: int) -> int:
    """Rows of a part of the picture: few enough for the budget, parts of about the same height, whole strips."""
    most = max(1, n_rays // max(width, 1))
    if most >= height:
        return height
    if most >= STRIP:
        most = most // STRIP * STRIP
    parts = -(-height // most)
    even = -(-height // parts)
    return min(most, -(-even // STRIP) * STRIP)
