"""The interface of nerfacc 0.2: `ray_marching` returns `packed_info`, and samples have shape (n_samples, 1). One grid
with a contraction stands where 0.5 has estimators; 0.3 (`nerfacc_indexed`) shares all that here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..ops.march import decay_and_max
from ..ops.positions import fold
from ..types import PackedSamples
from .nerfacc._rays import indices_of, offsets_of_counts, offsets_of_packed_info, packed_info_of
from .nerfacc.estimators.occ_grid import LearningGrid, Numbers, OccFn, SampleFn, cells_of, cells_to_ask, one_of, prune
from .nerfacc.grid import Grids, Planes, cell_values, lattice_samples, traverse
from .nerfacc.grid import ray_aabb_intersect as _boxes_intersect
from .nerfacc.volrend import accumulate_along_rays as _accumulate
from .nerfacc.volrend import render_visibility_from_alpha
from .nerfacc.volrend import render_weight_from_alpha as _weight_from_alpha
from .nerfacc.volrend import render_weight_from_density as _weight_from_density

__all__ = [
    "ContractionType",
    "Grid",
    "OccupancyGrid",
    "__version__",
    "accumulate_along_rays",
    "contract",
    "contract_inv",
    "ray_aabb_intersect",
    "ray_marching",
    "render_visibility",
    "render_weight_from_alpha",
    "render_weight_from_density",
    "rendering",
    "unpack_info",
    "unpack_to_ray_indices",
]

__version__ = "0.2.4"

MOST_STEPS = 1 << 16  # per ray, through contracted space
FAR = 1e10

ColorFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


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
    return fold(unit, "sphere")


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


class OccupancyGrid(Grid, LearningGrid):
    """A grid of decaying maxima `occs`, occupied where they exceed min(occ_thre, their mean)."""

    NUM_DIM: int = 3

    occs: Tensor
    resolution: Tensor
    grid_coords: Tensor
    grid_indices: Tensor

    def __init__(
        self,
        roi_aabb: Numbers,
        resolution: int | Numbers = 128,
        contraction_type: ContractionType = ContractionType.AABB,
    ) -> None:
        super().__init__()
        box, cells, coords = cells_of(roi_aabb, resolution)
        self.num_cells = coords.shape[0]
        self._contraction_type = contraction_type
        self.register_buffer("_roi_aabb", box)
        self.register_buffer("_binary", torch.zeros(cells.tolist(), dtype=torch.bool))
        self.register_buffer("resolution", cells)
        self.register_buffer("occs", torch.zeros(self.num_cells))
        self.register_buffer("grid_coords", coords)
        self.register_buffer("grid_indices", torch.arange(self.num_cells))

    every_n_step = LearningGrid.update_every_n_steps

    @torch.no_grad()
    def _update(
        self, step: int, occ_eval_fn: OccFn, occ_thre: float = 0.01, ema_decay: float = 0.95, warmup_steps: int = 256
    ) -> None:
        cells = self.grid_indices
        if step >= warmup_steps:
            cells = cells_to_ask(self.occs, self._binary, self.num_cells // 4)
        unit = (self.grid_coords[cells] + torch.rand(cells.shape[0], 3, device=self.device)) / self.resolution
        if self._contraction_type == ContractionType.UN_BOUNDED_SPHERE:
            inside = torch.linalg.vector_norm(unit - 0.5, dim=-1) < 0.5
            unit, cells = unit[inside], cells[inside]
        fresh = occ_eval_fn(contract_inv(unit, self._roi_aabb, self._contraction_type)).reshape(-1)
        decay_and_max(self.occs, cells, fresh.float(), ema_decay)
        self._binary = (self.occs > self.occs.mean().clamp(max=occ_thre)).view(self._binary.shape)


def ray_aabb_intersect(rays_o: Tensor, rays_d: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    """t_min, t_max (n_rays,) of one box (6,); both are 1e10 for a ray that misses."""
    t_min, t_max, _ = _boxes_intersect(rays_o, rays_d, aabb.reshape(1, 6), near_plane=0.0, miss_value=FAR)
    return t_min[:, 0], t_max[:, 0]


def marching(returned: Callable[[PackedSamples], Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The `ray_marching` of a version, which `returned` makes its first result of."""

    @torch.no_grad()
    def ray_marching(
        rays_o: Tensor,
        rays_d: Tensor,
        t_min: Tensor | None = None,
        t_max: Tensor | None = None,
        scene_aabb: Tensor | None = None,
        grid: Grid | None = None,
        sigma_fn: SampleFn | None = None,
        alpha_fn: SampleFn | None = None,
        early_stop_eps: float = 1e-4,
        alpha_thre: float = 0.0,
        near_plane: float | None = None,
        far_plane: float | None = None,
        render_step_size: float = 1e-3,
        stratified: bool = False,
        cone_angle: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """packed_info (n_rays, 2) int32 or, in 0.3, ray_indices (n_samples,) int64; t_starts and t_ends (n_samples, 1).

        `t_min` and `t_max` (n_rays,) rule; without them the ray's part in `scene_aabb` (6,), else all of it; always
        within the planes, and only where the grid, if there is one, is occupied. With `sigma_fn` or `alpha_fn`,
        samples that no light reaches are left out. Not differentiable.
        """
        if t_min is None or t_max is None:
            t_min, t_max = torch.zeros_like(rays_o[:, 0]), torch.full_like(rays_o[:, 0], FAR)
            if scene_aabb is not None:
                t_min, t_max = ray_aabb_intersect(rays_o, rays_d, scene_aabb)
        t_min = t_min if near_plane is None else t_min.clamp_min(near_plane)
        t_max = t_max if far_plane is None else t_max.clamp_max(far_plane)
        if stratified:
            t_min = t_min + torch.rand_like(t_min) * render_step_size
        samples = _march(rays_o, rays_d, grid, Planes(t_min, t_max, render_step_size, cone_angle))
        samples = prune(samples, None, _alphas(sigma_fn, alpha_fn), early_stop_eps, alpha_thre)
        return returned(samples), samples.t_starts[:, None], samples.t_ends[:, None]

    return ray_marching


def _march(rays_o: Tensor, rays_d: Tensor, grid: Grid | None, planes: Planes) -> PackedSamples:
    if grid is not None and grid.contraction_type == ContractionType.AABB:
        return traverse(rays_o, rays_d, Grids(grid.binary[None], grid.roi_aabb[None]), planes)[0]

    def keep(points: Tensor) -> Tensor:
        if grid is None:
            return torch.ones_like(points[..., 0], dtype=torch.bool)
        inside, occupied = cell_values(contract(points, grid.roi_aabb, grid.contraction_type), grid.binary)
        return inside & occupied

    return lattice_samples(rays_o, rays_d, planes, planes.near, planes.far.clamp_max(FAR), keep, MOST_STEPS)


def _alphas(sigma_fn: SampleFn | None, alpha_fn: SampleFn | None) -> SampleFn | None:
    """The opacities (n,) of samples (n,), from a function of samples (n, 1)."""
    function = one_of(sigma_fn, alpha_fn)
    if function is None:
        return None

    def alphas(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
        starts, ends = t_starts[:, None], t_ends[:, None]
        values = _checked(function(starts, ends, ray_indices), starts)
        return (values if sigma_fn is None else -torch.expm1(-values * (ends - starts)))[:, 0]

    return alphas


def _checked(values: Tensor, t_starts: Tensor) -> Tensor:
    """What a user's function gave, if it is one value (n_samples, 1) a sample."""
    if values.shape != t_starts.shape:
        raise InputError("sigmas or alphas", f"shape {tuple(t_starts.shape)}", str(tuple(values.shape)))
    return values


ray_marching = marching(lambda samples: packed_info_of(samples.offsets).int())


def unpack_info(packed_info: Tensor, n_samples: int | None = None) -> Tensor:
    """(n_samples,) int64 ray of each sample."""
    total = int(packed_info[:, 1].sum()) if n_samples is None else n_samples
    return indices_of(offsets_of_packed_info(packed_info, total), total)


unpack_to_ray_indices = unpack_info


def rendering(
    packed_info: Tensor,
    t_starts: Tensor,
    t_ends: Tensor,
    rgb_sigma_fn: ColorFn | None = None,
    rgb_alpha_fn: ColorFn | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    render_bkgd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Colours (n_rays, channels), opacities and depths (n_rays, 1); depth is not divided by the opacity.

    The functions take (t_starts (n, 1), t_ends (n, 1), ray_indices (n,)) and return colours (n, channels) and
    densities or opacities (n, 1). Differentiable to what they return.
    """
    if callable(packed_info):
        raise InputError("packed_info", "a tensor, as the first argument", "a function: 0.3 has another order")
    n_rays, indices = packed_info.shape[0], unpack_info(packed_info, t_starts.shape[0])
    fns, thresholds = (rgb_sigma_fn, rgb_alpha_fn), (early_stop_eps, alpha_thre)
    return render_pixels(fns, t_starts, t_ends, indices, n_rays, render_bkgd, thresholds)


def render_pixels(
    functions: tuple[ColorFn | None, ColorFn | None],
    t_starts: Tensor,
    t_ends: Tensor,
    ray_indices: Tensor,
    n_rays: int,
    background: Tensor | None,
    thresholds: tuple[float, float] = (-FAR, -FAR),
) -> tuple[Tensor, Tensor, Tensor]:
    """`rendering` of both versions; samples behind the first threshold or thinner than the second have no weight."""
    sigma_fn, alpha_fn = functions
    function = alpha_fn if sigma_fn is None else sigma_fn
    if function is None:
        raise InputError("rgb_sigma_fn", "a function, or one as rgb_alpha_fn", "neither")
    rgbs, values = function(t_starts, t_ends, ray_indices)
    alphas = _checked(values, t_starts)[:, 0]
    if sigma_fn is not None:
        flat = t_starts[:, 0], t_ends[:, 0], values[:, 0]
        weights, trans, alphas = _weight_from_density(*flat, None, ray_indices, n_rays)
    else:
        weights, trans = _weight_from_alpha(alphas, None, ray_indices, n_rays)
    weights = torch.where((trans >= thresholds[0]) & (alphas >= thresholds[1]), weights, 0.0)
    colors, opacities, depths = (
        accumulate_along_rays(weights, ray_indices, value, n_rays) for value in (rgbs, None, (t_starts + t_ends) * 0.5)
    )
    return colors if background is None else colors + background * (1.0 - opacities), opacities, depths


def accumulate_along_rays(
    weights: Tensor, ray_indices: Tensor, values: Tensor | None = None, n_rays: int | None = None
) -> Tensor:
    """(n_rays, channels): the sum over each ray of weights (n,) times values (n, channels), or of the weights."""
    if n_rays is None:
        n_rays = int(ray_indices.max()) + 1 if ray_indices.numel() else 0
    return _accumulate(weights, values, ray_indices.long(), n_rays)


def render_weight_from_density(
    packed_info: Tensor,
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
) -> Tensor:
    """(n_samples,) weights; none for samples thinner than `alpha_thre` or behind `early_stop_eps`."""
    flat = t_starts.flatten(), t_ends.flatten(), sigmas.flatten()
    weights, trans, alphas = _weight_from_density(*flat, packed_info=packed_info)
    return torch.where((trans >= early_stop_eps) & (alphas >= alpha_thre), weights, 0.0)


def render_weight_from_alpha(
    packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0
) -> Tensor:
    """(n_samples,) weights; none for samples thinner than `alpha_thre` or behind `early_stop_eps`."""
    weights, trans = _weight_from_alpha(alphas.flatten(), packed_info=packed_info)
    return torch.where((trans >= early_stop_eps) & (alphas.flatten() >= alpha_thre), weights, 0.0)


@torch.no_grad()
def render_visibility(
    packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(n_samples,) bool, and the packed_info of the samples it keeps."""
    keep = render_visibility_from_alpha(alphas.flatten(), packed_info, None, None, early_stop_eps, alpha_thre)
    indices = unpack_info(packed_info, keep.shape[0])[keep]
    counts = torch.bincount(indices, minlength=packed_info.shape[0])
    return keep, packed_info_of(offsets_of_counts(counts)).to(packed_info.dtype)
