"""What nerfacc 0.2 and 0.3 had before estimators: one grid with a contraction, and marching through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..ops.march import decay_and_max
from ..types import PackedSamples
from .nerfacc._rays import indices_of, offsets_of_counts
from .nerfacc._traverse import Grids, Planes, lattice_index, lattice_point, traverse
from .nerfacc.grid import ray_aabb_intersect as boxes_intersect

TESTED_AT_ONCE = 1 << 22  # points held in memory at a time
MOST_STEPS = 1 << 16  # per ray, through contracted space
FAR = 1e10


class ContractionType(Enum):
    """How a grid covers space: its box alone, or everything, contracted by tanh or into a ball."""

    AABB = 0
    UN_BOUNDED_TANH = 1
    UN_BOUNDED_SPHERE = 2


@torch.no_grad()
def contract(x: Tensor, roi: Tensor, type: ContractionType = ContractionType.AABB) -> Tensor:
    """World positions (n, 3) to [0, 1]^3, for the box `roi` (6,)."""
    unit = (x - roi[:3]) / (roi[3:] - roi[:3])
    if type == ContractionType.AABB:
        return unit
    if type == ContractionType.UN_BOUNDED_TANH:
        return torch.tanh(unit - 0.5) * 0.5 + 0.5
    ball = unit * 2.0 - 1.0
    size = torch.linalg.vector_norm(ball, dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.where(size <= 1.0, ball, (2.0 - 1.0 / size) * ball / size) * 0.25 + 0.5


@torch.no_grad()
def contract_inv(x: Tensor, roi: Tensor, type: ContractionType = ContractionType.AABB) -> Tensor:
    """The inverse of `contract`."""
    unit = x
    if type == ContractionType.UN_BOUNDED_TANH:
        unit = torch.atanh((x * 2.0 - 1.0).clamp(-1.0 + 1e-6, 1.0 - 1e-6)) + 0.5
    elif type == ContractionType.UN_BOUNDED_SPHERE:
        ball = (x - 0.5) * 4.0
        size = torch.linalg.vector_norm(ball, dim=-1, keepdim=True).clamp_min(1e-12)
        unit = torch.where(size <= 1.0, ball, ball / size / (2.0 - size).clamp_min(1e-6)) * 0.5 + 0.5
    return roi[:3] + unit * (roi[3:] - roi[:3])


class Grid(nn.Module):
    """What marching needs of a grid: `roi_aabb` (6,), `binary` (x, y, z) bool and `contraction_type`."""

    _roi_aabb: Tensor
    _binary: Tensor
    _contraction_type: ContractionType = ContractionType.AABB

    @property
    def device(self) -> torch.device:
        return self._roi_aabb.device

    @property
    def roi_aabb(self) -> Tensor:
        return self._roi_aabb

    @property
    def binary(self) -> Tensor:
        return self._binary

    @property
    def contraction_type(self) -> ContractionType:
        return self._contraction_type


class OccupancyGrid(Grid):
    """A grid of decaying maxima `occs`, occupied where they exceed min(occ_thre, their mean)."""

    NUM_DIM: int = 3

    occs: Tensor
    resolution: Tensor
    grid_coords: Tensor
    grid_indices: Tensor

    def __init__(
        self,
        roi_aabb: Sequence[float] | Tensor,
        resolution: int | Sequence[int] | Tensor = 128,
        contraction_type: ContractionType = ContractionType.AABB,
    ) -> None:
        super().__init__()
        size = [resolution] * self.NUM_DIM if isinstance(resolution, int) else resolution
        cells, box = torch.as_tensor(size, dtype=torch.int32), torch.as_tensor(roi_aabb, dtype=torch.float32)
        if cells.shape != (3,) or box.shape != (6,):
            got = f"{tuple(box.shape)} and {tuple(cells.shape)}"
            raise InputError("roi_aabb and resolution", "six numbers, and one number or three", got)
        shape = cells.tolist()
        self.num_cells = shape[0] * shape[1] * shape[2]
        self._contraction_type = contraction_type
        self.register_buffer("_roi_aabb", box)
        self.register_buffer("_binary", torch.zeros(shape, dtype=torch.bool))
        self.register_buffer("resolution", cells)
        self.register_buffer("occs", torch.zeros(self.num_cells))
        indices = torch.arange(self.num_cells)
        coords = torch.stack([indices // (shape[1] * shape[2]), indices // shape[2] % shape[1], indices % shape[2]], -1)
        self.register_buffer("grid_coords", coords)
        self.register_buffer("grid_indices", indices)

    @torch.no_grad()
    def every_n_step(
        self,
        step: int,
        occ_eval_fn: Callable[[Tensor], Tensor],
        occ_thre: float = 1e-2,
        ema_decay: float = 0.95,
        warmup_steps: int = 256,
        n: int = 16,
    ) -> None:
        """Every n-th step, refresh cells from `occ_eval_fn`, positions (m, 3) -> occupancy (m, 1)."""
        if not self.training:
            raise RuntimeError("the grid learns only while training: call .train() first, or _update() by hand")
        if step % n == 0:
            self._update(step, occ_eval_fn, occ_thre, ema_decay, warmup_steps)

    @torch.no_grad()
    def _update(
        self,
        step: int,
        occ_eval_fn: Callable[[Tensor], Tensor],
        occ_thre: float = 0.01,
        ema_decay: float = 0.95,
        warmup_steps: int = 256,
    ) -> None:
        cells = self.grid_indices
        if step >= warmup_steps:
            number = self.num_cells // 4
            occupied = torch.nonzero(self._binary.flatten())[:, 0]
            if number < occupied.shape[0]:
                occupied = occupied[torch.randint(occupied.shape[0], (number,), device=self.device)]
            cells = torch.cat([torch.randint(self.num_cells, (number,), device=self.device), occupied])
        unit = self.grid_coords[cells] + torch.rand(cells.shape[0], 3, device=self.device)
        unit = unit / self.resolution
        if self._contraction_type == ContractionType.UN_BOUNDED_SPHERE:
            inside = torch.linalg.vector_norm(unit - 0.5, dim=-1) < 0.5
            unit, cells = unit[inside], cells[inside]
        fresh = occ_eval_fn(contract_inv(unit, self._roi_aabb, self._contraction_type)).reshape(-1)
        decay_and_max(self.occs, cells, fresh.float(), ema_decay)
        self._binary = (self.occs > self.occs.mean().clamp(max=occ_thre)).view(self._binary.shape)


def ray_aabb_intersect(rays_o: Tensor, rays_d: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    """t_min, t_max (n_rays,) of one box (6,); both are 1e10 for a ray that misses."""
    t_min, t_max, hit = boxes_intersect(rays_o, rays_d, aabb.reshape(1, 6), near_plane=0.0, miss_value=FAR)
    return torch.where(hit[:, 0], t_min[:, 0], FAR), torch.where(hit[:, 0], t_max[:, 0], FAR)


@torch.no_grad()
def march_rays(
    rays_o: Tensor,
    rays_d: Tensor,
    t_min: Tensor | None,
    t_max: Tensor | None,
    scene_aabb: Tensor | None,
    grid: Grid | None,
    near_plane: float | None,
    far_plane: float | None,
    render_step_size: float,
    stratified: bool,
    cone_angle: float,
) -> PackedSamples:
    """Samples between t_min and t_max: given ones, else where the ray is in `scene_aabb`, else everywhere; always
    within the planes, and only where the grid, if there is one, is occupied."""
    if t_min is None or t_max is None:
        if scene_aabb is not None:
            t_min, t_max = ray_aabb_intersect(rays_o, rays_d, scene_aabb)
        else:
            t_min, t_max = torch.zeros_like(rays_o[:, 0]), torch.full_like(rays_o[:, 0], FAR)
    t_min = t_min if near_plane is None else t_min.clamp_min(near_plane)
    t_max = t_max if far_plane is None else t_max.clamp_max(far_plane)
    if stratified:
        t_min = t_min + torch.rand_like(t_min) * render_step_size
    planes = Planes(t_min, t_max, render_step_size, cone_angle)
    if grid is not None and grid.contraction_type == ContractionType.AABB:
        return traverse(rays_o, rays_d, Grids(grid.binary[None], grid.roi_aabb[None]), planes)[0]
    return _march_contracted(rays_o, rays_d, grid, planes)


def _march_contracted(rays_o: Tensor, rays_d: Tensor, grid: Grid | None, planes: Planes) -> PackedSamples:
    """Every step of every ray, looked up through the contraction; all of them without a grid."""
    step, cone = planes.step_size, planes.cone_angle
    begin = lattice_index(planes.near.clamp_min(0.0), step, cone)
    last = lattice_index(torch.minimum(planes.far, planes.near.new_tensor(FAR)).clamp_min(0.0), step, cone)
    longest = (last - begin)[planes.far > planes.near]
    n_steps = int(longest.max().ceil().item()) if longest.numel() else 0
    if n_steps > MOST_STEPS:
        raise InputError(
            "far_plane", f"at most {MOST_STEPS} steps along a ray", str(n_steps), "give a far_plane or a cone_angle"
        )
    order = torch.arange(n_steps, device=rays_o.device, dtype=rays_o.dtype)
    starts, ends, counts = [rays_o.new_zeros(0)], [rays_o.new_zeros(0)], []
    for rays in torch.arange(rays_o.shape[0], device=rays_o.device).split(max(1, TESTED_AT_ONCE // max(n_steps, 1))):
        index = begin[rays, None] + order
        t0, t1 = lattice_point(index, step, cone), lattice_point(index + 1.0, step, cone)
        middle = (t0 + t1) * 0.5
        keep = middle < planes.far[rays, None]
        if grid is not None:
            size = torch.tensor(grid.binary.shape, device=rays_o.device)
            points = rays_o[rays, None] + rays_d[rays, None] * middle[..., None]
            unit = contract(points, grid.roi_aabb, grid.contraction_type)
            cell = torch.minimum((unit.clamp(0.0, 1.0) * size).long(), size - 1)
            keep &= grid.binary[cell[..., 0], cell[..., 1], cell[..., 2]] & ((unit >= 0.0) & (unit <= 1.0)).all(-1)
        starts.append(t0[keep])
        ends.append(t1[keep])
        counts.append(keep.sum(-1))
    offsets = offsets_of_counts(torch.cat([*counts, torch.zeros(0, dtype=torch.long, device=rays_o.device)]))
    t_starts = torch.cat(starts)
    return PackedSamples(t_starts, torch.cat(ends), indices_of(offsets, t_starts.shape[0]).int(), offsets)
