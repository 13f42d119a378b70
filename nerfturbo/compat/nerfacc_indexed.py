"""The interface of nerfacc 0.3: `ray_marching` returns `ray_indices`, and samples have shape (n_samples, 1).

    import nerfturbo.compat.nerfacc_indexed as nerfacc

or, for code that cannot be edited, `nerfturbo.compat.install("nerfacc", package="nerfacc_indexed")`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..types import PackedSamples
from .nerfacc import pack_info
from .nerfacc._rays import remember
from .nerfacc.volrend import render_transmittance_from_alpha as _trans_from_alpha
from .nerfacc.volrend import render_transmittance_from_density as _trans_from_density
from .nerfacc.volrend import render_visibility_from_alpha
from .nerfacc_packed import (
    ColorFn,
    ContractionType,
    Grid,
    OccupancyGrid,
    accumulate_along_rays,
    checked,
    contract,
    contract_inv,
    marching,
    ray_aabb_intersect,
    sum_pixels,
    unpack_info,
)

__all__ = [
    "ContractionType",
    "Grid",
    "OccupancyGrid",
    "__version__",
    "accumulate_along_rays",
    "contract",
    "contract_inv",
    "pack_info",
    "ray_aabb_intersect",
    "ray_marching",
    "render_transmittance_from_alpha",
    "render_transmittance_from_density",
    "render_visibility",
    "render_weight_from_alpha",
    "render_weight_from_density",
    "rendering",
    "unpack_info",
]

__version__ = "0.3.5"


def _ray_indices(samples: PackedSamples) -> Tensor:
    indices = samples.ray_indices.long()
    remember(indices, "offsets", samples.offsets)
    return indices


ray_marching = marching(_ray_indices)


def rendering(
    t_starts: Tensor,
    t_ends: Tensor,
    ray_indices: Tensor,
    n_rays: int,
    rgb_sigma_fn: ColorFn | None = None,
    rgb_alpha_fn: ColorFn | None = None,
    render_bkgd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Colours (n_rays, channels), opacities and depths (n_rays, 1); depth is not divided by the opacity."""
    function = rgb_sigma_fn if rgb_sigma_fn is not None else rgb_alpha_fn
    if function is None:
        raise InputError("rgb_sigma_fn", "a function, or one as rgb_alpha_fn", "neither")
    rgbs, values = function(t_starts, t_ends, ray_indices)
    checked(values, t_starts)
    if rgb_sigma_fn is not None:
        weights = render_weight_from_density(t_starts, t_ends, values, ray_indices=ray_indices, n_rays=n_rays)
    else:
        weights = render_weight_from_alpha(values, ray_indices=ray_indices, n_rays=n_rays)
    return sum_pixels(weights[:, 0], ray_indices, rgbs, (t_starts + t_ends) * 0.5, n_rays, render_bkgd)


def render_transmittance_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    *,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
) -> Tensor:
    """(n_samples, 1): how much light reaches each sample."""
    starts, ends = t_starts.flatten(), t_ends.flatten()
    return _trans_from_density(starts, ends, sigmas.flatten(), packed_info, ray_indices, n_rays)[0][:, None]


def render_transmittance_from_alpha(
    alphas: Tensor,
    *,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
) -> Tensor:
    """(n_samples, 1): how much light reaches each sample."""
    return _trans_from_alpha(alphas.flatten(), packed_info, ray_indices, n_rays)[:, None]


def render_weight_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    *,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
) -> Tensor:
    """(n_samples, 1): transmittance times opacity."""
    trans = render_transmittance_from_density(
        t_starts, t_ends, sigmas, packed_info=packed_info, ray_indices=ray_indices, n_rays=n_rays
    )
    return trans * -torch.expm1(-sigmas * (t_ends - t_starts))


def render_weight_from_alpha(
    alphas: Tensor,
    *,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
) -> Tensor:
    """(n_samples, 1): transmittance times opacity."""
    return alphas * render_transmittance_from_alpha(
        alphas, packed_info=packed_info, ray_indices=ray_indices, n_rays=n_rays
    )


@torch.no_grad()
def render_visibility(
    alphas: Tensor,
    *,
    ray_indices: Tensor | None = None,
    packed_info: Tensor | None = None,
    n_rays: int | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
) -> Tensor:
    """(n_samples,) bool: whether light reaches a sample and it is thick enough."""
    return render_visibility_from_alpha(alphas.flatten(), packed_info, ray_indices, n_rays, early_stop_eps, alpha_thre)
