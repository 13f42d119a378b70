"""Chains of matrix products; gradients by autograd."""

import torch
from torch import Tensor

from .._sink import redirect_all, zero_tail


def fused_mlp(inputs, weights, *, sink=None, n_used=None) -> Tensor:
    hidden, weights = zero_tail(inputs, n_used), redirect_all(weights, sink)
    for weight in weights[:-1]:
        hidden = torch.relu(torch.nn.functional.linear(hidden, weight.to(hidden.dtype)))
    return zero_tail(torch.nn.functional.linear(hidden, weights[-1].to(hidden.dtype)), n_used)


def wide_mlp(inputs, weights, biases, *, skip, relu_last) -> Tensor:
    hidden = inputs
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if index == skip:
            hidden = torch.cat([hidden, inputs], dim=-1)
        hidden = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
        if relu_last or index + 1 < len(weights):
            hidden = torch.relu(hidden)
    return hidden
