"""Compositing, colour loss and their gradient in one pass over the samples, for the training step.

    density = exp(min(logit_3, 15)),   rgb_i = sigmoid(logit_0..2)
    colour  = sum_i w_i rgb_i + (1 - sum_i w_i) * background           w as in `composite`
    loss    = mean over the trained rays and their three channels of value(colour - target)
    value(e) = e^2 for "mse";   e^2 / (2 delta) for |e| <= delta, |e| - delta / 2 beyond, for "huber".

A target of four channels has straight alpha: its colour is put over the same background first. Rays from `n_rays_kept`
on count on neither side of the fraction. The exponential's derivative is its clamped self, not zero past the clamp.

`ray_losses` are regularisers of a ray's weights, whatever its colour:

    distortion = (sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 length_i) / unit          m: middles
    opacity    = -O log O - (1 - O) log(1 - O),   O = sum_i w_i kept 1e-4 away from 0 and 1
    loss       = mean over the trained rays of both, each times its weight

The distortion (Mip-NeRF 360) pulls a ray's light together, the opacity's entropy makes a ray see something or nothing.

Both come out of one launch with the gradient to the logits; the backward multiplies it by what arrives.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ...errors import InputError
from ...types import PackedSamples
from .._checks import check_device, check_positive, check_shape, check_tensor, refuse
from .._dispatch import implementation

LossKind = Literal["huber", "mse"]


@dataclass(frozen=True)
class LossRule:
    """How far a colour is from its target; see the module's formula."""

    kind: LossKind = "huber"
    delta: float = 0.1

    def __post_init__(self) -> None:
        refuse(self.kind not in get_args(LossKind), "kind", "one of " + ", ".join(get_args(LossKind)), repr(self.kind))
        check_positive("delta", self.delta)


class CompositedLoss(NamedTuple):
    """Result of `composite_loss`; fp32 (float64 for float64 input). Only `loss` carries a gradient."""

    loss: Tensor  # ()
    mse: Tensor  # (), mean squared error of the same rays and channels
    rgb: Tensor  # (n_rays, 3), background included


HUBER = LossRule()


def composite_loss(
    raw: Tensor,
    samples: PackedSamples,
    background: Tensor,
    target: Tensor,
    *,
    rule: LossRule = HUBER,
    gradient_scale: Tensor | None = None,
) -> CompositedLoss:
    """The loss of field logits `raw` (capacity, 4), three of colour and one of density, in any layout. `background`
    (n_rays, 3) and `target` (n_rays, 3 or 4) get no gradient. `gradient_scale`, a () fp32 tensor on the device, changes
    no result: it is the gradient that will arrive at the loss (a loss scale, say), so that a half precision gradient of
    `raw` is kept at that scale from the start.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([0.0]), torch.tensor([1.0]))
    >>> raw, white = torch.tensor([[-9.0, -9.0, -9.0, 9.0]]), torch.ones(1, 3)  # an opaque black sample
    >>> round(composite_loss(raw, samples, white, white, rule=LossRule("mse")).loss.item(), 3)
    1.0
    """
    check_tensor("raw", raw, (samples.capacity, 4))
    check_shape("background", background, (samples.n_rays, 3))
    if target.dim() != 2 or target.shape[0] != samples.n_rays or target.shape[1] not in (3, 4):
        raise InputError("target", f"shape ({samples.n_rays}, 3 or 4)", str(tuple(target.shape)))
    pictures = {"background": background, "target": target}
    check_device(raw=raw, t_starts=samples.t_starts, gradient_scale=gradient_scale, **pictures)
    if gradient_scale is not None:
        check_shape("gradient_scale", gradient_scale, ())
    run = implementation("composite_loss", "composite_loss", raw)
    return CompositedLoss(*run(raw, samples, background, target, rule=rule, gradient_scale=gradient_scale))


SURE = 1e-4  # opacities nearer than this to 0 or 1 are left alone


@dataclass(frozen=True)
class RayLossRule:
    """The weights of both terms, and the length in which distances count."""

    distortion: float = 0.0
    opacity: float = 0.0
    unit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("distortion", "opacity"):
            check_positive(name, getattr(self, name), zero=True)
        check_positive("unit", self.unit)


def ray_losses(
    raw: Tensor,
    samples: PackedSamples,
    rule: RayLossRule,
    *,
    places: PackedSamples | None = None,
    gradient_scale: Tensor | None = None,
) -> Tensor:
    """() the loss of field logits `raw` (capacity, 4), of which only the last column, the density's, matters.
    Differentiable to `raw`. Rays from `n_rays_kept` on do not count. `places`, the same samples with other distances
    (those of a normalised ray, say), are what the distortion counts in. `gradient_scale` as in `composite_loss`.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    >>> raw = torch.full((2, 4), -0.366513)  # tau = log 2: weights 1/2 and 1/4
    >>> round(ray_losses(raw, samples, RayLossRule(distortion=1.0)).item(), 4)  # 2 * 1/8 * 2 + (1/4 + 1/16) / 3
    0.6042
    """
    check_tensor("raw", raw, (samples.capacity, 4))
    places = samples if places is None else places
    check_shape("places", places.t_starts, (samples.capacity,))
    check_device(raw=raw, t_starts=samples.t_starts, places=places.t_starts, gradient_scale=gradient_scale)
    if gradient_scale is not None:
        check_shape("gradient_scale", gradient_scale, ())
    run = implementation("composite_loss", "ray_losses", raw)
    return run(raw, samples, places, rule=rule, gradient_scale=gradient_scale)
