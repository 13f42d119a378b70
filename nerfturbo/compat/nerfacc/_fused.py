"""Rendering densities by one compositing kernel in place of a dozen small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.composite import composite_pixels
from ...types import PackedSamples
from ._rays import offsets_of_indices, remembered


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

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            value = self[key]
            del self[key]
            return value
        return super().pop(key, *default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


def can_fuse(t_starts: Tensor, t_ends: Tensor, sigmas: Tensor, *, flat: bool) -> bool:
    """The kernel gives no gradient to t; and 64-bit values, which are for checking, take the plain formulas."""
    moving = torch.is_grad_enabled() and (t_starts.requires_grad or t_ends.requires_grad)
    return not moving and torch.float64 not in (t_starts.dtype, sigmas.dtype) and t_starts.dim() == (1 if flat else 2)


def composite_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    rgbs: Tensor,
    ray_indices: Tensor | None,
    n_rays: int | None,
    background: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """Colours over the background, opacities, mean distances, and the extras of `rendering`."""
    samples = _packed(t_starts, t_ends, ray_indices, n_rays)
    behind = background if _is_plain(background, samples.n_rays, rgbs.shape[-1]) else None
    if ray_indices is None:  # batched
        out = composite_pixels(sigmas.reshape(-1), rgbs.reshape(samples.capacity, rgbs.shape[-1]), samples, behind)
        weights = out.weights.view(t_starts.shape)
    else:
        out = composite_pixels(sigmas, rgbs, samples, behind)
        weights = out.weights
    colors, opacities = out.rgb, out.opacity[:, None]
    if background is not None and behind is None:
        colors = colors + background * (1.0 - opacities)

    def alphas() -> Tensor:
        return -torch.expm1(-sigmas * (t_ends - t_starts))

    def trans() -> Tensor:
        from .volrend import render_transmittance_from_density

        indices = {} if ray_indices is None else {"ray_indices": ray_indices, "n_rays": n_rays}
        return render_transmittance_from_density(t_starts, t_ends, sigmas, **indices)[0]

    lazy: dict[str, Callable[[], Tensor]] = {"alphas": alphas, "trans": trans}
    extras = Extras(weights=weights, **lazy, sigmas=sigmas, rgbs=rgbs)
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
    starts, ends = t_starts.reshape(-1).float(), t_ends.reshape(-1).float()
    rays, per_ray = t_starts.shape
    each = torch.arange(rays + 1, dtype=torch.int32, device=t_starts.device)
    indices = each[:-1, None].expand(rays, per_ray).reshape(-1)
    return PackedSamples(starts, ends, indices, each * per_ray)
