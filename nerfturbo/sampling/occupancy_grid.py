"""The multi-level occupancy grid: which cells hold anything, learned from the field while it trains.

Each cell keeps a decaying maximum of its optical thickness (density x step size). A cell is occupied above
min(threshold, mean): the mean keeps the grid alive while all densities are still small. Cells that no camera sees hold
-1 and never become occupied. Nothing here waits for the device.

Of a scene that moves (`GridConfig.moments`) a cell keeps the maximum over time: each update looks at it at other random
moments, so that nothing that passes through it is skipped.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config import GridConfig
from ..errors import InputError
from ..ops.march import OccupancyBits, decay_and_max, pack_bits, threshold_bits, unpack_bits
from ..ops.random import Stream, random_bits, random_uniform
from ..types import Aabb
from .estimator import DensityFn
from .from_geometry import box_around, cells_with_points, cells_with_triangles, check_points, filled, grown
from .visible_cells import Frusta, seen_by_any

CHUNK = 1 << 18  # cells evaluated at a time: bounds the memory of an update
MIN_OCCUPIED = 1e-4  # below this share of the cells a warming-up grid counts as collapsed


class CellTeam(Protocol):
    """Processes that refresh one grid together, each its part of the cells; see `nerfturbo.training.distributed`."""

    rank: int
    world: int
    alone: bool

    def max_reduce(self, values: Tensor) -> None: ...


class OccupancyGrid(nn.Module):
    """`levels` nested grids of resolution^3 cells; level l covers the box scaled by 2^l.

    Cell (level, x, y, z) is number ((level * r + x) * r + y) * r + z. A new grid is occupied everywhere; `update`
    learns it from a field, `set_occupied`, `from_points` and `from_mesh` from what is known already.

    >>> grid = OccupancyGrid(Aabb.cube(1.0), GridConfig(resolution=4), step_size=0.1)
    >>> grid.update(0, lambda positions: 50.0 * (positions[:, 0] > 0.0))  # a field that is dense for x > 0
    >>> grid.occupied_fraction().item()
    0.5
    """

    thickness: Tensor  # (levels * resolution^3,) fp32, -1 where no camera looks
    bits: Tensor  # (levels * resolution^3 / 32,) int32
    mean: Tensor  # () fp32, mean thickness of visible cells

    def __init__(self, aabb: Aabb, config: GridConfig | None = None, *, step_size: float, seed: int = 0) -> None:
        super().__init__()
        self.aabb, self.config, self.step_size, self.seed = aabb, config or GridConfig(), step_size, seed
        n_cells = self.config.levels * self.config.resolution**3
        self.register_buffer("thickness", torch.zeros(n_cells))
        self.register_buffer("bits", torch.full((n_cells // 32,), -1, dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(()))
        if not 0 <= self.config.moments <= 4:
            raise InputError("grid.moments", "0 to 4", str(self.config.moments))
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
        """Occupied where points (n, 3) lie, and `margin` cells around: a reconstruction's points, a scan.

        Without a box it is the cube around the points; without a step size, a 1024th of the box's diagonal.

        >>> grid = OccupancyGrid.from_points(torch.zeros(1, 3), Aabb.cube(1.0), GridConfig(resolution=8))
        >>> int(grid.occupied_fraction() * grid.n_cells)  # the point's cell and its 26 neighbours
        27
        """
        points = check_points("points", points)
        aabb = aabb or box_around(points)
        grid = cls(aabb, config, step_size=step_size or aabb.diagonal / 1024.0).to(points.device)
        occupied = cells_with_points(points, aabb, grid.config.resolution, grid.config.levels)
        grid.set_occupied(grown(occupied, margin))
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

        vertices (n, 3), faces (m, 3) int. The rest as in `from_points`. Filling needs a closed surface.
        """
        vertices = check_points("vertices", vertices)
        aabb = aabb or box_around(vertices)
        grid = cls(aabb, config, step_size=step_size or aabb.diagonal / 1024.0).to(vertices.device)
        surface = cells_with_triangles(vertices, faces, aabb, grid.config.resolution, grid.config.levels)
        grid.set_occupied(grown(filled(surface) if fill else surface, margin))
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
        occupied = torch.searchsorted(ranks, wanted, right=True).clamp(max=self.n_cells - 1)
        return torch.cat([anywhere, occupied])

    @torch.no_grad()
    def update(
        self,
        step: int | Tensor,
        density_fn: DensityFn,
        *,
        all_cells: bool | None = None,
        team: CellTeam | None = None,
    ) -> None:
        """Refresh cells from the field: all of them while warming up (or when asked), a sampled half later.

        `density_fn(positions)` gives densities (n,); with `moments` in the config it is `density_fn(positions, times)`.
        With a `team` each process evaluates its part of the cells, and all of them take over the same values.
        """
        if all_cells is None:
            all_cells = int(step) < self.config.warmup_steps
        cells = self.cells_to_refresh(step, all_cells=all_cells)
        if team is None or team.alone:
            for start in range(0, cells.shape[0], CHUNK):
                part = cells[start : start + CHUNK]
                fresh = self._fresh(step, density_fn, part, start)
                decay_and_max(self.thickness, part, fresh, self.config.decay)
            self._rebuild(guard=all_cells)
            return
        fresh = self.fresh_part(step, density_fn, cells, rank=team.rank, world=team.world)
        team.max_reduce(fresh)
        self.take_over(cells, fresh, guard=all_cells)

    def cells_to_refresh(self, step: int | Tensor, *, all_cells: bool) -> Tensor:
        """(n,) int64, the cells of one update: the same on every process."""
        return torch.arange(self.n_cells, device=self.bits.device) if all_cells else self._sampled_cells(step)

    def _fresh(self, step: int | Tensor, density_fn: DensityFn, cells: Tensor, first: int) -> Tensor:
        """(n,) thickness at a random place in each cell; `first` is the index of the first one in the update."""
        fraction = random_uniform(
            cells.shape[0],
            columns=3,
            seed=self.seed,
            stream=Stream.GRID_JITTER,
            step=step,
            first=first,
            device=cells.device,
        )
        dtype = self.thickness.dtype  # fp32; float64 for checking
        positions = self.cell_positions(cells, fraction.to(dtype))
        if not self.config.moments:
            return density_fn(positions).to(dtype) * self.step_size
        densities = [density_fn(positions, times).to(dtype) for times in self._moments(step, cells, first)]
        return torch.stack(densities).amax(0) * self.step_size

    def _moments(self, step: int | Tensor, cells: Tensor, first: int) -> list[Tensor]:
        """Times (n,) at which to look at each cell: one in each of `moments` equal parts of [0, 1), at random."""
        n_moments = self.config.moments
        draw = random_uniform(
            cells.shape[0],
            columns=n_moments,
            seed=self.seed,
            stream=Stream.GRID_TIMES,
            step=step,
            first=first,
            device=cells.device,
        ).to(self.thickness.dtype)
        return [(draw[:, part] + part) / n_moments for part in range(n_moments)]

    @torch.no_grad()
    def fresh_part(self, step: int | Tensor, density_fn: DensityFn, cells: Tensor, *, rank: int, world: int) -> Tensor:
        """(n,) this rank's part of the fresh thickness, -inf elsewhere: the maximum over ranks is all of it."""
        n = cells.shape[0]
        fresh = torch.full((n,), -torch.inf, dtype=self.thickness.dtype, device=cells.device)
        first, last = n * rank // world, n * (rank + 1) // world
        for start in range(first, last, CHUNK):
            end = min(start + CHUNK, last)
            value = self._fresh(step, density_fn, cells[start:end], start)
            fresh[start:end] = torch.where(torch.isfinite(value), value, -torch.inf)
        return fresh

    @torch.no_grad()
    def take_over(self, cells: Tensor, fresh: Tensor, *, guard: bool) -> None:
        """The second half of an update; `fresh` (n,) is ignored where it is not finite."""
        for start in range(0, cells.shape[0], CHUNK):  # as one process does: a cell that two chunks hold decays twice
            part = slice(start, start + CHUNK)
            decay_and_max(self.thickness, cells[part], fresh[part], self.config.decay)
        self._rebuild(guard=guard)

    def _rebuild(self, *, guard: bool) -> None:
        self.mean.copy_(threshold_bits(self.thickness, self.bits, self.config.threshold))
        if guard:
            # A grid that empties while the field is young never recovers: nothing would be sampled, nothing learned.
            visible = self.thickness >= 0.0
            occupied = unpack_bits(self.bits).sum()
            collapsed = occupied < MIN_OCCUPIED * visible.sum()
            self.bits.copy_(torch.where(collapsed, pack_bits(visible), self.bits))

    @torch.no_grad()
    def recall(self, *, guard: bool = False) -> None:
        """Occupied again is what was learned, whatever was hidden since."""
        self._rebuild(guard=guard)

    @torch.no_grad()
    def mark_invisible(
        self, camera_to_world: Tensor, focal: Tensor, center: Tensor, size: Tensor, near: float
    ) -> float:
        """Give up the cells that no pinhole camera sees beyond `near`; returns the share given up.

        Poses (n, 3, 4) look along -z with y up. A cell counts as seen when a sphere around it touches the frustum.
        """
        r = self.config.resolution
        seen = torch.zeros(self.n_cells, dtype=torch.bool, device=self.bits.device)
        frusta = Frusta(camera_to_world, focal, center, size)
        half_cell = max(self.aabb.size) / r * 0.87  # radius of the sphere around a cell of level 0
        chunk = CHUNK if seen.device.type == "cpu" else 8 * CHUNK  # on a GPU launches take the time
        for start in range(0, self.n_cells, chunk):
            cells = torch.arange(start, min(start + chunk, self.n_cells), device=self.bits.device)
            points = self.cell_positions(cells)
            radius = half_cell * torch.pow(2.0, (cells // r**3).float())
            seen[cells] = seen_by_any(points, radius, frusta, near)
        if not seen.any():
            warnings.warn("no camera sees any cell of the grid: the box and the cameras do not fit", stacklevel=2)
            return 1.0
        self.thickness[~seen] = -1.0
        self.bits.copy_(pack_bits(self.thickness >= 0.0))
        return 1.0 - seen.float().mean().item()

    @torch.no_grad()
    def set_occupied(self, occupied: Tensor) -> None:
        """Set the grid by hand: (levels, resolution, resolution, resolution) bool, or the same flattened.

        The cells are as good as learned: `update` goes on from there.
        """
        r = self.config.resolution
        if occupied.numel() != self.n_cells:
            raise InputError("occupied", f"shape {(self.config.levels, r, r, r)}", str(tuple(occupied.shape)))
        flat = occupied.reshape(-1).to(self.bits.device).bool()
        self.thickness.copy_(torch.where(flat, self.config.threshold * 2.0, 0.0))
        self.bits.copy_(pack_bits(flat))
