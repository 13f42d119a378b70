"""Marching as nerfacc had it until 0.3: a function, over one grid of cells that may cover contracted space."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import refuse
from ...ops.positions import fold, unfold
from ._rays import ray_indices_of, unpack_info
from .estimators.occ_grid import LearningGrid, Numbers, SampleFn, prune
from .grid import FAR, Grids, Planes, _query, cell_values, lattice_samples, nested_grids, ray_aabb_intersect, traverse

__all__ = ["ContractionType", "Grid", "OccupancyGrid", "contract", "contract_inv", "query_grid", "ray_marching"]

MOST_STEPS = 1 << 16  # per ray, through contracted space
unpack_to_ray_indices = unpack_info  # where 0.2 had it


class ContractionType(Enum):
    """How a grid covers space: its box alone, or everything, contracted by tanh or into a ball."""

    AABB = 0
    UN_BOUNDED_TANH = 1
    UN_BOUNDED_SPHERE = 2

    def to_cpp_version(self) -> "ContractionType":
        """What nerfacc's compiled functions take; here the same."""
        return self


@torch.no_grad()
def contract(x: Tensor, roi: Tensor, type: ContractionType = ContractionType.AABB) -> Tensor:
    """World positions (n, 3) to [0, 1]^3, for the box `roi` (6,)."""
    unit = (x - roi[:3]) / (roi[3:] - roi[:3])
    if type == ContractionType.UN_BOUNDED_TANH:
        return torch.tanh(unit - 0.5) * 0.5 + 0.5
    return unit if type == ContractionType.AABB else fold(unit, "sphere")


@torch.no_grad()
def contract_inv(x: Tensor, roi: Tensor, type: ContractionType = ContractionType.AABB) -> Tensor:
    """The inverse of `contract`."""
    unit = x
    if type == ContractionType.UN_BOUNDED_TANH:
        unit = torch.atanh((x * 2.0 - 1.0).clamp(-1.0 + 1e-6, 1.0 - 1e-6)) + 0.5
    elif type == ContractionType.UN_BOUNDED_SPHERE:
        unit = unfold(x, "sphere")
    return roi[:3] + unit * (roi[3:] - roi[:3])


@torch.no_grad()
def query_grid(samples: Tensor, grid_roi: Tensor, grid_values: Tensor, grid_type: ContractionType) -> Tensor:
    """(n,) values of the cells (x, y, z) that hold positions (n, 3); 0 outside."""
    inside, values = cell_values(contract(samples, grid_roi, grid_type), grid_values)
    return values * inside


class Grid(nn.Module):
    """What marching needs of a grid: `roi_aabb` (6,), `binary` (x, y, z) bool and `contraction_type`. As in nerfacc
    0.4, `binary` may be (levels, x, y, z), of boxes each twice as large as the one before."""

    _roi_aabb: Tensor
    _binary: Tensor
    _contraction_type: ContractionType = ContractionType.AABB

    device: Any = property(lambda self: self._roi_aabb.device)
    roi_aabb: Any = property(lambda self: self._roi_aabb)
    binary: Any = property(lambda self: self._binary)
    contraction_type: Any = property(lambda self: self._contraction_type)

    def query_occ(self, samples: Tensor) -> Tensor:
        """(n,) bool: whether positions (n, 3) lie in occupied cells."""
        if self.binary.dim() == 4 and self.contraction_type == ContractionType.AABB:
            return _query(samples, self.binary, self.roi_aabb)[0]
        return query_grid(samples, self.roi_aabb, self.binary.flatten(0, -3), self.contraction_type)


class OccupancyGrid(Grid, LearningGrid):
    """A grid of decaying maxima `occs`, occupied where they exceed min(occ_thre, their mean). With `levels`, as in
    nerfacc 0.4, several over a box and its doubles, and `binary` is (levels, x, y, z); without, (x, y, z)."""

    NUM_DIM: int = 3

    def __init__(
        self, roi_aabb: Numbers, resolution: int | Numbers = 128,
        contraction_type: ContractionType = ContractionType.AABB, levels: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        most, self.levels = 16 if contraction_type == ContractionType.AABB else 1, levels or 1
        refuse(not 1 <= self.levels <= most, "levels", f"1 to {most} with {contraction_type.name}", levels)
        box = self._make_cells(roi_aabb, resolution, persistent=True)
        self.num_cells, self._contraction_type = self.cells_per_lvl, contraction_type
        self.register_buffer("_roi_aabb", box)
        shape = self.resolution.tolist() if levels is None else [levels, *self.resolution.tolist()]
        self.register_buffer("_binary", torch.zeros(shape, dtype=torch.bool))

    every_n_step = LearningGrid.update_every_n_steps

    @property
    def binaries(self) -> Tensor:
        """(levels, x, y, z) bool, as `OccGridEstimator` has them."""
        return self._binary.view(self.levels, *self._binary.shape[-3:])

    @binaries.setter
    def binaries(self, value: Tensor) -> None:
        self._binary = value.view(self._binary.shape)

    def _place(self, unit: Tensor, cells: Tensor, level: int) -> tuple[Tensor, Tensor]:
        if self._contraction_type == ContractionType.UN_BOUNDED_SPHERE:  # the corners of the cube are no places
            inside = torch.linalg.vector_norm(unit - 0.5, dim=-1) < 0.5
            unit, cells = unit[inside], cells[inside]
        unit = unit if level == 0 else (unit - 0.5) * 2.0**level + 0.5
        return contract_inv(unit, self._roi_aabb, self._contraction_type), cells


@torch.no_grad()
def ray_marching(
    rays_o: Tensor, rays_d: Tensor, t_min: Tensor | None = None, t_max: Tensor | None = None,
    scene_aabb: Tensor | None = None, grid: Grid | None = None, sigma_fn: SampleFn | None = None,
    alpha_fn: SampleFn | None = None, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0,
    near_plane: float | None = None, far_plane: float | None = None, render_step_size: float = 1e-3,
    stratified: bool = False, cone_angle: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """ray_indices (n_samples,) int64, t_starts and t_ends (n_samples, 1), as nerfacc 0.3 returns them. 0.2 returned
    packed_info first. Functions that take it take these ray indices in its place; code that looks inside packed_info
    needs `nerfturbo.compat.nerfacc_packed`. `t_min` and `t_max` (n_rays,) rule; without them the ray's part in
    `scene_aabb` (6,), else all of it; always within the planes, and only where the grid, if there is one, is occupied.
    With `sigma_fn` or `alpha_fn`, samples that no light reaches are left out. Not differentiable."""
    near, far = torch.zeros_like(rays_o[:, 0]), torch.full_like(rays_o[:, 0], FAR)
    if t_min is not None and t_max is not None:
        near, far = t_min, t_max
    elif scene_aabb is not None:
        near, far = ray_aabb_intersect(rays_o, rays_d, scene_aabb)
    near = near if near_plane is None else near.clamp_min(near_plane)
    far = far if far_plane is None else far.clamp_max(far_plane)
    near = near + torch.rand_like(near) * render_step_size if stratified else near
    planes = Planes(near, far, render_step_size, cone_angle)
    if grid is not None and grid.contraction_type == ContractionType.AABB:
        single = grid.binary.dim() == 3
        grids = Grids(grid.binary[None], grid.roi_aabb[None]) if single else nested_grids(grid.binary, grid.roi_aabb)
        samples = traverse(rays_o, rays_d, grids, planes)[0]
    else:
        keep = grid.query_occ if grid is not None else lambda points: torch.ones_like(points[..., 0], dtype=torch.bool)
        samples = lattice_samples(rays_o, rays_d, planes, (near, far.clamp_max(FAR)), keep, MOST_STEPS)
    samples = prune(samples, (sigma_fn, alpha_fn), early_stop_eps, alpha_thre, columns=True)
    return ray_indices_of(samples), samples.t_starts[:, None], samples.t_ends[:, None]
