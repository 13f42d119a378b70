"""An occupancy grid over all of space: the cells divide the contracted cube or ball evenly. Far cells are large, as far
steps are: one grid of one level covers what else takes nested ones. Cells are no boxes in space, so rays are not walked
from cell to cell: every step of a fixed lattice looks at the cell it is in."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..config import GridConfig
from ..ops._checks import refuse
from ..ops.march.reference import is_occupied
from ..ops.packed import compact
from ..ops.positions import Contraction, sample_positions, unfold
from ..types import Aabb, PackedSamples, Rays
from .grid import CHUNK, CellTeam, Frusta, OccupancyGrid
from .histograms import RaySpan
from .sampler import DensityFn, Draw, Pruning
from .uniform import UniformEstimator, even_edges, packed

CANDIDATES = 1 << 23  # lattice steps that a training step may look at
_END = 1e-3  # of the cube: a cell at its border reaches infinitely far and is asked just before
_UNIT = Aabb((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class ContractedGrid(UniformEstimator):
    """`cells` of resolution^3 over the folded space around a box; `steps` lattice steps on every ray of the span.

    >>> grid = ContractedGrid(Aabb.cube(1.0), GridConfig(resolution=8), steps=64, span=RaySpan(near=0.0, far=100.0))
    >>> grid.update(0, lambda positions: 50.0 * (positions[:, 2] > 2.0))  # dense beyond z = 2, to the end of space
    >>> rays = Rays(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]))
    >>> samples = grid.sample(rays)
    >>> bool(samples.midpoints().min() > 2.0), samples.packed_info[1, 1].item()
    (True, 0)
    """

    def __init__(
        self,
        aabb: Aabb,
        config: GridConfig | None = None,
        *,
        steps: int,
        span: RaySpan,
        contraction: Contraction = "cube",
        pruning: Pruning | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(steps, span)
        self.pruning = pruning
        refuse(contraction == "none", "contraction", '"sphere" or "cube"', repr(contraction), "OccupancyGrid has boxes")
        self.aabb = aabb
        self.contraction: Contraction = contraction
        step_size = 4.0 * span.unit / steps  # of the lattice inside the box, where "mixed" has half of its steps
        one_level = replace(config or GridConfig(), levels=1)
        self.cells = OccupancyGrid(_UNIT, one_level, step_size=step_size, seed=seed)
        if contraction == "sphere":  # no point of space comes to the corners of the cube
            centers = self.cells.cell_positions(torch.arange(self.cells.n_cells))
            nearest = ((centers - 0.5).abs() - 0.5 / one_level.resolution).clamp(min=0.0)
            self.cells.give_up(nearest.norm(dim=-1) >= 0.5)

    @property
    def samples_per_ray(self) -> int | None:
        """Rays differ: only steps in occupied cells are samples."""
        return None

    @property
    def evaluations_per_ray(self) -> int:
        return self.n_samples

    def alpha_threshold(self, alpha_thre: float) -> Tensor | float:
        return self.cells.alpha_threshold(alpha_thre)

    def max_rays(self, batch_samples: int) -> int:
        return max(1, CANDIDATES // self.n_samples)

    def world_positions(self, cells: Tensor, fraction: Tensor | float = 0.5) -> Tensor:
        """(n, 3) a place inside each cell (n,), as `OccupancyGrid.cell_positions`."""
        return self._world(self.cells.cell_positions(cells, fraction))

    def _world(self, folded: Tensor) -> Tensor:
        low, high = self.aabb.tensor(folded.device, folded.dtype)
        middle, order = folded - 0.5, 2.0 if self.contraction == "sphere" else float("inf")
        size = torch.linalg.vector_norm(middle, ord=order, dim=-1, keepdim=True)
        limit = (0.5 - _END) / size.clamp(min=1e-9)  # nothing maps to the border and beyond
        return low + unfold(middle * limit.clamp(max=1.0) + 0.5, self.contraction) * (high - low)

    @torch.no_grad()
    def update(
        self, step: int | Tensor, density_fn: DensityFn, *, all_cells: bool | None = None, team: CellTeam | None = None
    ) -> None:
        """Refresh cells from the field, as `OccupancyGrid.update` does; thickness is that of the lattice's steps."""

        def thickness(folded: Tensor) -> Tensor:
            positions = self._world(folded)
            away = (positions - self.aabb.tensor(positions.device).mean(0)).norm(dim=-1) / self.span.unit
            return density_fn(positions) * (away.clamp(min=1.0).square() if self.span.warp != "uniform" else 1.0)

        self.cells.update(step, thickness, all_cells=all_cells, team=team)

    @torch.no_grad()
    def mark_invisible(self, frusta: Frusta, near: float) -> float:
        """Give up the cells that no camera sees beyond `near`; returns the share given up."""
        middle = self.aabb.tensor(self.cells.bits.device).mean(0)
        away = float((frusta.camera_to_world[:, :, 3] - middle).norm(dim=-1).max())
        return self.cells.mark_unseen(partial(self._spheres, away=away), frusta, near, CHUNK // 8)

    def _spheres(self, cells: Tensor, away: float) -> tuple[Tensor, Tensor]:
        """Centres (n, 3) and radii (n,): what any camera up to `away` from the middle of the box sees of a cell,
        it sees through the sphere.

        Outer cells reach very far, but all along one direction: a sphere as wide as the cell at the distance of its
        centre will do, if it is larger by what looking from beside the middle can shift a line of sight there.
        """
        middle = self.aabb.tensor(cells.device).mean(0)
        corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], device=cells.device)] * 3)
        center = self.world_positions(cells)
        distance = (center - middle).norm(dim=-1)
        whole, across = torch.zeros_like(distance), torch.zeros_like(distance)
        nearest = distance
        for corner in corners:
            point = self.world_positions(cells, corner)
            length = (point - middle).norm(dim=-1)
            whole = torch.maximum(whole, (point - center).norm(dim=-1))
            level = middle + (point - middle) * (distance / length.clamp(min=1e-9))[:, None]  # as far as the centre
            across = torch.maximum(across, (level - center).norm(dim=-1))
            nearest = torch.minimum(nearest, length)
        shift = away * (distance / (0.8 * nearest).clamp(min=1e-9) - 1.0).clamp(min=1.0)
        return center, torch.minimum(whole, across + shift)

    @torch.no_grad()
    def sample(
        self, rays: Rays, *, draw: Draw | None = None, n_active: Tensor | None = None, capacity: int | None = None
    ) -> PackedSamples:
        """The steps of each ray's lattice whose middle lies in an occupied cell; `capacity` as in `ops.march`."""
        edges = even_edges(len(rays), self.n_samples, (draw or Draw()).jitter(rays, 1)[0], rays.device)
        lattice = packed(edges, self.span.distances(edges, rays), (), n_active)
        space = {"aabb": self.aabb, "contraction": self.contraction}
        folded = sample_positions(rays.origins, rays.directions, lattice, **space)
        keep = is_occupied(self.cells.occupancy, folded) & lattice.used & (lattice.t_ends > lattice.t_starts)
        return compact(lattice, keep, capacity=capacity)
