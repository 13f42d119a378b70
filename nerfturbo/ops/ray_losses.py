"""What a ray's weights should look like, whatever its colour: regularisers of the density, and their gradient.

    density_i  = exp(min(logit_3 + density_bias, 15)),   tau_i = density_i * length_i,   w, T as in `composite`
    distortion = (sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 length_i) / unit          m: middles of the samples
    opacity    = -O log O - (1 - O) log(1 - O),   O = sum_i w_i kept 1e-4 away from 0 and 1
    sparsity   = sum_i log(1 + 2 tau_i^2)
    loss       = mean over the trained rays of the three, each times its weight

The distortion (Mip-NeRF 360) pulls a ray's light together, the opacity's entropy makes a ray see something or nothing,
the sparsity (a Cauchy prior) removes thin fog. The distortion is linear in the number of samples: along a ray m
grows, so that sum_ij w_i w_j |m_i - m_j| = 2 sum_i w_i (m_i sum_{j<i} w_j - sum_{j<i} w_j m_j).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..types import PackedSamples
from ._checks import check_device, check_float, check_positive, check_shape
from ._dispatch import implementation

SURE = 1e-4  # opacities nearer than this to 0 or 1 are left alone


@dataclass(frozen=True)
class RayLossRule:
    """The weights of the three terms, and the length in which distances count."""

    distortion: float = 0.0
    opacity: float = 0.0
    sparsity: float = 0.0
    unit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("distortion", "opacity", "sparsity"):
            check_positive(name, getattr(self, name), zero=True)
        check_positive("unit", self.unit)


def ray_losses(
    raw: Tensor,
    samples: PackedSamples,
    rule: RayLossRule,
    *,
    density_bias: float = 0.0,
    gradient_scale: Tensor | None = None,
) -> Tensor:
    """() the loss of field logits `raw` (capacity, 4), of which only the last column, the density's, matters.

    Differentiable to `raw`. Rays from `n_rays_kept` on do not count. `gradient_scale` as in `composite_loss`.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    >>> raw = torch.full((2, 4), -0.366513)  # tau = log 2: weights 1/2 and 1/4
    >>> round(ray_losses(raw, samples, RayLossRule(distortion=1.0)).item(), 4)  # 2 * 1/8 * 2 + (1/4 + 1/16) / 3
    0.6042
    """
    check_shape("raw", raw, (samples.capacity, 4))
    check_float("raw", raw)
    check_device(raw=raw, t_starts=samples.t_starts, gradient_scale=gradient_scale)
    if gradient_scale is not None:
        check_shape("gradient_scale", gradient_scale, ())
    return implementation("ray_losses", "ray_losses", raw)(
        raw, samples, rule=rule, density_bias=float(density_bias), gradient_scale=gradient_scale
    )
