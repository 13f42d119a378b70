"""Volume rendering of batched (n_rays, n_samples) or flattened (all_samples,) samples.

    alpha_i = 1 - exp(-sigma_i (t_end_i - t_start_i)),    T_i = prod_{j < i} (1 - alpha_j),    w_i = T_i alpha_i

Flattened samples come with `packed_info`, or with `ray_indices` in ascending order and `n_rays`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import packed_sum
from ._fused import Extras, can_fuse, composite_density
from ._rays import offsets_of, recall
from .scan import exclusive_prod, packed_prod_along, packed_sum_along


def rendering(
    t_starts: Tensor,
    t_ends: Tensor,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    rgb_sigma_fn: Callable[..., tuple[Tensor, Tensor]] | None = None,
    rgb_alpha_fn: Callable[..., tuple[Tensor, Tensor]] | None = None,
    render_bkgd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Colours (n_rays, channels), opacities (n_rays, 1), depths (n_rays, 1) and a dictionary of what was computed.

    `rgb_sigma_fn(t_starts, t_ends, ray_indices)` returns colours (..., channels) and densities (...); `rgb_alpha_fn`
    opacities in place of densities. Colours may have any number of channels. Depth is the expected distance divided
    by the opacity. The dictionary holds weights, trans, alphas, rgbs and, from densities, sigmas; what the pixels
    did not need is computed when it is first read. Differentiable to what the function returns.
    """
    if ray_indices is not None and not t_starts.shape == t_ends.shape == ray_indices.shape:
        shapes = f"{tuple(t_starts.shape)}, {tuple(t_ends.shape)} and {tuple(ray_indices.shape)}"
        raise InputError("t_starts, t_ends and ray_indices", "one shape (n_samples,)", shapes)
    if rgb_sigma_fn is None and rgb_alpha_fn is None:
        raise InputError("rgb_sigma_fn", "a function, or one as rgb_alpha_fn", "neither")
    field = rgb_sigma_fn if rgb_sigma_fn is not None else rgb_alpha_fn
    rgbs, values = _evaluate(field, t_starts, t_ends, ray_indices, render_bkgd)
    if rgb_sigma_fn is not None and can_fuse(t_starts, t_ends, values, flat=ray_indices is not None):
        return composite_density(t_starts, t_ends, values, rgbs, ray_indices, n_rays, render_bkgd)
    if rgb_sigma_fn is not None:
        weights, trans, alphas = render_weight_from_density(
            t_starts, t_ends, values, ray_indices=ray_indices, n_rays=n_rays
        )
        extras = Extras(weights=weights, alphas=alphas, trans=trans, sigmas=values, rgbs=rgbs)
    else:
        weights, trans = render_weight_from_alpha(values, ray_indices=ray_indices, n_rays=n_rays)
        extras = Extras(weights=weights, trans=trans, rgbs=rgbs, alphas=values)
    middle = ((t_starts + t_ends) * 0.5)[..., None]
    colors = accumulate_along_rays(weights, rgbs, ray_indices, n_rays)
    opacities = accumulate_along_rays(weights, None, ray_indices, n_rays)
    moments = accumulate_along_rays(weights, middle, ray_indices, n_rays)
    depths = moments / opacities.clamp_min(torch.finfo(opacities.dtype).eps)
    if render_bkgd is not None:
        colors = colors + render_bkgd * (1.0 - opacities)
    return colors, opacities, depths, extras


def _evaluate(
    field: Any, t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor | None, background: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ask the field, or, without samples, make empty answers: many fields cannot be asked about nothing."""
    if t_starts.shape[0] == 0:
        channels = 3 if background is None else background.shape[-1]
        return t_starts.new_zeros((*t_starts.shape, channels)), torch.zeros_like(t_starts)
    rgbs, values = field(t_starts, t_ends, ray_indices)
    if values.shape != t_starts.shape:
        hint = "squeeze the last dimension" if values.shape[:-1] == t_starts.shape else "one value per sample"
        raise InputError("sigmas or alphas", f"shape {tuple(t_starts.shape)}", str(tuple(values.shape)), hint)
    if rgbs.shape[:-1] != t_starts.shape:
        raise InputError("rgbs", f"shape {(*t_starts.shape, 'channels')}", str(tuple(rgbs.shape)))
    return rgbs, values


def render_transmittance_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """T_i of each sample, in the shape of `alphas`; `prefix_trans` multiplies it (light lost before).

    >>> render_transmittance_from_alpha(torch.tensor([0.5, 0.5, 0.1]), ray_indices=torch.tensor([0, 0, 1])).tolist()
    [1.0, 0.5, 1.0]
    """
    offsets = _offsets(alphas, packed_info, ray_indices, n_rays)
    if offsets is None:
        trans = exclusive_prod(1.0 - alphas)
    else:
        trans = packed_prod_along(1.0 - alphas, offsets, exclusive=True)
    return trans if prefix_trans is None else trans * prefix_trans


def render_transmittance_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """T_i and alpha_i of each sample, in the shape of `sigmas`."""
    optical = sigmas * (t_ends - t_starts)
    offsets = _offsets(sigmas, packed_info, ray_indices, n_rays)
    if offsets is None:
        before = torch.cumsum(torch.cat([torch.zeros_like(optical[..., :1]), optical[..., :-1]], dim=-1), -1)
    else:
        before = packed_sum_along(optical, offsets, exclusive=True)
    trans, alphas = torch.exp(-before), -torch.expm1(-optical)
    return trans if prefix_trans is None else trans * prefix_trans, alphas


def render_weight_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w_i and T_i of each sample, in the shape of `alphas`."""
    trans = render_transmittance_from_alpha(alphas, packed_info, ray_indices, n_rays, prefix_trans)
    return trans * alphas, trans


def render_weight_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """w_i, T_i and alpha_i of each sample, in the shape of `sigmas`."""
    trans, alphas = render_transmittance_from_density(
        t_starts, t_ends, sigmas, packed_info, ray_indices, n_rays, prefix_trans
    )
    return trans * alphas, trans, alphas


@torch.no_grad()
def render_visibility_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """bool in the shape of `alphas`: T_i >= early_stop_eps and, for a positive threshold, alpha_i >= alpha_thre."""
    trans = render_transmittance_from_alpha(alphas, packed_info, ray_indices, n_rays, prefix_trans)
    return _visible(trans, alphas, early_stop_eps, alpha_thre)


@torch.no_grad()
def render_visibility_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """bool in the shape of `sigmas`: T_i >= early_stop_eps and, for a positive threshold, alpha_i >= alpha_thre."""
    trans, alphas = render_transmittance_from_density(
        t_starts, t_ends, sigmas, packed_info, ray_indices, n_rays, prefix_trans
    )
    return _visible(trans, alphas, early_stop_eps, alpha_thre)


def _visible(trans: Tensor, alphas: Tensor, early_stop_eps: float, alpha_thre: float) -> Tensor:
    visible = trans >= early_stop_eps
    return visible & (alphas >= alpha_thre) if alpha_thre > 0 else visible


def accumulate_along_rays(
    weights: Tensor, values: Tensor | None = None, ray_indices: Tensor | None = None, n_rays: int | None = None
) -> Tensor:
    """(n_rays, channels): the sum over each ray of weights times values (..., channels), or of the weights alone.

    Differentiable to both. Here `ray_indices` may be in any order.

    >>> accumulate_along_rays(torch.tensor([1.0, 2.0, 4.0]), None, torch.tensor([0, 0, 2]), 3).tolist()
    [[3.0], [0.0], [4.0]]
    """
    source = _weighted(weights, values)
    if ray_indices is None:
        return source.sum(dim=-2)
    if n_rays is None or weights.dim() != 1:
        got = f"weights of shape {tuple(weights.shape)}, n_rays = {n_rays}"
        raise InputError("weights and n_rays", "shape (n_samples,) and a number beside ray_indices", got)
    offsets = recall(ray_indices, "offsets")
    if offsets is not None and offsets.shape[0] == n_rays + 1 and source.dtype == torch.float32:
        return packed_sum(source, offsets)
    return source.new_zeros(n_rays, source.shape[-1]).index_add(0, ray_indices.long(), source)


def accumulate_along_rays_(
    weights: Tensor, values: Tensor | None = None, ray_indices: Tensor | None = None, outputs: Tensor | None = None
) -> None:
    """`accumulate_along_rays`, added to `outputs` (n_rays, channels) in place."""
    if outputs is None:
        raise InputError("outputs", "a tensor (n_rays, channels)", "none")
    source = _weighted(weights, values)
    if ray_indices is None:
        outputs.add_(source.sum(dim=-2))
    else:
        outputs.index_add_(0, ray_indices.long(), source.to(outputs.dtype))


def _weighted(weights: Tensor, values: Tensor | None) -> Tensor:
    if values is None:
        return weights[..., None]
    if values.shape[:-1] != weights.shape:
        raise InputError("values", f"shape {(*weights.shape, 'channels')}", str(tuple(values.shape)))
    return weights[..., None] * values


def _offsets(
    values: Tensor, packed_info: Tensor | None, ray_indices: Tensor | None, n_rays: int | None
) -> Tensor | None:
    if (packed_info is not None or ray_indices is not None) and values.dim() != 1:
        raise InputError("sigmas or alphas", "shape (n_samples,), flattened", str(tuple(values.shape)))
    return offsets_of(values.shape[0], packed_info, ray_indices, n_rays)
