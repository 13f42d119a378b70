"""Volume rendering of batched (n_rays, n_samples) or flattened (all_samples,) samples.

    alpha_i = 1 - exp(-sigma_i (t_end_i - t_start_i)),    T_i = prod_{j < i} (1 - alpha_j),    w_i = T_i alpha_i

Flattened samples come with `packed_info`, or with `ray_indices` in ascending order and `n_rays`. Columns (all_samples,
1), as nerfacc 0.3 wrote them, give columns, and of several results the first alone. `_old_*` have the order of 0.2.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, refuse
from ...ops import packed_sum
from ...ops._checks import check_shape
from ...ops.composite import composite_pixels
from ...rendering.losses import distortion_loss
from ...types import PackedSamples
from . import _rays
from ._rays import Count, Some, or_older
from .scan import prod_along, sum_along

__all__ = ["accumulate_along_rays", "distortion", "loss_distortion", "render_visibility", "rendering"]
__all__ += ["render_transmittance_from_alpha", "render_transmittance_from_density", "render_weight_from_alpha"]
__all__ += ["render_weight_from_density", "render_visibility_from_alpha", "render_visibility_from_density"]

Pair = tuple[Tensor, Tensor]
Where = tuple[Some, Some, Count]  # packed_info, ray_indices, n_rays
ColorFn = Callable[..., Pair]
NARROW = (torch.float16, torch.bfloat16, torch.float32)


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


@torch.no_grad()
def _old_visibility(packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0) -> Pair:
    """nerfacc 0.2's `render_visibility`: (n,) bool, and packed_info of what it keeps. Thin samples absorb nothing."""
    thick, where = alphas.reshape(-1) >= alpha_thre, (packed_info, None, None)
    keep = thick & (_light(alphas.reshape(-1) * thick, where, optical=False)[0] >= early_stop_eps)
    offsets = _rays.offsets_of_packed_info(packed_info, keep.shape[0])
    before = torch.nn.functional.pad(torch.cumsum(keep, 0), (1, 0))[offsets.long()]
    return keep, _rays.packed_info_of(before).to(packed_info.dtype)


def _old_weights(packed_info: Tensor, alphas: Tensor, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0) -> Tensor:
    """nerfacc 0.2's weights (n,): none for samples thinner than `alpha_thre` or behind `early_stop_eps`."""
    kept = alphas.reshape(-1) * _old_visibility(packed_info, alphas, early_stop_eps, alpha_thre)[0]
    return kept * _light(kept, (packed_info, None, None), optical=False)[0]


def _old_density_weights(
    packed_info: Tensor, t_starts: Tensor, t_ends: Tensor, sigmas: Tensor,
    early_stop_eps: float = 1e-4, alpha_thre: float = 0.0,
) -> Tensor:  # fmt: skip
    return _old_weights(packed_info, -torch.expm1(-sigmas * (t_ends - t_starts)), early_stop_eps, alpha_thre)


def _old_rendering(
    packed_info: Any, t_starts: Tensor, t_ends: Tensor, rgb_sigma_fn: Any = None,
    rgb_alpha_fn: ColorFn | None = None, early_stop_eps: float = 1e-4, alpha_thre: float = 0.0,
    render_bkgd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """nerfacc 0.2's `rendering`; 0.2.0 had the function before `packed_info`."""
    if callable(packed_info):
        packed_info, t_starts, t_ends, rgb_sigma_fn = t_starts, t_ends, rgb_sigma_fn, packed_info

    def visible(*samples: Tensor) -> tuple[Tensor, Tensor]:
        rgbs, values = (rgb_sigma_fn or rgb_alpha_fn)(*samples)  # type: ignore
        alphas = values if rgb_sigma_fn is None else -torch.expm1(-values * (t_ends - t_starts))
        keep, _ = _old_visibility(packed_info, alphas, early_stop_eps, alpha_thre)
        return rgbs, torch.where(keep.view_as(values), values, 0.0)

    sigma_fn, alpha_fn = visible if rgb_sigma_fn else None, visible if rgb_alpha_fn else None
    indices, n_rays = _indices_and_rays(packed_info, t_starts.shape[0])
    return rendering(t_starts, t_ends, indices, n_rays, sigma_fn, alpha_fn, render_bkgd)


def _indices_and_rays(packed_info: Tensor, n_samples: int) -> tuple[Tensor, int]:
    return _rays.unpack_info(packed_info, n_samples), _rays.offsets_of_packed_info(packed_info, n_samples).shape[0] - 1


def _old_accumulation(weights: Tensor, ray_indices: Tensor, values: Some = None, n_rays: Count = None) -> Tensor:
    return accumulate_along_rays(weights, values=values, ray_indices=ray_indices, n_rays=n_rays)


def _old_distortion(packed_info: Tensor, weights: Tensor, t_starts: Tensor, t_ends: Tensor) -> Tensor:
    """nerfacc 0.3's `distortion`: (n_rays,)."""
    flat = [value.reshape(-1) for value in (weights, t_starts, t_ends)]
    indices, n_rays = _indices_and_rays(packed_info, flat[0].shape[0])
    return distortion(flat[0], flat[1], flat[2], indices, n_rays)[:, 0]


@or_older(_old_rendering)
def rendering(
    t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor | None = None, n_rays: int | None = None,
    rgb_sigma_fn: ColorFn | None = None, rgb_alpha_fn: ColorFn | None = None, render_bkgd: Tensor | None = None,
) -> Any:  # fmt: skip
    """Colours (n_rays, channels), opacities (n_rays, 1), depths (n_rays, 1) and a dictionary of what was computed.
    `rgb_sigma_fn(t_starts, t_ends, ray_indices)` returns colours (..., channels) and densities (...); `rgb_alpha_fn`
    opacities in place of densities. Depth is the expected distance over the opacity. The dictionary holds weights,
    trans, alphas, rgbs and, from densities, sigmas; what the pixels did not need is computed when it is first read.
    Differentiable to what the function returns. Columns have no dictionary, and depth is not divided by the opacity."""
    columns = _in_columns(t_starts, (None, ray_indices, None))
    if ray_indices is not None and not t_starts.shape == t_ends.shape == (*ray_indices.shape, *[1] * columns):
        shapes = f"{tuple(t_starts.shape)}, {tuple(t_ends.shape)} and {tuple(ray_indices.shape)}"
        raise InputError("t_starts, t_ends and ray_indices", "one shape (n_samples,)", shapes)
    field = rgb_alpha_fn if rgb_sigma_fn is None else rgb_sigma_fn
    if field is None:
        raise InputError("rgb_sigma_fn", "a function, or one as rgb_alpha_fn", "neither")
    rgbs, values = _evaluate(field, t_starts, t_ends, ray_indices, render_bkgd)
    if columns:
        t_starts, t_ends, values = t_starts[:, 0], t_ends[:, 0], values[:, 0]
    # The kernel gives no gradient to t; and 64-bit values, which are for checking, take the plain formulas.
    moving = torch.is_grad_enabled() and (t_starts.requires_grad or t_ends.requires_grad)
    fits = torch.float64 not in (t_starts.dtype, values.dtype) and t_starts.dim() == (2 if ray_indices is None else 1)
    if rgb_sigma_fn is not None and fits and not moving:
        results = _composite_density(t_starts, t_ends, values, rgbs, (None, ray_indices, n_rays), render_bkgd)
    else:
        optical = values if rgb_sigma_fn is None else values * (t_ends - t_starts)
        trans, alphas = _light(optical, (None, ray_indices, n_rays), optical=rgb_sigma_fn is not None)
        extras = Extras(weights=trans * alphas, alphas=alphas, trans=trans)
        extras |= {"rgbs": rgbs} if rgb_sigma_fn is None else {"sigmas": values, "rgbs": rgbs}
        colors, opacities, moments = (
            accumulate_along_rays(extras["weights"], summed, ray_indices, n_rays)
            for summed in (rgbs, None, ((t_starts + t_ends) * 0.5)[..., None])
        )
        depths = moments / opacities.clamp_min(torch.finfo(opacities.dtype).eps)
        colors = colors if render_bkgd is None else colors + render_bkgd * (1.0 - opacities)
        results = colors, opacities, depths, extras
    return (results[0], results[1].clone(), results[2] * results[1]) if columns else results


def _evaluate(field: ColorFn, t_starts: Tensor, t_ends: Tensor, ray_indices: Some, background: Some) -> Pair:
    """Ask the field, or, without samples, make empty answers: many fields cannot be asked about nothing."""
    rays = t_starts.shape if ray_indices is None else ray_indices.shape
    if t_starts.shape[0] == 0:
        channels = 3 if background is None else background.shape[-1]
        return t_starts.new_zeros((*rays, channels)), torch.zeros_like(t_starts)
    rgbs, values = field(t_starts, t_ends, ray_indices)
    check_shape("sigmas or alphas", values, tuple(t_starts.shape))
    refuse(rgbs.shape[:-1] != rays, "rgbs", f"shape {(*rays, 'channels')}", tuple(rgbs.shape))
    return rgbs, values


def _composite_density(
    t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, rgbs: Tensor, where: Where, background: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """`rendering` of densities by one compositing kernel in place of a dozen small ones."""
    samples, channels = _packed(t_starts, t_ends, where), rgbs.shape[-1]
    fits = isinstance(background, Tensor) and background.shape in ((channels,), (samples.n_rays, channels))
    behind = background if fits and background.dtype in NARROW else None  # type: ignore  # nerfacc's broadcast
    out = composite_pixels(sigmas.reshape(-1), rgbs.reshape(samples.capacity, channels), samples, behind)
    colors, opacities = out.rgb, out.opacity[:, None].clone()  # callers clamp it in place
    if background is not None and behind is None:
        colors = colors + background * (1.0 - opacities)
    extras = Extras(
        weights=out.weights.view(t_starts.shape),
        alphas=lambda: -torch.expm1(-sigmas * (t_ends - t_starts)),
        trans=lambda: _light(sigmas * (t_ends - t_starts), where, optical=True)[0],
        sigmas=sigmas,
        rgbs=rgbs,
    )
    return colors, opacities, out.depth[:, None], extras


def _packed(t_starts: Tensor, t_ends: Tensor, where: Where) -> PackedSamples:
    _, ray_indices, n_rays = where
    if ray_indices is not None:
        narrow = _rays.remembered(ray_indices, "narrow", lambda: ray_indices.to(torch.int32))
        return PackedSamples(t_starts.float(), t_ends.float(), narrow, _rays.offsets_of_indices(ray_indices, n_rays))
    rays, per_ray = t_starts.shape
    each = torch.arange(rays + 1, dtype=torch.int32, device=t_starts.device)
    indices = each[:-1, None].expand(rays, per_ray).reshape(-1)
    return PackedSamples(t_starts.reshape(-1).float(), t_ends.reshape(-1).float(), indices, each * per_ray)


def _in_columns(values: Tensor, where: Where) -> bool:
    """Whether these are flattened samples in the shape (n, 1) of nerfacc 0.3; with no rays given, (n, 1) is a batch."""
    return values.dim() == 2 and values.shape[1] == 1 and not (where[0] is None and where[1] is None)


def _light(values: Tensor, where: Where, prefix_trans: Tensor | None = None, *, optical: bool) -> tuple[Tensor, Tensor]:
    """T_i and alpha_i in the shape of `values`: optical thicknesses sigma_i (t_end_i - t_start_i), or alphas."""
    flat = values[:, 0] if _in_columns(values, where) else values
    offsets = _rays.offsets_of(flat, *where, "sigmas" if optical else "alphas")
    if optical:
        trans, alphas = torch.exp(-sum_along(flat, offsets, exclusive=True)), -torch.expm1(-flat)
    else:
        trans, alphas = prod_along(1.0 - flat, offsets, exclusive=True), flat
    trans, alphas = trans.view(values.shape), alphas.view(values.shape)
    return trans if prefix_trans is None else trans * prefix_trans, alphas


def render_transmittance_from_alpha(
    alphas: Tensor, packed_info: Some = None, ray_indices: Some = None, n_rays: Count = None, prefix_trans: Some = None
) -> Tensor:
    """T_i of each sample, in the shape of `alphas`; `prefix_trans` multiplies it (light lost before).

    >>> render_transmittance_from_alpha(torch.tensor([0.5, 0.5, 0.1]), ray_indices=torch.tensor([0, 0, 1])).tolist()
    [1.0, 0.5, 1.0]
    """
    return _light(alphas, (packed_info, ray_indices, n_rays), prefix_trans, optical=False)[0]


def render_transmittance_from_density(
    t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, packed_info: Some = None, ray_indices: Some = None,
    n_rays: Count = None, prefix_trans: Some = None,
) -> Any:  # fmt: skip
    """T_i and alpha_i of each sample, in the shape of `sigmas`; T_i alone of columns."""
    where = packed_info, ray_indices, n_rays
    trans, alphas = _light(sigmas * (t_ends - t_starts), where, prefix_trans, optical=True)
    return trans if _in_columns(sigmas, where) else (trans, alphas)


@or_older(_old_weights)
def render_weight_from_alpha(
    alphas: Tensor, packed_info: Some = None, ray_indices: Some = None, n_rays: Count = None, prefix_trans: Some = None
) -> Any:
    """w_i and T_i of each sample, in the shape of `alphas`; w_i alone of columns."""
    where = packed_info, ray_indices, n_rays
    trans, _ = _light(alphas, where, prefix_trans, optical=False)
    return trans * alphas if _in_columns(alphas, where) else (trans * alphas, trans)


@or_older(_old_density_weights)
def render_weight_from_density(
    t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, packed_info: Some = None, ray_indices: Some = None,
    n_rays: Count = None, prefix_trans: Some = None,
) -> Any:  # fmt: skip
    """w_i, T_i and alpha_i of each sample, in the shape of `sigmas`; w_i alone of columns."""
    where = packed_info, ray_indices, n_rays
    trans, alphas = _light(sigmas * (t_ends - t_starts), where, prefix_trans, optical=True)
    return trans * alphas if _in_columns(sigmas, where) else (trans * alphas, trans, alphas)


@torch.no_grad()
def render_visibility_from_alpha(
    alphas: Tensor, packed_info: Some = None, ray_indices: Some = None, n_rays: Count = None,
    early_stop_eps: float = 1e-4, alpha_thre: float = 0.0, prefix_trans: Some = None,
) -> Tensor:  # fmt: skip
    """bool in the shape of `alphas`, (n,) for columns: T_i >= early_stop_eps and, above 0, alpha_i >= alpha_thre."""
    where = packed_info, ray_indices, n_rays
    trans, _ = _light(alphas, where, prefix_trans, optical=False)
    return _visible(trans, alphas, where, early_stop_eps, alpha_thre)


@torch.no_grad()
def render_visibility_from_density(
    t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None, n_rays: int | None = None, early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0, prefix_trans: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`render_visibility_from_alpha`, of densities."""
    where = packed_info, ray_indices, n_rays
    trans, alphas = _light(sigmas * (t_ends - t_starts), where, prefix_trans, optical=True)
    return _visible(trans, alphas, where, early_stop_eps, alpha_thre)


def _visible(trans: Tensor, alphas: Tensor, where: Where, early_stop_eps: float, alpha_thre: float) -> Tensor:
    visible = trans >= early_stop_eps
    visible = visible & (alphas >= alpha_thre) if alpha_thre > 0 else visible
    return visible[:, 0] if _in_columns(visible, where) else visible


render_visibility = or_older(_old_visibility)(render_visibility_from_alpha)


@or_older(_old_accumulation, place=1)
def accumulate_along_rays(
    weights: Tensor, values: Some = None, ray_indices: Some = None, n_rays: Count = None
) -> Tensor:
    """(n_rays, channels): the sum over each ray of weights (n,) or (n, 1) times values (..., channels), or of the
    weights alone. Until 0.3 `ray_indices` stood before `values`; both orders are understood.

    Differentiable to both. Here `ray_indices` may be in any order. Without `n_rays` the largest index is read back.

    >>> accumulate_along_rays(torch.tensor([1.0, 2.0, 4.0]), None, torch.tensor([0, 0, 2]), 3).tolist()
    [[3.0], [0.0], [4.0]]
    """
    if _in_columns(weights, (None, ray_indices, None)):
        weights = weights[:, 0]
    expected = weights.shape if ray_indices is None else ray_indices.shape
    refuse(weights.shape != expected, "weights", f"shape {tuple(expected)}", tuple(weights.shape))
    source = weights[..., None]
    if values is not None:
        wanted = f"shape {(*weights.shape, 'channels')}"
        refuse(values.shape[:-1] != weights.shape, "values", wanted, tuple(values.shape))
        source = source * values
    if ray_indices is None:
        return source.sum(dim=-2)
    if n_rays is None:
        n_rays = int(ray_indices.max()) + 1 if ray_indices.numel() else 0
    offsets = _rays.recall(ray_indices, "offsets")
    if offsets is not None and offsets.shape[0] == n_rays + 1 and source.dtype == torch.float32:
        return packed_sum(source, offsets)
    return source.new_zeros(n_rays, source.shape[-1]).index_add(0, ray_indices.long(), source)


def accumulate_along_rays_(
    weights: Tensor, values: Some = None, ray_indices: Some = None, outputs: Some = None
) -> None:
    """`accumulate_along_rays`, added to `outputs` (n_rays, channels) in place."""
    if outputs is None:
        raise InputError("outputs", "a tensor (n_rays, channels)", "none")
    outputs.add_(accumulate_along_rays(weights, values=values, ray_indices=ray_indices, n_rays=outputs.shape[0]))


@or_older(_old_distortion)
def distortion(weights: Tensor, t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor, n_rays: int) -> Tensor:
    """(n_rays, 1): Mip-NeRF 360's distortion of each ray's weights,

        sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 (t_end_i - t_start_i),    m the midpoints.

    Differentiable to weights and t. Linear in the number of samples, which must ascend along each ray.
    """
    shapes = {tuple(value.shape) for value in (weights, t_starts, t_ends, ray_indices)}
    if len(shapes) != 1 or weights.dim() != 1:
        raise InputError("weights, t_starts, t_ends and ray_indices", "one shape (n_samples,)", str(sorted(shapes)))
    samples = PackedSamples(t_starts, t_ends, ray_indices, _rays.offsets_of_indices(ray_indices, n_rays))
    return distortion_loss(weights, samples)[:, None]


loss_distortion = distortion
