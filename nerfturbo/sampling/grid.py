"""The multi-level occupancy grid: which cells hold anything, learned from the field while it trains. Each cell keeps a
decaying maximum of its optical thickness (density x step size). A cell is occupied above min(threshold, mean): the mean
keeps the grid alive while all densities are still small. Cells that no camera sees hold -1 and never become occupied.
Nothing here waits for the device. Of a dynamic scene (`GridConfig.moments`) a cell keeps the maximum over time: each
update looks at it at other random moments, so that nothing that passes through it is skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..config import GridConfig
from ..errors import InputError
from ..ops._checks import check_shape
from ..ops.march import OccupancyBits, StepRule, decay_and_max, march, pack_bits, threshold_bits, unpack_bits
from ..ops.positions import ray_aabb
from ..ops.random import Stream, random_bits, random_uniform
from ..types import Aabb, PackedSamples, Rays
from .geometry import box_around, cells_with_points, cells_with_triangles, check_points, dilate, flood_fill
from .sampler import DensityFn, Draw, Pruning

CHUNK = 1 << 18  # cells evaluated at a time: bounds the memory of an update
SLACK = 1e-4  # of a cell: borders that coincide but for rounding do not touch the next cell
MIN_OCCUPIED = 1e-4  # below this share of the cells a warming-up grid counts as collapsed


class Frusta(NamedTuple):
    """Pinhole cameras: poses that look along -z with y up."""

    camera_to_world: Tensor  # (n, 3, 4)
    focal: Tensor  # (n, 2) pixels
    center: Tensor  # (n, 2) pixels
    size: Tensor  # (n, 2) pixels


def seen_by_any(points: Tensor, radius: Tensor, frusta: Frusta, near: float) -> Tensor:
    """(n,) bool: whether a sphere around each point (n, 3) touches the frustum of a camera beyond `near`."""
    seen = torch.zeros(points.shape[0], dtype=torch.bool, device=points.device)
    for pose, f, c, wh in zip(*frusta, strict=True):
        local = (points - pose[:, 3]) @ pose[:, :3]
        depth = -local[:, 2]
        margin = radius * f.max() * 1.5
        inside = depth + radius > near
        for axis, sign in ((0, 1.0), (1, -1.0)):
            pixel = sign * local[:, axis] * f[axis] + c[axis] * depth
            inside &= (pixel > -margin) & (pixel < wh[axis] * depth + margin)
        seen |= inside
    return seen


class CellTeam(Protocol):
    """Processes that refresh one grid together, each its part of the cells; see `nerfturbo.training.distributed`."""

    rank: int
    world: int
    alone: bool

    def max_reduce(self, values: Tensor) -> None: ...


class OccupancyGrid(nn.Module):
    """`levels` nested grids of resolution^3 cells; level l covers the box scaled by 2^l. Cell (level, x, y, z) is
    number ((level * r + x) * r + y) * r + z. A new grid is occupied everywhere; `update` learns it from a field,
    `set_occupied`, `from_points` and `from_mesh` from what is known already.

    >>> grid = OccupancyGrid(Aabb.cube(1.0), GridConfig(resolution=4), step_size=0.1)
    >>> grid.update(0, lambda positions: 50.0 * (positions[:, 0] > 0.0))  # a field that is dense for x > 0
    >>> grid.occupied_fraction().item()
    0.5
    """

    thickness: Tensor  # (levels * resolution^3,) fp32, -1 where no camera looks
    bits: Tensor  # (levels * resolution^3 / 32,) int32
    mean: Tensor  # () fp32, mean thickness of visible cells
    warmup_steps = 256  # until then `update` refreshes every cell; later a quarter anywhere, a quarter of the occupied
    threshold = 0.01  # optical thickness (density x step) above which a cell is occupied

    def __init__(self, aabb: Aabb, config: GridConfig | None = None, *, step_size: float, seed: int = 0) -> None:
        super().__init__()
        self.aabb, self.config, self.step_size, self.seed = aabb, config or GridConfig(), step_size, seed
        n_cells = self.config.levels * self.config.resolution**3
        self.register_buffer("thickness", torch.zeros(n_cells))
        self.register_buffer("bits", torch.full((n_cells // 32,), -1, dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(()))
        _ = self.occupancy  # checks resolution and levels

    @classmethod
    def from_points(
        cls,
        points: Tensor,
        aabb: Aabb | None = None,
        config: GridConfig | None = None,
        *,
        step_size: float | None = None,
        margin: int = 1,
    ) -> OccupancyGrid:
        """Occupied where points (n, 3) lie, and `margin` cells around: a reconstruction's points, a scan. Without a box
        it is the cube around the points; without a step size, a 1024th of the box's diagonal.

        >>> grid = OccupancyGrid.from_points(torch.zeros(1, 3), Aabb.cube(1.0), GridConfig(resolution=8))
        >>> int(grid.occupied_fraction() * grid.n_cells)  # the point's cell and its 26 neighbours
        27
        """
        points = check_points("points", points)
        aabb = aabb or box_around(points)
        grid = cls(aabb, config, step_size=step_size or aabb.diagonal / 1024.0).to(points.device)
        grid.set_occupied(dilate(cells_with_points(points, aabb, grid.config.resolution, grid.config.levels), margin))
        return grid

    @classmethod
    def from_mesh(
        cls,
        vertices: Tensor,
        faces: Tensor,
        aabb: Aabb | None = None,
        config: GridConfig | None = None,
        *,
        step_size: float | None = None,
        margin: int = 1,
        fill: bool = False,
    ) -> OccupancyGrid:
        """Occupied along the triangles `vertices[faces]`, and `margin` cells around; with `fill`, inside them too.
        vertices (n, 3), faces (m, 3) int. The rest as in `from_points`. Filling needs a closed surface."""
        vertices = check_points("vertices", vertices)
        aabb = aabb or box_around(vertices)
        grid = cls(aabb, config, step_size=step_size or aabb.diagonal / 1024.0).to(vertices.device)
        surface = cells_with_triangles(vertices, faces, aabb, grid.config.resolution, grid.config.levels)
        grid.set_occupied(dilate(flood_fill(surface) if fill else surface, margin))
        return grid

    @property
    def n_cells(self) -> int:
        return self.thickness.shape[0]

    @property
    def occupancy(self) -> OccupancyBits:
        """The bits as the marching op takes them."""
        return OccupancyBits(self.bits, self.aabb, self.config.resolution, self.config.levels)

    @property
    def outer_aabb(self) -> Aabb:
        return self.aabb.scaled(2.0 ** (self.config.levels - 1))

    def occupied_fraction(self) -> Tensor:
        """() share of occupied cells, on the device."""
        return unpack_bits(self.bits).float().mean()

    def alpha_threshold(self, alpha_thre: float) -> Tensor | float:
        """The alpha below which a sample may be skipped: never more than half the grid's mean thickness, because a
        young field is thin everywhere, and skipping all of it would end its training."""
        return alpha_thre if alpha_thre <= 0.0 else (self.mean * 0.5).clamp(max=alpha_thre)

    def cell_positions(self, cells: Tensor, fraction: Tensor | float = 0.5) -> Tensor:
        """(n, 3) world position inside each cell (n,) int64; fraction 0.5 is its centre."""
        r = self.config.resolution
        xyz = torch.stack([cells // (r * r) % r, cells // r % r, cells % r], dim=-1)
        level = cells // r**3
        unit = (xyz + fraction) * (2.0 / r) - 1.0
        low, high = self.aabb.tensor(cells.device)
        return (low + high) * 0.5 + unit * (high - low) * 0.5 * torch.pow(2.0, level.float())[:, None]

    def _sampled_cells(self, step: int | Tensor) -> Tensor:
        """A quarter of the cells anywhere and a quarter among the occupied ones, with repeats."""
        n = max(1, self.n_cells // 4)
        words = random_bits(n, columns=2, seed=self.seed, stream=Stream.GRID_CELLS, step=step, device=self.bits.device)
        words = words.long() & 0xFFFFFFFF
        anywhere = (words[:, 0] * self.n_cells) >> 32
        ranks = torch.cumsum(unpack_bits(self.bits), 0)
        wanted = (words[:, 1] * ranks[-1]) >> 32
        return torch.cat([anywhere, torch.searchsorted(ranks, wanted, right=True).clamp(max=self.n_cells - 1)])

    @torch.no_grad()
    def update(
        self, step: int | Tensor, density_fn: DensityFn, *, all_cells: bool | None = None, team: CellTeam | None = None
    ) -> None:
        """Refresh cells from the field: all of them while warming up (or when asked), a sampled half later.
        `density_fn(positions)` gives densities (n,); with `moments` in the config it is `density_fn(positions, times)`.
        With a `team` each process evaluates its part of the cells, and all of them take over the same values."""
        if all_cells is None:
            all_cells = int(step) < self.warmup_steps
        cells = self.cells_to_refresh(step, all_cells=all_cells)
        rank, world = (0, 1) if team is None else (team.rank, team.world)
        fresh = self.fresh_part(step, density_fn, cells, rank=rank, world=world)
        if team is not None and not team.alone:
            team.max_reduce(fresh)
        self.take_over(cells, fresh, guard=all_cells)

    def cells_to_refresh(self, step: int | Tensor, *, all_cells: bool) -> Tensor:
        """(n,) int64, the cells of one update: the same on every process."""
        return torch.arange(self.n_cells, device=self.bits.device) if all_cells else self._sampled_cells(step)

    def _fresh(self, step: int | Tensor, density_fn: DensityFn, cells: Tensor, first: int) -> Tensor:
        """(n,) thickness at a random place in each cell; `first` is the index of the first one in the update."""
        dtype, n_moments = self.thickness.dtype, self.config.moments  # fp32; float64 for checking
        draw = partial(random_uniform, cells.shape[0], seed=self.seed, step=step, first=first, device=cells.device)
        positions = self.cell_positions(cells, draw(columns=3, stream=Stream.GRID_JITTER).to(dtype))
        if not n_moments:
            return density_fn(positions).to(dtype) * self.step_size
        moments = draw(columns=n_moments, stream=Stream.GRID_TIMES).to(dtype)
        times = ((moments[:, part] + part) / n_moments for part in range(n_moments))  # one in each equal part of [0, 1)
        return torch.stack([density_fn(positions, when).to(dtype) for when in times]).amax(0) * self.step_size

    @torch.no_grad()
    def fresh_part(self, step: int | Tensor, density_fn: DensityFn, cells: Tensor, *, rank: int, world: int) -> Tensor:
        """(n,) this rank's part of the fresh thickness, -inf elsewhere: the maximum over ranks is all of it."""
        n = cells.shape[0]
        fresh = torch.full((n,), -torch.inf, dtype=self.thickness.dtype, device=cells.device)
        first, last = n * rank // world, n * (rank + 1) // world
        for start in range(first, last, CHUNK):
            end = min(start + CHUNK, last)
            value = self._fresh(step, density_fn, cells[start:end], start)
            check_shape("fresh", value, (end - start,))
            fresh[start:end] = torch.where(torch.isfinite(value), value, -torch.inf)
        return fresh

    @torch.no_grad()
    def take_over(self, cells: Tensor, fresh: Tensor, *, guard: bool) -> None:
        """The second half of an update; `fresh` (n,) is ignored where it is not finite."""
        for start in range(0, cells.shape[0], CHUNK):  # as one process does: a cell that two chunks hold decays twice
            part = slice(start, start + CHUNK)
            decay_and_max(self.thickness, cells[part], fresh[part], self.config.decay)
        self.recall(guard=guard)

    @torch.no_grad()
    def recall(self, *, guard: bool = False) -> None:
        """Occupied is what was learned, whatever was hidden since; `guard` keeps a young grid from collapsing."""
        self.mean.copy_(threshold_bits(self.thickness, self.bits, self.threshold))
        if guard:
            # A grid that empties while the field is young never recovers: nothing would be sampled, nothing learned.
            visible = self.thickness >= 0.0
            collapsed = unpack_bits(self.bits).sum() < MIN_OCCUPIED * visible.sum()
            self.bits.copy_(torch.where(collapsed, pack_bits(visible), self.bits))

    @torch.no_grad()
    def mark_invisible(self, frusta: Frusta, near: float) -> float:
        """Give up the cells that no pinhole camera sees beyond `near`; returns the share given up. A cell counts as
        seen when a sphere around it touches the frustum."""
        chunk = CHUNK if self.bits.device.type == "cpu" else 8 * CHUNK  # on a GPU launches take the time
        return self.mark_unseen(self._spheres, frusta, near, chunk)

    def _spheres(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Centres (n, 3) and radii (n,) of spheres around cells (n,)."""
        r = self.config.resolution
        return self.cell_positions(cells), max(self.aabb.size) / r * 0.87 * torch.pow(2.0, (cells // r**3).float())

    def mark_unseen(
        self, spheres: Callable[[Tensor], tuple[Tensor, Tensor]], frusta: Frusta, near: float, chunk: int
    ) -> float:
        """`mark_invisible` by the centres and radii that `spheres` gives of `chunk` cells at a time."""
        parts = torch.arange(self.n_cells, device=self.bits.device).split(chunk)
        seen = torch.cat([seen_by_any(*spheres(cells), frusta, near) for cells in parts])
        if not seen.any():
            warnings.warn("no camera sees any cell of the grid: the box and the cameras do not fit", stacklevel=3)
            return 1.0
        return self.give_up(~seen)

    @torch.no_grad()
    def give_up(self, cells: Tensor) -> float:
        """Cells (n_cells,) bool that never become occupied; returns the share of all such cells."""
        self.thickness.masked_fill_(cells.to(self.thickness.device), -1.0)
        self.bits.copy_(pack_bits(self.thickness >= 0.0))
        return (self.thickness < 0.0).float().mean().item()

    @torch.no_grad()
    def set_occupied(self, occupied: Tensor) -> None:
        """Set the grid by hand: (levels, resolution, resolution, resolution) bool, or the same flattened. The cells are
        as good as learned: `update` goes on from there."""
        r = self.config.resolution
        if occupied.numel() != self.n_cells:
            raise InputError("occupied", f"shape {(self.config.levels, r, r, r)}", str(tuple(occupied.shape)))
        flat = occupied.reshape(-1).to(self.bits.device).bool()
        self.thickness.copy_(torch.where(flat, self.threshold * 2.0, 0.0))
        self.bits.copy_(pack_bits(flat))

    def cropped(self, box: Aabb, *, what: str = "box") -> OccupancyGrid:
        """A grid of one level over `box` alone: a cell is occupied where it touches an occupied cell of this one. A box
        outside the scene, or without any occupied cell, is refused with the box that holds the occupied ones."""
        inside = box.intersection(self.outer_aabb)
        occupied = None if inside is None else _touched(self, inside)
        if inside is None or occupied is None or not bool(occupied.any()):
            hint = f"what is occupied lies in {describe_box(occupied_box(self))}"
            raise InputError(what, "a box that holds a part of the scene", describe_box(box), hint)
        config = replace(self.config, levels=1)
        result = OccupancyGrid(inside, config, step_size=self.step_size, seed=self.seed).to(self.bits.device)
        result.bits.copy_(pack_bits(occupied.reshape(-1)))
        result.mean.copy_(self.mean)
        return result


@dataclass(frozen=True)
class MarchSettings:
    """How to place samples; `ray_marching` takes the same names as arguments."""

    near_plane: float = 0.0
    far_plane: float = float("inf")
    render_step_size: float | None = None
    cone_angle: float = 0.0
    early_stop_eps: float = 1e-4
    alpha_thre: float = 0.0


class GridSampler:
    """Marches an occupancy grid: lattice steps in occupied cells. `pruning` is what a training step leaves of them."""

    samples_per_ray, evaluations_per_ray = None, 0

    def __init__(
        self, grid: OccupancyGrid, settings: MarchSettings | None = None, *, pruning: Pruning | None = None
    ) -> None:
        self.grid, self.settings, self.pruning = grid, settings or MarchSettings(), pruning

    @property
    def rule(self) -> StepRule:
        settings = self.settings
        size = settings.render_step_size or self.grid.step_size
        return StepRule(size, settings.near_plane, settings.far_plane, settings.cone_angle)

    @torch.no_grad()
    def sample(
        self, rays: Rays, *, draw: Draw | None = None, n_active: Tensor | None = None, capacity: int | None = None
    ) -> PackedSamples:
        jitter = (draw or Draw()).jitter(rays, 1, Stream.JITTER)[0]
        jitter = None if jitter is None else jitter[:, 0]
        bits, options = self.grid.occupancy, {"jitter": jitter, "capacity": capacity, "n_active": n_active}
        return march(rays.origins, rays.directions, bits, self.rule, **options)

    def alpha_threshold(self, alpha_thre: float) -> Tensor | float:
        return self.grid.alpha_threshold(alpha_thre)

    def cropped(self, box: Aabb, *, what: str = "box") -> GridSampler:
        return GridSampler(self.grid.cropped(box, what=what), self.settings, pruning=self.pruning)

    def refined(self, factor: int) -> GridSampler:
        """The same with steps so many times shorter."""
        if factor == 1:
            return self
        old, step_size = self.settings, self.rule.step_size / factor
        finer = {"cone_angle": old.cone_angle / factor, "alpha_thre": old.alpha_thre / factor}
        return GridSampler(self.grid, replace(old, render_step_size=step_size, **finer), pruning=self.pruning)


def as_sampler(places: Any, settings: MarchSettings | None = None) -> Any:
    """A sampler of whatever places samples: an occupancy grid is marched by `settings`, a sampler stays what it is."""
    if isinstance(places, OccupancyGrid):
        return GridSampler(places, settings)
    if isinstance(places, GridSampler) and settings is not None:
        return GridSampler(places.grid, settings, pruning=places.pruning)
    return places


def cropped(places: Any, box: Aabb | None, *, what: str = "box") -> Any:
    """Whatever places samples, in the box alone (None: everywhere)."""
    if box is None:
        return places
    if isinstance(places, OccupancyGrid | GridSampler):
        return places.cropped(box, what=what)
    return places.cropped(box) if hasattr(places, "cropped") else _Inside(places, box)


class _Inside(nn.Module):
    """The samples of any sampler, cut at the sides of a box: those outside it have no length."""

    def __init__(self, sampler: Any, box: Aabb) -> None:
        super().__init__()
        self._sampler, self._box = sampler, box
        self.samples_per_ray = getattr(sampler, "samples_per_ray", None)

    def sample(self, rays: Rays, *, draw: Draw | None = None) -> PackedSamples:
        samples = self._sampler.sample(rays, draw=draw)
        enter, leave = (side[samples.ray_indices.long()] for side in ray_aabb(rays.origins, rays.directions, self._box))
        starts = samples.t_starts.clamp(min=enter)
        return replace(samples, t_starts=starts, t_ends=torch.maximum(samples.t_ends.clamp(max=leave), starts))


def describe_box(box: Aabb | None) -> str:
    """
    >>> describe_box(Aabb.cube(1.5))
    '(-1.5, -1.5, -1.5) to (1.5, 1.5, 1.5)'
    """
    corners = () if box is None else (box.low, box.high)
    return " to ".join("(" + ", ".join(f"{value:.4g}" for value in one) + ")" for one in corners) or "nothing"


def level_occupancy(grid: OccupancyGrid) -> Tensor:
    """(levels, resolution, resolution, resolution) bool, x first."""
    r = grid.config.resolution
    return unpack_bits(grid.bits).view(grid.config.levels, r, r, r)


def occupied_box(grid: OccupancyGrid) -> Aabb | None:
    """The smallest box of whole cells that holds all occupied ones; None for an empty grid."""
    ends = []
    for level, occupied in enumerate(level_occupancy(grid)):
        cells = occupied.nonzero()
        if len(cells):
            low, high = grid.aabb.scaled(2.0**level).tensor(cells.device, torch.float64)
            ends.append(low + torch.stack([cells.amin(0), cells.amax(0) + 1]) * ((high - low) / grid.config.resolution))
    if not ends:
        return None
    both = torch.stack(ends)  # (levels, low and high, 3)
    return Aabb(tuple(both[:, 0].amin(0).tolist()), tuple(both[:, 1].amax(0).tolist()))


def _touched(grid: OccupancyGrid, box: Aabb) -> Tensor:
    """(r, r, r) bool over the cells of `box`. Levels are united: a coarse cell knows what its fine ones hold."""
    r = grid.config.resolution
    low, high = box.tensor(grid.bits.device, torch.float64)
    edges = low + torch.arange(r + 1, device=low.device)[:, None] * (high - low) / r  # (r + 1, 3)
    touched = torch.zeros(r, r, r, dtype=torch.bool, device=low.device)
    for level, occupied in enumerate(level_occupancy(grid)):
        level_low, level_high = grid.aabb.scaled(2.0**level).tensor(low.device, torch.float64)
        places = (edges - level_low) / (level_high - level_low) * r
        first = (places[:-1] + SLACK).floor().long().clamp(0, r)
        last = (places[1:] - SLACK).ceil().long().clamp(0, r)
        sums = torch.zeros(r + 1, r + 1, r + 1, dtype=torch.int32, device=low.device)
        sums[1:, 1:, 1:] = occupied.int().cumsum(0).cumsum(1).cumsum(2)
        for axis in range(3):  # the count between two planes, axis after axis
            sums = sums.index_select(axis, last[:, axis]) - sums.index_select(axis, first[:, axis])
        touched |= sums > 0
    return touched


def march_scenes(
    rays: Rays, grids: Sequence[OccupancyGrid], scene_indices: Tensor, rule: StepRule, *, jitter: Tensor | None = None
) -> PackedSamples:
    """The samples of each ray in the occupied cells of grids[scene_indices[ray]], in ray order. Not differentiable.
    `scene_indices` (n_rays,) int64. One march per scene, and the numbers of rays per scene are read back once."""
    if tuple(scene_indices.shape) != (len(rays),) or scene_indices.is_floating_point():
        got = f"{tuple(scene_indices.shape)} {scene_indices.dtype}"
        raise InputError("scene_indices", f"whole numbers of shape ({len(rays)},)", got)
    order = torch.argsort(scene_indices, stable=True)
    counts = torch.bincount(scene_indices.long().clamp_min(0), minlength=len(grids)).tolist()
    if len(counts) > len(grids) or bool((scene_indices < 0).any()):
        raise InputError("scene_indices", f"scenes from 0 to {len(grids) - 1}", "others among them")
    marched: list[tuple[Tensor, PackedSamples]] = []  # which rays, and their samples
    for grid, mine in zip(grids, order.split(counts), strict=True):
        if len(mine):
            shift = None if jitter is None else jitter[mine]
            part = march(rays.origins[mine], rays.directions[mine], grid.occupancy, rule, jitter=shift)
            marched.append((mine, part))
    per_ray = torch.zeros(len(rays), dtype=torch.int32, device=rays.device)
    for mine, part in marched:
        per_ray[mine] = part.offsets.diff()
    places = torch.empty(2, sum(part.capacity for _, part in marched), device=rays.device)
    result = PackedSamples.from_counts(per_ray, *places)
    for mine, part in marched:
        own = part.ray_indices.long()
        place = result.offsets[mine[own]] + torch.arange(part.capacity, device=rays.device) - part.offsets[own]
        places[:, place] = torch.stack([part.t_starts, part.t_ends])
    return result
