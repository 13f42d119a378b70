"""A chain of matrix products: torch's own, which run at the machine's peak, with the passes in between fused away.

ReLU works in place, its gradient too; nothing is copied, whatever the strides of input and gradient. Halves multiply in
half precision as torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *weights: Tensor) -> Tensor:
        hidden = [inputs]
        for index, weight in enumerate(weights):
            out = hidden[-1] @ weight.to(inputs.dtype).t()
            hidden.append(out.relu_() if index + 1 < len(weights) else out)
        ctx.save_for_backward(*hidden[:-1], *weights)
        return hidden[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.saved_tensors) // 2
        hidden, weights = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        grads: list[Tensor | None] = [None] * n
        for index in reversed(range(n)):
            if ctx.needs_input_grad[1 + index]:
                grads[index] = (grad.t() @ hidden[index]).to(weights[index].dtype)
            if index > 0:
                grad = grad @ weights[index].to(grad.dtype)
                torch.ops.aten.threshold_backward.grad_input(grad, hidden[index], 0, grad_input=grad)
        first = None
        if ctx.needs_input_grad[0]:
            # As the transpose, so that the gradient lies in memory as the encoder's kernels read it.
            first = (weights[0].to(grad.dtype).t() @ grad.t()).t()
        return first, *grads  # inputs, each of the weights


def fused_mlp(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    return _FusedMlp.apply(inputs, *weights)
