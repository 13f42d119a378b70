"""Whole images in a fixed amount of memory, whatever their size and however full the grid is. Through a grid, rays are
followed front to back in rounds of a few samples: a ray leaves when it is opaque or through, so that nothing far behind
a surface is evaluated, and one evaluation gives density and colour at once. Other samplers render part after part of
the image, every ray to its end. Memory is set by how many rays and samples may be in flight."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.lenses import picture_directions
from ..fields.field import Field, offers
from ..fields.parts import truncated_exp
from ..ops import frame
from ..ops._checks import refuse
from ..ops._dispatch import compile_only
from ..ops.frame import FinishedRays, LiveRays, NextSamples, RoundLimits
from ..sampling.grid import GridSampler, MarchSettings, OccupancyGrid, as_sampler
from ..sampling.sampler import Sampler
from ..types import Aabb, Rays, RenderOutput
from .render import ask_field, field_functions, volume_rendering

Places = OccupancyGrid | Sampler  # what places samples
STRIP = 8  # rows of pixels that are walked together, column after column: 32 rays are 8 x 4 pixels
UNCHECKED = 4  # rounds between two looks at the number of live rays, where a look waits for the device
BYTES_PER_RAY = 192
LIMITS = {"cpu": RoundLimits(least=8), "cuda": RoundLimits(least=4)}
PLACE_BYTES, SAMPLE_BYTES = 96, 64  # without a grid: per place that is looked at, per sample beside the field
SAMPLES_PER_RAY = 256  # of a sampler that does not say
PART_BYTES, PART_SHARE = (1 << 30, 4 << 30), 1 / 32  # of a GPU: at least, at most, and of its memory


@dataclass(frozen=True)
class Budget:
    """What may be in flight: rays, and samples of one round."""

    rays: int
    samples: int


# Bytes that rendering takes unless told otherwise, and the most that pays: on a CPU the samples of a round should stay
# in its caches; on a GPU a round should fill the device several times.
_COSTS = {"cpu": (1 << 26, Budget(1 << 16, 1 << 17)), "cuda": (1 << 28, Budget(1 << 20, 1 << 21))}
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
    refuse(max_memory is not None and max_memory < 1, "max_memory", "a number of bytes > 0", max_memory)
    token = _GIVEN.set(max_memory)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def default_memory(device: torch.device, *, many_launches: bool = False) -> int:
    """Bytes that rendering takes unless a call says otherwise."""
    if (given := _GIVEN.get()) is not None:
        return given
    memory, _ = _COSTS.get(device.type, _COSTS["cuda"])
    return memory * MORE_MEMORY if many_launches and device.type != "cpu" else memory


def render_budget(field: Field, device: torch.device, max_memory: int | None = None) -> Budget:
    """Rays and samples that fit into `max_memory` bytes (None: 256 MiB on a GPU, 1 GiB there for fields whose rounds
    are many launches, 64 MiB on a CPU)."""
    _, most = _COSTS.get(device.type, _COSTS["cuda"])
    many = not getattr(field, "few_launches", False)
    memory = default_memory(device, many_launches=many) if max_memory is None else max_memory
    refuse(memory < 1, "max_memory", "a number of bytes > 0", memory)
    rays = min(most.rays, memory // 2 // BYTES_PER_RAY)
    samples = min(most.samples, memory // 2 // bytes_per_sample(field))
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
        self.channels = ask_field(field, rays, one.origins, torch.arange(len(one), device=rays.device))[0].shape[1]

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        """Density (n,) and rgb (n, channels) of the rows in use: waits for the device to know how many."""
        n = min(int(samples.n_used), samples.t_starts.shape[0])
        if n == 0:  # nothing to ask, and not every field takes nothing
            return samples.t_starts[:0], samples.t_starts.new_empty(0, self.channels)
        rgb, density = ask_field(self.field, self.rays, samples.positions[:n], samples.ray_indices[:n].long())
        return density, rgb


def begin(
    field: Any, rays: Rays, sampler: GridSampler, order: Tensor | None, *, half: bool = False
) -> tuple[Evaluator, LiveRays]:
    """Rays at their beginning, and how to ask the field: its own fused way, perhaps in `half`, or point by point."""
    own = field.evaluator(rays, half=half) if offers(field, "evaluator") else None
    evaluate, bits = Evaluator(field, rays) if own is None else own, sampler.grid.occupancy
    options = {"order": order, "channels": evaluate.channels}
    return evaluate, frame.start_rays(rays.origins, rays.directions, bits, sampler.rule, **options)


def make_round(evaluate: Evaluator, sampler: GridSampler, rows: int) -> Callable[[LiveRays], LiveRays]:
    """One round as a function of the live rays: the next samples, the field, compositing."""
    grid, settings = sampler.grid, sampler.settings
    limits = LIMITS.get(grid.bits.device.type)
    threshold = settings.alpha_thre if settings.alpha_thre <= 0.0 else grid.mean.clamp(max=settings.alpha_thre)
    options = {"early_stop_eps": settings.early_stop_eps, "logits": evaluate.logits}

    def run(live: LiveRays) -> LiveRays:
        samples = frame.next_samples(live, rows=rows, limits=limits, aabb=evaluate.aabb)
        return frame.absorb_samples(live, samples, *evaluate(samples), alpha_thre=threshold, **options)

    return run


def render_part(
    field: Field,
    rays: Rays,
    sampler: GridSampler,
    *,
    rows: int,
    order: Tensor | None = None,
    background: Tensor | None = None,
) -> FinishedRays:
    """Render rays that fit the budget, to the end."""
    evaluate, live = begin(field, rays, sampler, order)
    run = make_round(evaluate, sampler, rows)
    unchecked = UNCHECKED if rays.device.type != "cpu" and evaluate.logits else 1
    while int(live.n_live):
        for _ in range(unchecked):
            live = run(live)
    return frame.finish_rays(live, background)


@functools.lru_cache(maxsize=8)
def strip_order(height: int, width: int, device: torch.device) -> Tensor:
    """(height * width,) int32: pixels, row-major, strip after strip, each strip column after column."""
    pixels = torch.arange(height * width, dtype=torch.int32, device=device).view(height, width)
    return torch.cat([strip.t().reshape(-1) for strip in pixels.split(STRIP)]) if height else pixels.view(-1)


def render_samples(field: Any, rays: Rays, sampler: Sampler, *, background: Tensor | None = None) -> RenderOutput:
    """Without a grid: all samples of the rays at once, differentiable to the field."""
    samples = sampler.sample(rays)
    if not offers(field, "sample_logits"):
        return volume_rendering(field_functions(field, rays)[1], samples, background=background)
    raw = field.sample_logits(rays, samples)
    seen = torch.sigmoid(raw[:, :3]), truncated_exp(raw[:, 3])
    return volume_rendering(lambda *_: seen, samples, background=background)


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
    if device.type != "cuda" or _GIVEN.get() is not None:
        return default_memory(device, many_launches=True)
    least, most = PART_BYTES
    return min(most, max(least, int(PART_SHARE * torch.cuda.get_device_properties(device).total_memory)))


@dataclass(frozen=True)
class RenderedImage:
    """Images of one camera, row-major."""

    rgb: Tensor  # (height, width, channels)
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width)


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
    """Render all rays of an image (height * width, row-major); the pixels are those of `render_rays`. `grid` is what
    places the samples: an occupancy grid or a sampler such as `ProposalEstimator`. As many rays at a time as
    `max_memory` bytes allow (None: 256 MiB on a GPU, 1 GiB there for fields that are no hash grid and no voxels, 1 to 4
    GiB without a grid, a 32nd of its memory; 64 MiB on a CPU; the image itself comes on top)."""
    refuse(len(rays) != height * width, "rays", f"height * width = {height * width} rays", len(rays))

    def part(first: int, rows: int) -> Rays:
        return rays[first * width : (first + rows) * width]

    return _render_rows(field, as_sampler(grid, settings), part, (height, width), rays.device, background, max_memory)


def _render_rows(
    field: Field,
    sampler: Any,
    rays_of: Callable[[int, int], Rays],
    size: tuple[int, int],
    device: torch.device,
    background: Tensor | None,
    max_memory: int | None,
) -> RenderedImage:
    """A picture of (height, width) pixels from the rays of its parts, `rays_of(first row, rows)`."""
    (height, width), rounds = size, hasattr(sampler, "grid")
    if rounds:
        budget = render_budget(field, device, max_memory)
    else:
        memory = part_memory(device) if max_memory is None else max_memory
        budget = Budget(rays_at_once(sampler, memory, bytes_per_sample(field)), 0)

    def render(first: int, rows: int) -> FinishedRays:
        rays, behind = rays_of(first, rows), background
        if background is not None and background.dim() > 1:
            behind = background[first * width : (first + rows) * width]
        if rounds:
            order = strip_order(rows, width, device)
            return render_part(field, rays, sampler, rows=budget.samples, order=order, background=behind)
        out = render_samples(field, rays, sampler, background=behind)
        return FinishedRays(out.rgb.clamp(0.0, 1.0), out.opacity, out.depth)

    return in_parts(render, height, width, rows_at_once(height, width, budget.rays))


@torch.no_grad()
def compile_image(field: Any, grid: Places, rays: Rays, settings: MarchSettings | None = None) -> None:
    """Compile the kernels of `render_image` ahead, all at once, where the field is read without a look at counts."""
    sampler = as_sampler(grid, settings)
    if not getattr(field, "few_launches", False) or not hasattr(sampler, "grid"):
        return
    with compile_only(rays.device) as compiling:
        if compiling:
            evaluate, live = begin(field, rays, sampler, strip_order(1, len(rays), rays.device))
            run = make_round(evaluate, sampler, render_budget(field, rays.device).samples)
            # Two rounds, since the queue has two sides; to the end it would never come, with no kernel running.
            frame.finish_rays(run(run(live)), torch.ones(3, device=rays.device))


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
    """View `index` of the cameras, as by `render_image`, over (channels,); made part by part, on the grid's device."""
    width, height = (int(side) for side in cameras.size[index])
    device = device_of(field, grid)
    local = picture_directions(cameras, index, device)
    cameras = cameras.to(device)

    def rays_of(first: int, rows: int) -> Rays:
        pixels = torch.arange(first * width, (first + rows) * width, device=device)
        indices = torch.full_like(pixels, index)
        if local is not None:
            return cameras.rays_along(indices, local[first * width : (first + rows) * width])
        return cameras.pixel_rays(indices, pixels)

    return _render_rows(field, as_sampler(grid, settings), rays_of, (height, width), device, background, max_memory)


def device_of(field: Any, grid: Any) -> torch.device:
    """Where rendering happens: on the grid's device, or that of the field's weights."""
    modules = (one for one in (getattr(grid, "grid", grid), field) if isinstance(one, torch.nn.Module))
    tensors = itertools.chain.from_iterable((*one.buffers(), *one.parameters()) for one in modules)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def supersampled(render: Callable[[Cameras], RenderedImage], cameras: Cameras, n: int) -> RenderedImage:
    """The mean of n x n pictures: `render` makes each by cameras that look through other points of the pixels."""
    refuse(n < 1, "render.eval_rays", "at least 1", n)
    if n == 1:
        return render(cameras)
    places, whole = [(index + 0.5) / n - 0.5 for index in range(n)], torch.zeros(())
    rgb, opacity, seen = whole, whole, whole  # a pixel's depth is that of what it sees
    for y, x in itertools.product(places, repeat=2):
        part = render(cameras.looking_past((x, y)))
        rgb, opacity, seen = part.rgb + rgb, part.opacity + opacity, part.depth * part.opacity + seen
    return RenderedImage(rgb / n**2, opacity / n**2, seen / opacity.clamp(min=1e-6))


def in_parts(render: Callable[[int, int], FinishedRays], height: int, width: int, band: int) -> RenderedImage:
    """The picture from its parts: `render(first row, rows)` for `band` rows at a time."""
    whole: FinishedRays | None = None
    for first in range(0, max(height, 1), max(band, 1)):
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
