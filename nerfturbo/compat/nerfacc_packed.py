"""The interface of nerfacc 0.2: `ray_marching` returns `packed_info`, and samples have shape (n_samples, 1).

    import nerfturbo.compat.nerfacc_packed as nerfacc

or, for code that cannot be edited, `nerfturbo.compat.install("nerfacc", package="nerfacc_packed")`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError
from ..types import PackedSamples
from ._old_nerfacc import (
    ContractionType,
    Grid,
    OccupancyGrid,
    contract,
    contract_inv,
    march_rays,
    ray_aabb_intersect,
)
from .nerfacc._rays import indices_of, offsets_of_counts, offsets_of_packed_info, packed_info_of
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

SampleFn = Callable[[Tensor, Tensor, Tensor], Tensor]
ColorFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


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
    """packed_info (n_rays, 2) int32, t_starts and t_ends (n_samples, 1). Not differentiable.

    `t_min` and `t_max` (n_rays,) rule; without them the ray's part in `scene_aabb` (6,), else all of it. With
    `sigma_fn` or `alpha_fn`, samples that no light reaches are left out.
    """
    if sigma_fn is not None and alpha_fn is not None:
        raise InputError("sigma_fn and alpha_fn", "one of them", "both")
    samples = march_rays(
        rays_o, rays_d, t_min, t_max, scene_aabb, grid, near_plane, far_plane, render_step_size, stratified, cone_angle
    )
    samples = drop_invisible(samples, sigma_fn, alpha_fn, early_stop_eps, alpha_thre)
    return packed_info_of(samples.offsets).int(), samples.t_starts[:, None], samples.t_ends[:, None]


def drop_invisible(
    samples: PackedSamples,
    sigma_fn: SampleFn | None,
    alpha_fn: SampleFn | None,
    early_stop_eps: float,
    alpha_thre: float,
) -> PackedSamples:
    """The samples that light reaches, as a function of (t_starts (n, 1), t_ends (n, 1), ray_indices (n,)) says."""
    function = sigma_fn if sigma_fn is not None else alpha_fn
    if function is None or samples.capacity == 0:
        return samples
    starts, ends = samples.t_starts[:, None], samples.t_ends[:, None]
    values = function(starts, ends, samples.ray_indices.long())
    if values.shape != starts.shape:
        raise InputError("sigmas or alphas", f"shape {tuple(starts.shape)}", str(tuple(values.shape)))
    alphas = values if sigma_fn is None else -torch.expm1(-values * (ends - starts))
    info = packed_info_of(samples.offsets)
    keep = render_visibility_from_alpha(
        alphas[:, 0], packed_info=info, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre
    )
    indices = samples.ray_indices[keep]
    offsets = offsets_of_counts(torch.bincount(indices, minlength=samples.n_rays))
    return PackedSamples(samples.t_starts[keep], samples.t_ends[keep], indices, offsets)


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
    function = rgb_sigma_fn if rgb_sigma_fn is not None else rgb_alpha_fn
    if function is None or callable(packed_info):
        raise InputError("rgb_sigma_fn", "packed_info first, and one function of colours", "another order of arguments")
    n_rays, indices = packed_info.shape[0], unpack_info(packed_info, t_starts.shape[0])
    rgbs, values = colors_and_values(function, t_starts, t_ends, indices)
    if rgb_sigma_fn is not None:
        weights = render_weight_from_density(packed_info, t_starts, t_ends, values, early_stop_eps, alpha_thre)
    else:
        weights = render_weight_from_alpha(packed_info, values, early_stop_eps, alpha_thre)
    return sum_pixels(weights, indices, rgbs, (t_starts + t_ends) * 0.5, n_rays, render_bkgd)


def colors_and_values(
    function: ColorFn, t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """What a user's function says of the samples: colours, and densities or opacities (n_samples, 1)."""
    rgbs, values = function(t_starts, t_ends, ray_indices)
    if values.shape != t_starts.shape:
        raise InputError("sigmas or alphas", f"shape {tuple(t_starts.shape)}", str(tuple(values.shape)))
    return rgbs, values


def sum_pixels(
    weights: Tensor, ray_indices: Tensor, rgbs: Tensor, middles: Tensor, n_rays: int, background: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Colours (n_rays, channels), opacities and depths (n_rays, 1) of weights (n_samples,)."""
    colors = accumulate_along_rays(weights, ray_indices, rgbs, n_rays)
    opacities = accumulate_along_rays(weights, ray_indices, None, n_rays)
    depths = accumulate_along_rays(weights, ray_indices, middles, n_rays)
    if background is not None:
        colors = colors + background * (1.0 - opacities)
    return colors, opacities, depths


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
    weights, trans, alphas = _weight_from_density(
        t_starts.flatten(), t_ends.flatten(), sigmas.flatten(), packed_info=packed_info
    )
    return torch.where((trans >= early_stop_eps) & (alphas >= alpha_thre), weights, torch.zeros_like(weights))


def render_weight_from_alpha(
    packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0
) -> Tensor:
    """(n_samples,) weights; none for samples thinner than `alpha_thre` or behind `early_stop_eps`."""
    weights, trans = _weight_from_alpha(alphas.flatten(), packed_info=packed_info)
    kept = (trans >= early_stop_eps) & (alphas.flatten() >= alpha_thre)
    return torch.where(kept, weights, torch.zeros_like(weights))


@torch.no_grad()
def render_visibility(
    packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(n_samples,) bool, and the packed_info of the samples it keeps."""
    keep = render_visibility_from_alpha(
        alphas.flatten(), packed_info=packed_info, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre
    )
    indices = unpack_info(packed_info, keep.shape[0])[keep]
    counts = torch.bincount(indices, minlength=packed_info.shape[0])
    return keep, packed_info_of(offsets_of_counts(counts)).to(packed_info.dtype)
