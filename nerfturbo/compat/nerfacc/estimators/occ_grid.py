"""The occupancy-grid estimator with nerfacc's interface and state, marched and updated by nerfturbo's kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import refuse
from ....ops import compact, march, visibility
from ....ops._checks import check_shape
from ....ops.march import StepRule, decay_and_max
from ....types import PackedSamples
from .._rays import packed_info_of, ray_indices_of, remember, remembered
from ..grid import Grids, Planes, _enlarge_aabb, occupancy_bits, traverse
from ..volrend import render_visibility_from_alpha
from .base import AbstractEstimator

SampleFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # t_starts, t_ends, ray_indices -> densities or opacities
OccFn = Callable[[Tensor], Tensor]  # positions (m, 3) -> optical thickness (m,) or (m, 1)
Functions = tuple[SampleFn | None, SampleFn | None]  # sigma_fn or alpha_fn
Numbers = Sequence[float] | Tensor


def prune(
    samples: PackedSamples, functions: Functions, early_stop_eps: float, alpha_thre: float | Tensor, *, columns: bool
) -> PackedSamples:
    """The samples that light reaches and that are thick enough, as a function of samples (n,) or of columns says."""
    sigma_fn, alpha_fn = functions
    refuse(sigma_fn is not None and alpha_fn is not None, "sigma_fn and alpha_fn", "one of them", "both")
    function = alpha_fn if sigma_fn is None else sigma_fn
    thick = isinstance(alpha_thre, Tensor) or alpha_thre > 0.0
    if function is None or samples.capacity == 0 or not (early_stop_eps > 0.0 or thick):
        return samples
    shape = (samples.capacity, 1) if columns else (samples.capacity,)
    values = function(samples.t_starts.view(shape), samples.t_ends.view(shape), samples.ray_indices.long())
    hint = "squeeze the last dimension" if values.dim() == 2 and not columns else "one value per sample"
    refuse(values.shape != shape, "sigmas or alphas", f"shape {shape}", tuple(values.shape), hint)
    values = values.reshape(-1)
    if sigma_fn is not None:
        keep = visibility(values, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    else:
        info = packed_info_of(samples.offsets)
        keep = (values >= alpha_thre) & render_visibility_from_alpha(values, info, early_stop_eps=early_stop_eps)
    return compact(samples, keep)


class LearningGrid(nn.Module):
    """Grids of cells that are refreshed from a field while it trains: `occs` is a decaying maximum of what it said of
    each cell, -1 where no camera looks; `binaries` says which cells are marched."""

    levels: int = 1
    cells_per_lvl: int
    resolution: Tensor  # (3,) int32
    occs: Tensor  # (levels * cells_per_lvl,)
    binaries: Tensor  # (levels, x, y, z) bool
    grid_coords: Tensor  # (cells_per_lvl, 3) int64, x slowest
    grid_indices: Tensor  # (cells_per_lvl,) int64
    _place: Callable[..., tuple[Tensor, Tensor]]  # points (m, 3) in [0, 1]^3, cells (m,), level -> positions, cells

    def _make_cells(self, roi_aabb: Numbers, resolution: int | Numbers, *, persistent: bool) -> Tensor:
        """Register the buffers of `levels` grids; returns the box (6,)."""
        cells = torch.as_tensor([resolution] * 3 if isinstance(resolution, int) else resolution, dtype=torch.int32)
        box = torch.as_tensor(roi_aabb, dtype=torch.float32)
        refuse(cells.shape != (3,), "resolution", "a number or three of them", resolution)
        refuse(box.shape != (6,), "roi_aabb", "six numbers, low then high corner", tuple(box.shape))
        coords = torch.cartesian_prod(*(torch.arange(int(n)) for n in cells))
        self.cells_per_lvl = coords.shape[0]
        self.register_buffer("resolution", cells)
        self.register_buffer("occs", torch.zeros(self.levels * self.cells_per_lvl))
        self.register_buffer("grid_coords", coords, persistent=persistent)
        self.register_buffer("grid_indices", torch.arange(self.cells_per_lvl), persistent=persistent)
        return box

    def update_every_n_steps(
        self, step: int, occ_eval_fn: OccFn, occ_thre: float = 1e-2, ema_decay: float = 0.95,
        warmup_steps: int = 256, n: int = 16,
    ) -> None:  # fmt: skip
        """Every n-th step, refresh cells from what `occ_eval_fn` says of positions (m, 3). All cells during warm-up;
        later a quarter anywhere and at most as many among the occupied ones. A cell is occupied above min(occ_thre,
        mean of the visible cells)."""
        if not self.training:
            raise RuntimeError("the grid learns only while training: call .train() first, or _update() by hand")
        if step % n == 0:
            self._update(step, occ_eval_fn, occ_thre, ema_decay, warmup_steps)

    @torch.no_grad()
    def _get_all_cells(self) -> list[Tensor]:
        """The visible cells of each level."""
        visible = (self.occs >= 0.0).view(self.levels, -1)
        return [self.grid_indices[visible[level]] for level in range(self.levels)]

    @torch.no_grad()
    def _sample_uniform_and_occupied_cells(self, n: int) -> list[Tensor]:
        """For each level: n cells anywhere, less those that no camera sees, and at most n occupied ones."""
        result = []
        for occs, binary in zip(self.occs.view(self.levels, -1), self.binaries, strict=True):
            anywhere = torch.randint(occs.shape[0], (n,), device=occs.device)
            occupied = torch.nonzero(binary.flatten())[:, 0]
            if n < occupied.shape[0]:
                occupied = occupied[torch.randint(occupied.shape[0], (n,), device=occs.device)]
            result.append(torch.cat([anywhere[occs[anywhere] >= 0.0], occupied]))
        return result

    @torch.no_grad()
    def _update(
        self, step: int, occ_eval_fn: OccFn, occ_thre: float = 0.01, ema_decay: float = 0.95, warmup_steps: int = 256
    ) -> None:
        warm = step < warmup_steps
        cells = self._get_all_cells() if warm else self._sample_uniform_and_occupied_cells(self.cells_per_lvl // 4)
        for level, indices in enumerate(cells):
            if indices.shape[0]:
                inside = torch.rand(indices.shape[0], 3, device=self.occs.device)
                unit = (self.grid_coords[indices] + inside) / self.resolution
                positions, asked = self._place(unit, indices, level)
                fresh = occ_eval_fn(positions).reshape(-1)
                decay_and_max(self.occs, level * self.cells_per_lvl + asked, fresh.float(), ema_decay)
        mean = self._mean()
        self.binaries = (self.occs > mean.clamp(max=occ_thre)).view(self.binaries.shape)
        self.occs.add_(0.0)  # a kernel's write does not count for torch; this one ends what was remembered of it
        remember(self.occs, "mean", mean)

    def _mean(self) -> Tensor:
        """() mean thickness of the visible cells."""
        visible = self.occs >= 0.0
        return (self.occs * visible).sum() / visible.sum().clamp_min(1)


class OccGridEstimator(LearningGrid, AbstractEstimator):
    """`levels` nested grids; level l covers `roi_aabb` scaled by 2^l. Buffers are those of nerfacc's checkpoints."""

    DIM: int = 3

    aabbs: Tensor  # (levels, 6)

    def __init__(self, roi_aabb: Numbers, resolution: int | Numbers = 128, levels: int = 1, **kwargs: Any) -> None:
        super().__init__()
        hint = "OccupancyGrid has contraction_type; OccGridEstimator has levels" if "contraction_type" in kwargs else ""
        refuse(bool(kwargs), "OccGridEstimator", "roi_aabb, resolution and levels", ", ".join(kwargs), hint)
        self.levels = levels
        box = self._make_cells(roi_aabb, resolution, persistent=False)
        self.register_buffer("aabbs", torch.stack([_enlarge_aabb(box, 2.0**level) for level in range(levels)]))
        self.register_buffer("binaries", torch.zeros([levels, *self.resolution.tolist()], dtype=torch.bool))

    def _place(self, unit: Tensor, cells: Tensor, level: int) -> tuple[Tensor, Tensor]:
        low, high = self.aabbs[level].split(3)
        return low + unit * (high - low), cells

    @torch.no_grad()
    def sampling(
        self, rays_o: Tensor, rays_d: Tensor, sigma_fn: SampleFn | None = None, alpha_fn: SampleFn | None = None,
        near_plane: float = 0.0, far_plane: float = 1e10, t_min: Tensor | None = None, t_max: Tensor | None = None,
        render_step_size: float = 1e-3, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0,
        stratified: bool = False, cone_angle: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """ray_indices, t_starts, t_ends (n_samples,) in occupied cells, ray after ray. Not differentiable. With
        `sigma_fn` or `alpha_fn`, samples that hardly any light reaches (transmittance below `early_stop_eps`) and thin
        ones (alpha below `alpha_thre`, but at most the mean of the visible `occs`) are left out. `t_min` and `t_max`
        (n_rays,) narrow the planes for each ray."""
        rays_o, rays_d = rays_o.detach(), rays_d.detach()
        n_rays, device = rays_o.shape[0], rays_o.device
        jitter = torch.rand(n_rays, device=device) if stratified else None
        occupancy = occupancy_bits(Grids(self.binaries, self.aabbs))
        if occupancy is not None and t_min is None and t_max is None and n_rays and near_plane >= 0.0:
            # The common case asks for nothing per ray but the jitter.
            rule = StepRule(render_step_size, near_plane, far_plane, cone_angle)
            samples = march(rays_o.float().contiguous(), rays_d.float().contiguous(), occupancy, rule, jitter=jitter)
        else:
            near, far = (torch.full((n_rays,), plane, device=device) for plane in (near_plane, far_plane))
            near = near if t_min is None else torch.maximum(near, t_min)
            far = far if t_max is None else torch.minimum(far, t_max)
            near = near if jitter is None else near + jitter * render_step_size
            grids = Grids(self.binaries.to(device), self.aabbs.to(device))
            samples, _ = traverse(rays_o, rays_d, grids, Planes(near, far, render_step_size, cone_angle))
        threshold: float | Tensor = alpha_thre
        if alpha_thre > 0.0:  # kept on the device: reading the mean would wait for it
            threshold = remembered(self.occs, "mean", self._mean).to(device).clamp(max=alpha_thre)
        samples = prune(samples, (sigma_fn, alpha_fn), early_stop_eps, threshold, columns=False)
        return ray_indices_of(samples), samples.t_starts, samples.t_ends

    @torch.no_grad()
    def mark_invisible_cells(
        self, K: Tensor, c2w: Tensor, width: int, height: int, near_plane: float = 0.0, chunk: int = 32**3
    ) -> None:
        """Give up cells that no camera sees beyond `near_plane`, or that lie before it: their `occs` become -1.
        K (n, 3, 3) or (1, 3, 3) and c2w (n, 3, 4) or (n, 4, 4) in OpenCV's axes, z forward."""
        check_shape("c2w", c2w[:, :3], ("n", 3, 4))
        check_shape("K", K, ("n" if K.shape[0] == 1 else c2w.shape[0], 3, 3))
        to_camera = c2w[:, :3, :3].transpose(1, 2)
        shift = -to_camera @ c2w[:, :3, 3:]
        for level, indices in enumerate(self._get_all_cells()):
            low, high = self.aabbs[level].split(3)
            for part in indices.split(chunk):
                points = low + self.grid_coords[part] / (self.resolution - 1) * (high - low)
                image = K.to(points) @ (to_camera @ points.T + shift)  # (n, 3, cells)
                depth, pixel = image[:, 2], image[:, :2] / image[:, 2:]
                inside = (depth >= 0.0) & (pixel >= 0.0).all(1) & (pixel[:, 0] < width) & (pixel[:, 1] < height)
                seen, too_near = ((where & inside).any(0) for where in (depth >= near_plane, depth < near_plane))
                self.occs[level * self.cells_per_lvl + part] = torch.where(seen & ~too_near, 0.0, -1.0)
