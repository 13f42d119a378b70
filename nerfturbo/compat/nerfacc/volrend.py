"""Volume rendering of batched (n_rays, n_samples) or flattened (all_samples,) samples.

    alpha_i = 1 - exp(-sigma_i (t_end_i - t_start_i)),    T_i = prod_{j < i} (1 - alpha_j),    w_i = T_i alpha_i

Flattened samples come with `packed_info`, or with `ray_indices` in ascending order and `n_rays`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import packed_sum
from ...ops.composite import composite_pixels
from ...rendering.losses import distortion_loss
from ...types import PackedSamples
from ._rays import offsets_of, offsets_of_indices, recall, remembered
from .scan import prod_along, sum_along


class Extras(dict[str, Any]):
    """A dictionary some of whose values are made when they are first read: functions stand for them until then."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if callable(value):
            value = value()
            self[key] = value
        return value

    def __iter__(self) -> Iterator[str]:  # with its own iterator, dict(extras) and {**extras} read values by key
        return iter(list(super().keys()))

    get: Any = Mapping.get  # these read by key, as dict's own do not
    items: Any = Mapping.items
    pop: Any = MutableMapping.pop
    values: Any = Mapping.values

    def copy(self) -> dict[str, Any]:
        return dict(self)


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
    opacities in place of densities. Depth is the expected distance over the opacity. The dictionary holds weights,
    trans, alphas, rgbs and, from densities, sigmas; what the pixels did not need is computed when it is first read.
    Differentiable to what the function returns.
    """
    if ray_indices is not None and not t_starts.shape == t_ends.shape == ray_indices.shape:
        shapes = f"{tuple(t_starts.shape)}, {tuple(t_ends.shape)} and {tuple(ray_indices.shape)}"
        raise InputError("t_starts, t_ends and ray_indices", "one shape (n_samples,)", shapes)
    field = rgb_alpha_fn if rgb_sigma_fn is None else rgb_sigma_fn
    if field is None:
        raise InputError("rgb_sigma_fn", "a function, or one as rgb_alpha_fn", "neither")
    rgbs, values = _evaluate(field, t_starts, t_ends, ray_indices, render_bkgd)
    if rgb_sigma_fn is not None:
        if _can_fuse(t_starts, t_ends, values, flat=ray_indices is not None):
            return _composite_density(t_starts, t_ends, values, rgbs, ray_indices, n_rays, render_bkgd)
        weights, trans, alphas = render_weight_from_density(t_starts, t_ends, values, None, ray_indices, n_rays)
        extras = Extras(weights=weights, alphas=alphas, trans=trans, sigmas=values, rgbs=rgbs)
    else:
        weights, trans = render_weight_from_alpha(values, None, ray_indices, n_rays)
        extras = Extras(weights=weights, trans=trans, rgbs=rgbs, alphas=values)
    colors, opacities, moments = (
        accumulate_along_rays(weights, summed, ray_indices, n_rays)
        for summed in (rgbs, None, ((t_starts + t_ends) * 0.5)[..., None])
    )
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


def _can_fuse(t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, *, flat: bool) -> bool:
    """The kernel gives no gradient to t; and 64-bit values, which are for checking, take the plain formulas."""
    moving = torch.is_grad_enabled() and (t_starts.requires_grad or t_ends.requires_grad)
    return not moving and torch.float64 not in (t_starts.dtype, sigmas.dtype) and t_starts.dim() == (1 if flat else 2)


def _composite_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    rgbs: Tensor,
    ray_indices: Tensor | None,
    n_rays: int | None,
    background: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """`rendering` of densities by one compositing kernel in place of a dozen small ones."""
    samples = _packed(t_starts, t_ends, ray_indices, n_rays)
    behind = background if _is_plain(background, samples.n_rays, rgbs.shape[-1]) else None
    flat_rgbs = rgbs.reshape(samples.capacity, rgbs.shape[-1])
    out = composite_pixels(sigmas.reshape(-1), flat_rgbs, samples, behind)
    colors, opacities = out.rgb, out.opacity[:, None]
    if background is not None and behind is None:
        colors = colors + background * (1.0 - opacities)
    extras = Extras(
        weights=out.weights.view(t_starts.shape),
        alphas=lambda: -torch.expm1(-sigmas * (t_ends - t_starts)),
        trans=lambda: render_transmittance_from_density(t_starts, t_ends, sigmas, None, ray_indices, n_rays)[0],
        sigmas=sigmas,
        rgbs=rgbs,
    )
    return colors, opacities, out.depth[:, None], extras


def _is_plain(background: Any, n_rays: int, channels: int) -> bool:
    """Whether the kernel takes it: nerfacc takes whatever broadcasts."""
    if not isinstance(background, Tensor) or background.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return background.shape in ((channels,), (n_rays, channels))


def _packed(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor | None, n_rays: int | None) -> PackedSamples:
    if ray_indices is not None:
        narrow = remembered(ray_indices, "narrow", lambda: ray_indices.to(torch.int32))
        return PackedSamples(t_starts.float(), t_ends.float(), narrow, offsets_of_indices(ray_indices, n_rays))
    rays, per_ray = t_starts.shape
    each = torch.arange(rays + 1, dtype=torch.int32, device=t_starts.device)
    indices = each[:-1, None].expand(rays, per_ray).reshape(-1)
    return PackedSamples(t_starts.reshape(-1).float(), t_ends.reshape(-1).float(), indices, each * per_ray)


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
    offsets = offsets_of(alphas, packed_info, ray_indices, n_rays, "alphas")
    trans = prod_along(1.0 - alphas, offsets, exclusive=True)
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
    offsets = offsets_of(sigmas, packed_info, ray_indices, n_rays, "sigmas")
    trans, alphas = torch.exp(-sum_along(optical, offsets, exclusive=True)), -torch.expm1(-optical)
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


def distortion(weights: Tensor, t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor, n_rays: int) -> Tensor:
    """(n_rays, 1): Mip-NeRF 360's distortion of each ray's weights,

        sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 (t_end_i - t_start_i),    m the midpoints.

    Differentiable to weights and t. Linear in the number of samples, which must ascend along each ray.
    """
    shapes = {tuple(value.shape) for value in (weights, t_starts, t_ends, ray_indices)}
    if len(shapes) != 1 or weights.dim() != 1:
        raise InputError("weights, t_starts, t_ends and ray_indices", "one shape (n_samples,)", str(sorted(shapes)))
    samples = PackedSamples(t_starts, t_ends, ray_indices, offsets_of_indices(ray_indices, n_rays))
    return distortion_loss(weights, samples)[:, None]
