"""Activations that stay finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_EXPONENT = 15.0


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


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        rgb, density = torch.sigmoid(logits[:, :3]), torch.exp(logits[:, 3].clamp(max=MAX_EXPONENT))
        ctx.save_for_backward(rgb, density)
        ctx.by_column = logits.stride(0) == 1
        return rgb, density

    @staticmethod
    def backward(ctx: Any, grad_rgb: Tensor, grad_density: Tensor) -> Tensor:  # type: ignore[override]
        rgb, density = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are wanted
            return torch.cat([grad_rgb * rgb * (1.0 - rgb), (grad_density * density)[:, None]], dim=-1)
        n = rgb.shape[0]
        grad = torch.empty((4, n) if ctx.by_column else (n, 4), dtype=rgb.dtype, device=rgb.device)
        grad = grad.t() if ctx.by_column else grad  # as the logits lie in memory
        torch.ops.aten.sigmoid_backward.grad_input(grad_rgb, rgb, grad_input=grad[:, :3])
        torch.mul(grad_density, density, out=grad[:, 3])
        return grad


def activated(logits: Tensor) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) = sigmoid and density (n,) = `truncated_exp` of logits (n, 4), as one node of autograd.

    >>> rgb, density = activated(torch.zeros(1, 4))
    >>> rgb.tolist(), density.tolist()
    ([[0.5, 0.5, 0.5]], [1.0])
    """
    if logits.dtype in (torch.float32, torch.float64) and torch.is_grad_enabled():
        return _Activate.apply(logits)  # type: ignore[no-any-return]
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
