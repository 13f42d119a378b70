"""A chain of matrix products; gradients by autograd.

A chain of matrix products with biases; gradients by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fused_mlp(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    hidden = inputs
    for weight in weights[:-1]:
        hidden = torch.relu(torch.nn.functional.linear(hidden, weight.to(hidden.dtype)))
    return torch.nn.functional.linear(hidden, weights[-1].to(hidden.dtype))


def wide_mlp(
    inputs: Tensor, weights: list[Tensor], biases: list[Tensor], *, skip: int | None, relu_last: bool
) -> Tensor:
    hidden = inputs
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if index == skip:
            hidden = torch.cat([hidden, inputs], dim=-1)
        hidden = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
        if relu_last or index + 1 < len(weights):
            hidden = torch.relu(hidden)
    return hidden
