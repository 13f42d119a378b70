"""Kernels once, plain torch twice: first-order gradients by the kernels, higher orders through the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fast: Function, plain: Function, scale: float, x: Tensor, params: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            inner = [value.detach().requires_grad_(want) for value, want in zip((x, params), wanted, strict=True)]
            result = fast(*inner)
        ctx.save_for_backward(x, params)
        ctx.plain, ctx.scale, ctx.inner, ctx.result = plain, scale, inner, result
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # the gradient itself will be differentiated: build it from what can be
            sources = [value for value, want in zip(ctx.saved_tensors, wanted, strict=True) if want]
            result = ctx.plain(*ctx.saved_tensors)
            found = torch.autograd.grad(
                result, sources, grad.to(result.dtype), create_graph=True, allow_unused=True, materialize_grads=True
            )
        else:
            sources = [value for value, want in zip(ctx.inner, wanted, strict=True) if want]
            scaled = grad if ctx.scale == 1.0 else grad * ctx.scale  # out of half precision's smallest numbers
            found = torch.autograd.grad(ctx.result, sources, scaled, retain_graph=True, allow_unused=True)
            if ctx.scale != 1.0:
                found = [None if value is None else value / ctx.scale for value in found]
        left = iter(found)
        grads = [next(left) if want else None for want in wanted]
        return None, None, None, *grads  # fast, plain, scale, x, params


def differentiable_twice(fast: Function, plain: Function, scale: float, x: Tensor, params: Tensor) -> Tensor:
    """`fast(x, params)`, whose gradient is `fast`'s (computed times `scale`) and whose higher ones are `plain`'s."""
    return _Twice.apply(fast, plain, scale, x, params)  # type: ignore[no-any-return]
