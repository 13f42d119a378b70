"""Losses, each a pure function."""

from typing import Literal

import torch
from torch import Tensor

from ..config import LossConfig
from ..ops._checks import refuse
from ..ops._sink import linear
from ..ops.composite_loss import SURE, RayLossRule
from ..ops.packed import mean_over_rays, packed_cumsum, packed_sum
from ..types import PackedSamples
from .render import RgbSigmaFn

HUBER_DELTA = 0.1


def color_loss(
    rgb: Tensor,
    target: Tensor,
    *,
    kind: Literal["huber", "mse"] = "huber",
    n_rays_kept: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """() mean over rays and channels; rays from `n_rays_kept` on do not count, on either side of the fraction. With
    `weights` (n_rays,) each ray's part of the sum is multiplied by its own; the number of rays is not.

    >>> round(color_loss(torch.tensor([[0.5]]), torch.tensor([[0.3]]), kind="mse").item(), 4)
    0.04
    """
    error = rgb.float() - target.float() if rgb.dtype != torch.float64 else rgb - target
    if kind == "mse":
        values = error.square()
    else:
        values = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=HUBER_DELTA)
        values = values / HUBER_DELTA
    if weights is not None:
        values = values * weights[:, None]
    if n_rays_kept is None:
        return values.mean() if values.numel() else values.sum()
    kept = torch.arange(rgb.shape[0], device=rgb.device) < n_rays_kept
    total = torch.where(kept[:, None], values, torch.zeros_like(values)).sum()
    return total / (n_rays_kept.clamp(min=1) * rgb.shape[1])


def distortion_loss(weights: Tensor, samples: PackedSamples) -> Tensor:
    """(n_rays,): how spread out each ray's weights (capacity,) are, Mip-NeRF 360's regulariser against floaters,

        sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 (t_end_i - t_start_i),    m the samples' midpoints.

    Linear in the number of samples. Differentiable to the weights, not to t. For scenes of any size divide t, that is
    the result, by the length of interest; multiply by about 0.01 and take the mean.

    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([0.0, 3.0]), torch.tensor([0.0, 3.0]))
    >>> distortion_loss(torch.tensor([0.5, 0.5]), samples).tolist()  # two points 3 apart: 2 * 0.5 * 0.5 * 3
    [1.5]
    """
    weights = weights if weights.dtype == torch.float64 else weights.float()
    middle = samples.midpoints()
    before = packed_cumsum(weights, samples.offsets, exclusive=True)
    moment = packed_cumsum(weights * middle, samples.offsets, exclusive=True)
    pairs = 2.0 * weights * (middle * before - moment)
    alone = weights.square() * (samples.t_ends - samples.t_starts) / 3.0
    return packed_sum(pairs + alone, samples.offsets)


def ray_loss_rule(config: LossConfig, unit: float) -> RayLossRule | None:
    """The regularisers that have a weight, lengths counted in `unit`s; None where none has."""
    return None if config.distortion == config.opacity == 0.0 else RayLossRule(config.distortion, config.opacity, unit)


def weights_loss(weights: Tensor, opacity: Tensor, samples: PackedSamples, rule: RayLossRule) -> Tensor:
    """() what `ops.ray_losses` computes from logits, for fields that give densities: of the samples' weights
    (capacity,) and the rays' opacity (n_rays,). The distortion counts in the distances of `samples`."""
    values = torch.zeros_like(opacity)
    if rule.distortion:
        values = values + distortion_loss(weights, samples) * (rule.distortion / rule.unit)
    if rule.opacity:
        sure = opacity.clamp(SURE, 1.0 - SURE)
        values = values - rule.opacity * (sure * sure.log() + (1.0 - sure) * torch.log1p(-sure))
    return mean_over_rays(values, samples)


def weigh_gradient(values: Tensor, weights: Tensor) -> Tensor:
    """The values (n, c) as they are; their gradient is multiplied by `weights` (n,), whatever loss it comes from."""
    return linear(values, lambda values: values.view_as(values), lambda grad: grad * weights[:, None].to(grad.dtype))


def near_weights(t_starts: Tensor, t_ends: Tensor, distance: float) -> Tensor:
    """(n,) min(1, (t / distance)^2) at the samples' middles: what to scale gradients by before the cameras. Space right
    before a camera is crowded with samples of that one camera: they get its whole gradient at every step, while
    surfaces further away share theirs among few, so floaters grow there first. This undoes the crowding.

    >>> near_weights(torch.tensor([0.0, 0.5, 3.0]), torch.tensor([0.0, 0.5, 3.0]), 1.0).tolist()
    [0.0, 0.25, 1.0]
    """
    refuse(not distance > 0.0, "distance", "a length > 0", distance)
    return ((t_starts + t_ends) * (0.5 / distance)).square().clamp(max=1.0)


def scale_near_gradients(rgb_sigma_fn: RgbSigmaFn, distance: float) -> RgbSigmaFn:
    """The same function of samples; gradients to it shrink nearer than `distance`. For `volume_rendering`."""

    def scaled(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
        rgb, density = rgb_sigma_fn(t_starts, t_ends, ray_indices)
        weights = near_weights(t_starts, t_ends, distance)
        return weigh_gradient(rgb, weights), weigh_gradient(density[:, None], weights)[:, 0]

    return scaled
