"""Compositing along rays: density and colour of samples to colour, opacity and depth of rays.

    alpha_i = 1 - exp(-density_i * (t_end_i - t_start_i))
    T_i     = prod_{j < i} (1 - alpha_j)            transmittance before sample i
    w_i     = T_i * alpha_i
    rgb     = sum_i w_i rgb_i,   opacity = sum_i w_i,   depth = sum_i w_i * t_mid_i

Samples with alpha_i < alpha_thre are skipped: no weight and no attenuation. From the first sample with
T_i < early_stop_eps on, a ray has no weight. Both are masks: no gradient passes through them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import PackedSamples
from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation


class Composited(NamedTuple):
    """Result of `composite`; fp32 (float64 for float64 input)."""

    rgb: Tensor  # (n_rays, channels), without background
    opacity: Tensor  # (n_rays,)
    depth: Tensor  # (n_rays,), sum of w * t_mid, not divided by opacity
    weights: Tensor  # (capacity,), zero in the tail


def composite(
    density: Tensor,
    rgb: Tensor,
    samples: PackedSamples,
    *,
    early_stop_eps: float = 0.0,
    alpha_thre: float | Tensor = 0.0,
) -> Composited:
    """Composite `density` (capacity,) >= 0 and `rgb` (capacity, channels) of any number of channels.

    Differentiable to density and rgb through all four results, not to t. Runs in fp32 whatever comes in.
    `alpha_thre` may be a () tensor on the device.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([2.0]))
    >>> out = composite(torch.tensor([2.0]), torch.ones(1, 3), samples)
    >>> round(out.opacity.item(), 4)  # 1 - exp(-2)
    0.8647
    """
    _check(density, rgb, samples)
    return Composited(
        *implementation("composite", "composite", density)(
            density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre
        )
    )


def composite_pixels(
    density: Tensor, rgb: Tensor, samples: PackedSamples, background: Tensor | None = None
) -> Composited:
    """`composite` as a picture shows it: rgb + (1 - opacity) * background, and the mean depth, divided by opacity.

    `background` is (channels,) or (n_rays, channels). Differentiable to density, rgb and background. Opacities below
    fp32's epsilon divide as that.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([2.0]))
    >>> out = composite_pixels(torch.tensor([2.0]), torch.zeros(1, 3), samples, torch.ones(3))
    >>> round(out.rgb[0, 0].item(), 4), round(out.depth.item(), 4)  # exp(-2), the sample's middle
    (0.1353, 1.5)
    """
    if background is not None:
        shape = (rgb.shape[-1],) if background.dim() == 1 else (samples.n_rays, rgb.shape[-1])
        check_shape("background", background, shape)
        check_device(rgb=rgb, background=background)
    _check(density, rgb, samples)
    return Composited(*implementation("composite", "composite_pixels", density)(density, rgb, samples, background))


def as_pixels(
    rgb: Tensor, opacity: Tensor, depth: Tensor, weights: Tensor, background: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four results of `composite` as `composite_pixels` gives them: what backends without a kernel for it do."""
    if background is not None:
        rgb = rgb + background * (1.0 - opacity[:, None])
    return rgb, opacity, depth / opacity.clamp_min(torch.finfo(torch.float32).eps), weights


def visibility(
    density: Tensor, samples: PackedSamples, *, early_stop_eps: float = 0.0, alpha_thre: float | Tensor = 0.0
) -> Tensor:
    """(capacity,) bool: the samples that `composite` would give weight under the same thresholds.

    So compositing what `compact(samples, visibility(...))` keeps equals compositing everything with the thresholds.
    False in the tail. Not differentiable.
    """
    check_shape("density", density, (samples.capacity,))
    check_float("density", density)
    check_device(density=density, t_starts=samples.t_starts)
    return implementation("composite", "visibility", density)(
        density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre
    )


def _check(density: Tensor, rgb: Tensor, samples: PackedSamples) -> None:
    check_shape("density", density, (samples.capacity,))
    check_shape("rgb", rgb, (samples.capacity, "channels"))
    check_float("density", density)
    check_float("rgb", rgb)
    check_device(density=density, rgb=rgb, t_starts=samples.t_starts)
