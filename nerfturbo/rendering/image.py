"""Whole images in a fixed amount of memory, whatever their size and however full the grid is.

Through a grid, rays are followed front to back in rounds of a few samples: a ray leaves when it is opaque or through,
so that nothing far behind a surface is evaluated, and one evaluation gives density and colour at once. Other samplers
render part after part of the image, every ray to its end. Memory is set by how many rays and samples may be in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.cameras import PIXEL_CENTER, Cameras
from ..data.lenses import picture_directions
from ..errors import InputError
from ..fields.field import Field, offers
from ..fields.parts import truncated_exp
from ..ops._dispatch import compile_only
from ..ops.composite import composite
from ..ops.frame import (
    FinishedRays,
    LiveRays,
    NextSamples,
    RoundLimits,
    absorb_samples,
    finish_rays,
    next_samples,
    start_rays,
)
from ..sampling.grid import GridSampler, MarchSettings, OccupancyGrid, as_sampler
from ..sampling.sampler import Sampler
from ..types import Aabb, PackedSamples, Rays, RenderOutput
from .render import field_functions

Places = OccupancyGrid | Sampler  # what places samples
STRIP = 8  # rows of pixels that are walked together, column after column: 32 rays are 8 x 4 pixels
UNCHECKED = 4  # rounds between two looks at the number of live rays, where a look waits for the device
BYTES_PER_RAY = 192
LIMITS = {"cpu": RoundLimits(least=8), "cuda": RoundLimits(least=4)}
PLACE_BYTES, SAMPLE_BYTES = (
    96,
    64,
)  # of rendering without a grid: per place that is looked at, per sample beside the field
SAMPLES_PER_RAY = 256  # of a sampler that does not say
PART_BYTES, PART_SHARE = (1 << 30, 4 << 30), 1 / 32  # of a GPU: at least, at most, and of its memory


@dataclass(frozen=True)
class Budget:
    """What may be in flight: rays, and samples of one round."""

    rays: int
    samples: int


class _Cost(NamedTuple):
    """Memory that rendering takes unless told otherwise, and the most that pays."""

    memory: int  # bytes
    most: Budget


# On a CPU the samples of a round should stay in its caches; on a GPU a round should fill the device several times.
_COSTS = {"cpu": _Cost(1 << 26, Budget(1 << 16, 1 << 17)), "cuda": _Cost(1 << 28, Budget(1 << 20, 1 << 21))}
LEAST = Budget(1 << 10, 1 << 13)
MORE_MEMORY = 4  # times as much on a GPU where a round or a part is many launches, which cost the same for any size


_GIVEN: ContextVar[int | None] = ContextVar("nerfturbo_rendering_memory", default=None)


@contextmanager
def rendering_within(max_memory: int | None) -> Iterator[None]:
    """Inside, pictures are rendered within `max_memory` bytes beside themselves where a call names no other number.
    None leaves it to the device.

    >>> with rendering_within(1 << 24):
    ...     default_memory(torch.device("cpu"))
    16777216
    """
    if max_memory is not None and max_memory < 1:
        raise InputError("max_memory", "a number of bytes > 0", str(max_memory))
    token = _GIVEN.set(max_memory)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given_memory() -> int | None:
    """What `rendering_within` says, if it does."""
    return _GIVEN.get()


def default_memory(device: torch.device, *, many_launches: bool = False) -> int:
    """Bytes that rendering takes unless a call says otherwise."""
    if (given := given_memory()) is not None:
        return given
    memory = _COSTS.get(device.type, _COSTS["cuda"]).memory
    return memory * MORE_MEMORY if many_launches and device.type != "cpu" else memory


def render_budget(field: Field, device: torch.device, max_memory: int | None = None) -> Budget:
    """Rays and samples that fit into `max_memory` bytes (None: 256 MiB on a GPU, 1 GiB there for fields whose rounds
    are many launches, 64 MiB on a CPU)."""
    cost = _COSTS.get(device.type, _COSTS["cuda"])
    few = bool(getattr(field, "few_launches", False))
    memory = default_memory(device, many_launches=not few) if max_memory is None else max_memory
    if memory < 1:
        raise InputError("max_memory", "a number of bytes > 0", str(memory))
    rays = min(cost.most.rays, memory // 2 // BYTES_PER_RAY)
    samples = min(cost.most.samples, memory // 2 // bytes_per_sample(field))
    return Budget(max(LEAST.rays, rays), max(LEAST.samples, samples // 128 * 128))


def bytes_per_sample(field: Field) -> int:
    """An estimate of the field's own, or a few layers."""
    return getattr(field, "bytes_per_sample", 8192)


class Evaluator:
    """A field over the rays of one part of a picture: samples to density and colour, or their logits."""

    logits = recordable = False
    aabb: Aabb | None = None  # what positions are scaled to

    def __init__(self, field: Field, rays: Rays) -> None:
        self.field, self.rays = field, rays
        one = rays[slice(0, 1)]  # asked for the number of channels; none if there are no rays
        self.channels = self._ask(one.origins, torch.arange(len(one), device=rays.device))[0].shape[1]

    def _ask(self, positions: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        rays = self.rays
        times = None if rays.times is None else rays.times[index]
        cameras = None if rays.camera_indices is None else rays.camera_indices[index]
        return self.field(positions, rays.directions[index], times, cameras)

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        """Density (n,) and rgb (n, channels) of the rows in use: waits for the device to know how many."""
        n = min(int(samples.n_used), samples.t_starts.shape[0])
        if n == 0:  # nothing to ask, and not every field takes nothing
            return samples.t_starts[:0], samples.t_starts.new_empty(0, self.channels)
        rgb, density = self._ask(samples.positions[:n], samples.ray_indices[:n].long())
        return density, rgb


def evaluator(field: Any, rays: Rays, *, half: bool = False) -> Evaluator:
    """How to ask this field: its own fused way, tables read in their precision or in `half`, or point by point."""
    own = field.evaluator(rays, half=half) if offers(field, "evaluator") else None
    return Evaluator(field, rays) if own is None else own


def start(evaluate: Evaluator, sampler: GridSampler, order: Tensor | None = None) -> LiveRays:
    rays, bits = evaluate.rays, sampler.grid.occupancy
    return start_rays(rays.origins, rays.directions, bits, sampler.rule, order=order, channels=evaluate.channels)


def make_round(evaluate: Evaluator, sampler: GridSampler, rows: int) -> Callable[[LiveRays], LiveRays]:
    """One round as a function of the live rays: the next samples, the field, compositing."""
    grid, settings = sampler.grid, sampler.settings
    limits = LIMITS.get(grid.bits.device.type)
    threshold = settings.alpha_thre if settings.alpha_thre <= 0.0 else grid.mean.clamp(max=settings.alpha_thre)

    def run(live: LiveRays) -> LiveRays:
        samples = next_samples(live, rows=rows, limits=limits, aabb=evaluate.aabb)
        density, rgb = evaluate(samples)
        return absorb_samples(
            live,
            samples,
            density,
            rgb,
            early_stop_eps=settings.early_stop_eps,
            alpha_thre=threshold,
            logits=evaluate.logits,
        )

    return run


def render_part(
    field: Field,
    rays: Rays,
    sampler: GridSampler,
    *,
    rows: int,
    order: Tensor | None = None,
    background: Tensor | None = None,
    rounds: int | None = None,
) -> FinishedRays:
    """Render rays that fit the budget, to the end; or only so many `rounds`, without a look at what is left."""
    evaluate = evaluator(field, rays)
    live = start(evaluate, sampler, order)
    run = make_round(evaluate, sampler, rows)
    for _ in range(rounds or 0):
        live = run(live)
    unchecked = UNCHECKED if rays.device.type != "cpu" and evaluate.logits else 1
    while rounds is None and int(live.n_live):
        for _ in range(unchecked):
            live = run(live)
    return finish_rays(live, background)


@functools.lru_cache(maxsize=8)
def strip_order(height: int, width: int, device: torch.device) -> Tensor:
    """(height * width,) int32: pixels, row-major, strip after strip, each strip column after column."""
    pixels = torch.arange(height * width, dtype=torch.int32, device=device).view(height, width)
    return torch.cat([strip.t().reshape(-1) for strip in pixels.split(STRIP)]) if height else pixels.view(-1)


# --- without a grid: every ray to its end -----------------------------------------------------------------------------


def evaluate_samples(field: Any, rays: Rays, samples: PackedSamples) -> tuple[Tensor, Tensor]:
    """Density (capacity,) and rgb (capacity, channels) of a field over the samples of rays, differentiable."""
    if offers(field, "sample_logits"):
        raw = field.sample_logits(rays, samples)
        return truncated_exp(raw[:, 3]), torch.sigmoid(raw[:, :3])
    rgb, density = field_functions(field, rays)[1](samples.t_starts, samples.t_ends, samples.ray_indices)
    return density, rgb


def render_samples(field: Field, rays: Rays, sampler: Sampler, *, background: Tensor | None = None) -> RenderOutput:
    """All samples of the rays at once, differentiable to the field."""
    samples = sampler.sample(rays)
    density, rgb = evaluate_samples(field, rays, samples)
    out = composite(density, rgb, samples)
    color = out.rgb if background is None else out.rgb + (1.0 - out.opacity)[:, None] * background
    return RenderOutput(color, out.opacity, out.depth / out.opacity.clamp(min=1e-6), out.weights, samples)


def rays_at_once(sampler: Any, memory: int, sample_bytes: int) -> int:
    """Rays whose samples fit the memory."""
    if offers(sampler, "bytes_per_ray"):
        per_ray = sampler.bytes_per_ray(sample_bytes + SAMPLE_BYTES, PLACE_BYTES)
    else:
        per_ray = (getattr(sampler, "samples_per_ray", None) or SAMPLES_PER_RAY) * (sample_bytes + SAMPLE_BYTES)
    return max(64, memory // max(per_ray, 1))


def part_memory(device: torch.device) -> int:
    """Bytes that a part of a picture may take unless told otherwise: a part is some hundred launches whatever its
    size, so that a large GPU is given large ones."""
    if device.type != "cuda" or given_memory() is not None:
        return default_memory(device, many_launches=True)
    least, most = PART_BYTES
    return min(most, max(least, int(PART_SHARE * torch.cuda.get_device_properties(device).total_memory)))


@torch.no_grad()
def finish_part(field: Field, rays: Rays, sampler: Sampler, background: Tensor | None) -> FinishedRays:
    """One part of an image."""
    out = render_samples(field, rays, sampler, background=background)
    return FinishedRays(out.rgb.clamp(0.0, 1.0), out.opacity, out.depth)


# --- whole images -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RenderedImage:
    """Images of one camera, row-major."""

    rgb: Tensor  # (height, width, channels)
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width)


class _Parts:
    """Renders rows of an image within a memory budget, by rounds through a grid or by whole rays."""

    def __init__(self, field: Field, sampler: Any, device: torch.device, max_memory: int | None) -> None:
        self.field, self.sampler, self.rounds = field, sampler, hasattr(sampler, "grid")
        if self.rounds:
            self.budget = render_budget(field, device, max_memory)
        else:
            memory = part_memory(device) if max_memory is None else max_memory
            self.budget = Budget(rays_at_once(sampler, memory, bytes_per_sample(field)), 0)

    def render(self, rays: Rays, rows: int, width: int, background: Tensor | None) -> FinishedRays:
        if not self.rounds:
            return finish_part(self.field, rays, self.sampler, background)
        order, samples = strip_order(rows, width, rays.device), self.budget.samples
        return render_part(self.field, rays, self.sampler, rows=samples, order=order, background=background)


@torch.no_grad()
def render_image(
    field: Field,
    grid: Places,
    rays: Rays,
    *,
    height: int,
    width: int,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    max_memory: int | None = None,
) -> RenderedImage:
    """Render all rays of an image (height * width, row-major); the pixels are those of `render_rays`.

    `grid` is what places the samples: an occupancy grid or a sampler such as `ProposalEstimator`. As many rays at a
    time as `max_memory` bytes allow (None: 256 MiB on a GPU, 1 GiB there for fields that are no hash grid and no
    voxels, 1 to 4 GiB without a grid, a 32nd of its memory; 64 MiB on a CPU; the image itself comes on top).
    """
    if len(rays) != height * width:
        raise InputError("rays", f"height * width = {height * width} rays", str(len(rays)))
    parts = _Parts(field, as_sampler(grid, settings), rays.device, max_memory)

    def render(first: int, rows: int) -> FinishedRays:
        part = slice(first * width, (first + rows) * width)
        behind = background if background is None or background.dim() == 1 else background[part]
        return parts.render(rays[part], rows, width, behind)

    return _in_parts(render, height, width, parts.budget.rays)


@torch.no_grad()
def compile_image(field: Any, grid: Places, rays: Rays, settings: MarchSettings | None = None) -> None:
    """Compile the kernels of `render_image` ahead, all at once, where the field is read without a look at counts."""
    sampler = as_sampler(grid, settings)
    if not getattr(field, "few_launches", False) or not hasattr(sampler, "grid"):
        return
    with compile_only(rays.device) as compiling:
        if compiling:
            rows, order = render_budget(field, rays.device).samples, strip_order(1, len(rays), rays.device)
            background = torch.ones(3, device=rays.device)
            # Two rounds, since the queue has two sides; to the end it would never come, with no kernel running.
            render_part(field, rays, sampler, order=order, background=background, rounds=2, rows=rows)


@torch.no_grad()
def render_view(
    field: Field,
    grid: Places,
    cameras: Cameras,
    index: int,
    *,
    settings: MarchSettings | None = None,
    background: Tensor | None = None,
    max_memory: int | None = None,
) -> RenderedImage:
    """View `index` of the cameras, as `render_image` renders it; rays are made part by part, on the grid's device.

    `background` is (channels,).
    """
    width, height = (int(side) for side in cameras.size[index])
    device = device_of(field, grid)
    local = picture_directions(cameras, index, device)
    cameras = cameras.to(device)
    parts = _Parts(field, as_sampler(grid, settings), device, max_memory)
    x = torch.arange(width, device=device) + PIXEL_CENTER

    def render(first: int, rows: int) -> FinishedRays:
        indices = torch.full((rows * width,), index, dtype=torch.int64, device=device)
        if local is None:
            y = torch.arange(first, first + rows, device=device) + PIXEL_CENTER
            rays = cameras.rays(indices, x.repeat(rows), y.repeat_interleave(width))
        else:
            rays = cameras.rays_along(indices, local[first * width : (first + rows) * width])
        return parts.render(rays, rows, width, background)

    return _in_parts(render, height, width, parts.budget.rays)


def device_of(field: Any, grid: Any) -> torch.device:
    """Where rendering happens: on the grid's device, or that of the field's weights."""
    places = getattr(grid, "grid", grid)
    for module in (places, field):
        if isinstance(module, torch.nn.Module):
            for tensor in (*module.buffers(), *module.parameters()):
                return tensor.device
    return torch.device("cpu")


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
