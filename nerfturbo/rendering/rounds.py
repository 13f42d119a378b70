"""Rendering front to back: rounds of a few samples for the rays that are still under way.

A ray leaves the queue when it is opaque or through the grid, so nothing far behind a surface is evaluated, and one
evaluation gives density and colour at once. The pixels are those of `render_rays`. Memory is set by how many rays and
samples may be in flight, not by the picture or by how full the grid is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..fields.anti_aliased import AntiAliasedNGP
from ..fields.field import Field
from ..fields.ngp import InstantNGP
from ..fields.voxels import VoxelGrid
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
from ..ops.march import StepRule
from ..ops.ngp import ngp_logits, skips_unused
from ..ops.positions import fold
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import Aabb, Rays
from .render import MarchSettings

STRIP = 8  # rows of pixels that are walked together, column after column: 32 rays are 8 x 4 pixels
UNCHECKED = 4  # rounds between two looks at the number of live rays, where a look waits for the device
BYTES_PER_RAY = 192
LIMITS = {"cpu": RoundLimits(least=8), "cuda": RoundLimits(least=4)}


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


def render_budget(field: Field, device: torch.device, max_memory: int | None = None, *, half: bool = False) -> Budget:
    """Rays and samples that fit into `max_memory` bytes (None: 256 MiB on a GPU, 1 GiB there for fields that are no
    hash grid and no voxels, 64 MiB on a CPU)."""
    cost = _COSTS.get(device.type, _COSTS["cuda"])
    few = isinstance(field, InstantNGP | VoxelGrid)
    memory = default_memory(device, many_launches=not few) if max_memory is None else max_memory
    if memory < 1:
        raise InputError("max_memory", "a number of bytes > 0", str(memory))
    rays = min(cost.most.rays, memory // 2 // BYTES_PER_RAY)
    samples = min(cost.most.samples, memory // 2 // bytes_per_sample(field, half=half))
    return Budget(max(LEAST.rays, rays), max(LEAST.samples, samples // 128 * 128))


def bytes_per_sample(field: Field, *, half: bool = False) -> int:
    """An estimate: encoding and logits for the fused field, a few layers for any other."""
    if isinstance(field, VoxelGrid):
        return 256
    if not isinstance(field, InstantNGP):
        return getattr(field, "bytes_per_sample", 8192)
    row = ngp_table(field, half=half, rows=1)
    return 64 + field.encoding.layout.n_outputs * row.element_size() if skips_unused(row, field.weights) else 1024


def ngp_table(field: InstantNGP, *, half: bool = False, rows: int | None = None) -> Tensor:
    """The first rows of the table (None: all) in the precision in which it is read."""
    table = (field.encoding.table if field.half_table is None else field.half_table)[:rows]
    return table.half() if half and table.dtype == torch.float32 else table


class Evaluator:
    """A field over the rays of one part of a picture: samples to density and colour, or their logits."""

    logits = False
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


class NgpEvaluator(Evaluator):
    """Instant-NGP: directions are encoded once per ray, and nothing is read back."""

    logits = True
    channels = 3

    field: InstantNGP

    def __init__(self, field: InstantNGP, rays: Rays, table: Tensor) -> None:
        self.field, self.rays, self.aabb = field, rays, field.aabb
        self._table, self._weights, self._layout = table, field.faded_weights, field.encoding.layout
        self._angular = field.ray_features(rays.directions)

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        logits = ngp_logits(
            fold(samples.positions, self.field.contraction),  # scaled to the box already
            self._angular,
            samples.ray_indices,
            table=self._table,
            layout=self._layout,
            weights=self._weights,
            n_used=samples.n_used,
        )
        return logits[:, 3], logits[:, :3]


class VoxelEvaluator(Evaluator):
    """Sparse voxels: directions are turned into basis functions once per ray, and nothing is read back."""

    logits = True
    channels = 3

    def __init__(self, field: VoxelGrid, rays: Rays) -> None:
        self.field, self.rays, self.aabb = field, rays, field.aabb
        self._look_up, self._basis = field.logits, field.basis(rays.directions)

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        logits = self._look_up(samples.positions, self._basis, samples.ray_indices, samples.n_used)
        return logits[:, 3], logits[:, :3]


class FadedEvaluator(NgpEvaluator):
    """The same with levels that fade by the footprint of the pixel."""

    field: AntiAliasedNGP

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        logits = self.field.logits_at(samples, self.rays, self._angular, self._table)
        return logits[:, 3], logits[:, :3]


def evaluator(field: Field, rays: Rays, *, half: bool = False) -> Evaluator:
    """How to ask this field: Instant-NGP's table is read in the precision in which it is, or in `half`."""
    if type(field) is VoxelGrid and len(rays):
        return VoxelEvaluator(field, rays)
    if type(field) is AntiAliasedNGP:
        return FadedEvaluator(field, rays, ngp_table(field, half=half))
    if type(field) is not InstantNGP:
        return Evaluator(field, rays)
    table = ngp_table(field, half=half)
    return NgpEvaluator(field, rays, table) if skips_unused(table, field.weights) else Evaluator(field, rays)


def step_rule(grid: OccupancyGrid, settings: MarchSettings) -> StepRule:
    size = settings.render_step_size or grid.step_size
    return StepRule(size, settings.near_plane, settings.far_plane, settings.cone_angle)


def start(evaluate: Evaluator, grid: OccupancyGrid, settings: MarchSettings, order: Tensor | None = None) -> LiveRays:
    rays = evaluate.rays
    rule = step_rule(grid, settings)
    return start_rays(rays.origins, rays.directions, grid.occupancy, rule, order=order, channels=evaluate.channels)


def make_round(
    evaluate: Evaluator, grid: OccupancyGrid, settings: MarchSettings, rows: int
) -> Callable[[LiveRays], LiveRays]:
    """One round as a function of the live rays: the next samples, the field, compositing."""
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
    grid: OccupancyGrid,
    *,
    settings: MarchSettings,
    rows: int,
    order: Tensor | None = None,
    background: Tensor | None = None,
    rounds: int | None = None,
) -> FinishedRays:
    """Render rays that fit the budget, to the end; or only so many `rounds`, without a look at what is left."""
    evaluate = evaluator(field, rays)
    live = start(evaluate, grid, settings, order)
    run = make_round(evaluate, grid, settings, rows)
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
