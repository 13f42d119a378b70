"""Fully-connected networks: small ones without biases behind a hash grid, wide ones with biases as in NeRF."""

from collections.abc import Sequence

from torch import Tensor

from ...errors import InputError
from .._checks import check_device, check_shape, check_tensor, refuse
from .._dispatch import autocast, implementation
from .._sink import GradientSink, check_count, check_sink, zero_tail


def fused_mlp(
    inputs: Tensor, weights: Sequence[Tensor], *, sink: GradientSink | None = None, n_used: Tensor | None = None
) -> Tensor:
    """(n, outputs): x -> W_k relu(... relu(W_1 x)), with each W (outputs, inputs) as in torch.nn.Linear. ReLU after
    every layer but the last. Differentiable to inputs and weights. Half inputs, and fp32 ones inside torch.autocast,
    multiply in half and accumulate in fp32, with fp32 weights as masters. A `sink` takes the weights' gradients in
    place of autograd. `n_used`, a count on the device, says how many rows count: the others come out as zero and
    receive no gradient.

    >>> import torch
    >>> fused_mlp(torch.ones(1, 2), [torch.ones(3, 2), torch.ones(1, 3)]).tolist()
    [[6.0]]
    """
    check_tensor("inputs", inputs, ("n", "inputs"))
    check_count(n_used, inputs.device)
    refuse(not weights, "weights", "at least one matrix", "none")
    width = inputs.shape[1]
    for index, weight in enumerate(weights):
        check_shape(f"weights[{index}]", weight, ("outputs", width))
        check_device(inputs=inputs, **{f"weights_{index}": weight})
        width = weight.shape[0]
    check_sink(sink, [f"weights[{index}]" for index in range(len(weights))], weights)
    return implementation("mlp", "fused_mlp", inputs)(autocast(inputs), list(weights), sink=sink, n_used=n_used)


def wide_mlp(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    skip: int | None = None,
    relu_last: bool = False,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, outputs) in the inputs' dtype: x -> W_k relu(... relu(W_1 x + b_1)) + b_k, W (outputs, inputs). ReLU after
    every layer but the last; `relu_last` adds one there. Layer `skip` (counted from 0, not the first) sees [hidden,
    inputs], the network's inputs behind the hidden ones. Differentiable to inputs, weights and biases. Half inputs, and
    fp32 ones inside torch.autocast, multiply in half and accumulate in fp32, with fp32 weights as masters. `n_used`, a
    count on the device, says how many rows count: the others come out as zero and receive no gradient.

    >>> import torch
    >>> wide_mlp(torch.ones(1, 2), [torch.ones(3, 2), torch.ones(1, 3)], [torch.ones(3), torch.zeros(1)]).tolist()
    [[9.0]]
    """
    check_tensor("inputs", inputs, ("n", "inputs"))
    check_count(n_used, inputs.device)
    if not weights or len(weights) != len(biases):
        raise InputError("weights and biases", "the same number, at least one", f"{len(weights)} and {len(biases)}")
    refuse(skip is not None and not 0 < skip < len(weights), "skip", f"a layer from 1 to {len(weights) - 1}", skip)
    width = inputs.shape[1]
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_shape(f"weights[{index}]", weight, ("outputs", width + (inputs.shape[1] if index == skip else 0)))
        check_shape(f"biases[{index}]", bias, (weight.shape[0],))
        check_device(inputs=inputs, **{f"weights_{index}": weight, f"biases_{index}": bias})
        width = weight.shape[0]
    mlp = implementation("mlp", "wide_mlp", inputs)
    result = mlp(autocast(zero_tail(inputs, n_used)), list(weights), list(biases), skip=skip, relu_last=relu_last)
    return zero_tail(result, n_used)
