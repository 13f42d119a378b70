"""The reference's loss over this backend's `composite`: the rest of it is a few numbers per ray."""

from __future__ import annotations

from torch import Tensor

from ...types import PackedSamples
from ..composite_loss import LossRule
from ..reference.composite_loss import activate, compare
from .composite import composite


def composite_loss(
    raw: Tensor,
    samples: PackedSamples,
    background: Tensor,
    target: Tensor,
    *,
    rule: LossRule,
    density_bias: float,
    early_stop_eps: float,
    gradient_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    density, rgb = activate(raw, samples, density_bias)
    colour, opacity, *_ = composite(density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=0.0)
    return compare(colour, opacity, samples, background, target, rule)
