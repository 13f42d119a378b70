"""The interface of nerfacc 0.3: `ray_marching` returns `ray_indices`, and samples have shape (n_samples, 1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .nerfacc import pack_info, volrend
from .nerfacc._rays import ray_indices_of
from .nerfacc_packed import (
    ColorFn,
    ContractionType,
    Grid,
    OccupancyGrid,
    accumulate_along_rays,
    contract,
    contract_inv,
    marching,
    ray_aabb_intersect,
    render_pixels,
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

P = ParamSpec("P")


ray_marching = marching(ray_indices_of)


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
    return render_pixels((rgb_sigma_fn, rgb_alpha_fn), t_starts, t_ends, ray_indices, n_rays, render_bkgd)


def _in_columns(function: Callable[P, Any]) -> Callable[P, Tensor]:
    """The first result of a function of 0.5, for samples (n_samples, 1)."""

    @wraps(function)
    def columns(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        given = inspect.signature(function).bind(*args, **kwargs)
        for name in given.arguments.keys() & {"t_starts", "t_ends", "sigmas", "alphas"}:
            given.arguments[name] = given.arguments[name].flatten()
        result = function(*given.args, **given.kwargs)
        return (result[0] if isinstance(result, tuple) else result)[:, None]

    return columns


render_transmittance_from_alpha = _in_columns(volrend.render_transmittance_from_alpha)
render_transmittance_from_density = _in_columns(volrend.render_transmittance_from_density)
render_weight_from_alpha = _in_columns(volrend.render_weight_from_alpha)
render_weight_from_density = _in_columns(volrend.render_weight_from_density)


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
    where = packed_info, ray_indices, n_rays
    return volrend.render_visibility_from_alpha(alphas.flatten(), *where, early_stop_eps, alpha_thre)
