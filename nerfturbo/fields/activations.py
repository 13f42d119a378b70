"""Activations that stay finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.ngp import MAX_LOGIT as MAX_EXPONENT
from ..ops.ngp import activate


class _TruncatedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.exp(logits.clamp(max=MAX_EXPONENT))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        # The true gradient is zero past the clamp; the clamped exponential lets a saturated density come back down.
        return grad * torch.exp(logits.clamp(max=MAX_EXPONENT))


def activated(logits: Tensor) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) = sigmoid and density (n,) = `truncated_exp` of logits (n, 4), one node where it can."""
    if logits.dtype in (torch.float32, torch.float64) and torch.is_grad_enabled():
        return activate(logits)
    return torch.sigmoid(logits[:, :3]), truncated_exp(logits[:, 3])


def truncated_exp(logits: Tensor) -> Tensor:
    """exp(min(x, 15)) in fp32 at least, with the same clamp in the backward instead of a zero gradient.

    >>> [round(value) for value in truncated_exp(torch.tensor([0.0, 100.0])).tolist()]  # exp(0), exp(15)
    [1, 3269018]
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if not torch.is_grad_enabled():
        return torch.exp(wide.clamp(max=MAX_EXPONENT))
    return _TruncatedExp.apply(wide)  # type: ignore[no-any-return]
