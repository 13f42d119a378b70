"""Small fully-connected networks without biases, the kind that follows a hash grid."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation


def fused_mlp(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """(n, outputs): x -> W_k relu(... relu(W_1 x)), with each W (outputs, inputs) as in torch.nn.Linear.

    ReLU after every layer but the last. Differentiable to inputs and weights. Half inputs multiply in half and
    accumulate in fp32.

    >>> import torch
    >>> fused_mlp(torch.ones(1, 2), [torch.ones(3, 2), torch.ones(1, 3)]).tolist()
    [[6.0]]
    """
    check_shape("inputs", inputs, ("n", "inputs"))
    check_float("inputs", inputs)
    if not weights:
        raise InputError("weights", "at least one matrix", "none")
    width = inputs.shape[1]
    for index, weight in enumerate(weights):
        check_shape(f"weights[{index}]", weight, ("outputs", width))
        check_device(inputs=inputs, **{f"weights_{index}": weight})
        width = weight.shape[0]
    return implementation("fused_mlp", "fused_mlp", inputs)(inputs, list(weights))
