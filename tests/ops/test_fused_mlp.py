"""The bias-free network: a chain of linear layers, in values and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import fused_mlp, use_backend

from .cases import Target, compare, generator, require

SHAPES = [(32, 64, 16), (32, 64, 64, 3), (16, 16), (1, 16), (32, 128, 128, 128, 1)]


def _inputs(n: int, widths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = generator(4)
    result = {"inputs": torch.randn(n, widths[0], generator=draw).to(dtype)}
    for index, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        weight = torch.randn(fan_out, fan_in, generator=draw) * (2.0 / fan_in) ** 0.5
        result[f"weight_{index}"] = weight.to(dtype)
    return result


def _call(inputs: Tensor, **weights: Tensor) -> Tensor:
    return fused_mlp(inputs, list(weights.values()))


@pytest.mark.parametrize("widths", SHAPES, ids=lambda widths: "-".join(map(str, widths)))
def test_matches_reference(sized: tuple[Target, int], widths: tuple[int, ...], poisoned_empty: None):
    target, n = sized
    require(target)
    inputs = _inputs(n, widths)
    # GPUs multiply fp32 on tensor cores with a short mantissa; the interpreter and numba do not.
    compare(target, _call, inputs, list(inputs), tolerance=5e-3 if target.device == "cuda" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(target: Target, dtype: torch.dtype):
    require(target)
    if target.interpreted and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bf16 product is wrong")
    inputs = _inputs(target.pick(200, 20), (32, 64, 16), dtype)
    compare(target, _call, inputs, list(inputs), tolerance=3e-2 if dtype == torch.bfloat16 else 1e-2)


@pytest.mark.parametrize("wanted", [["inputs"], ["weight_1"], ["weight_0", "weight_2"]])
def test_only_the_gradients_that_are_needed(target: Target, wanted: list[str]):
    require(target)
    inputs = _inputs(target.pick(100, 20), (32, 64, 64, 3))
    compare(target, _call, inputs, wanted, tolerance=5e-3 if target.device == "cuda" else 1e-5)


def test_no_points(target: Target):
    require(target)
    inputs = _inputs(0, (32, 64, 16))
    compare(target, _call, inputs, list(inputs))


def test_non_contiguous_input_and_gradient(target: Target):
    """A slice of a wider tensor comes in, and its gradient comes back through a slice of the output."""
    require(target)
    inputs = _inputs(target.pick(100, 20), (48, 64, 16))

    def function(inputs: Tensor, weight_0: Tensor, weight_1: Tensor) -> Tensor:
        return fused_mlp(inputs[:, 3:35], [weight_0[:, 3:35], weight_1])[:, 1:]

    compare(target, function, inputs, list(inputs), tolerance=5e-3 if target.device == "cuda" else 1e-5)


def test_layout_of_the_encoder(target: Target):
    """Encoders store features first; as a transposed view that is still (n, 32)."""
    require(target)
    inputs = _inputs(target.pick(100, 20), (32, 64, 16))

    def function(inputs: Tensor, weight_0: Tensor, weight_1: Tensor) -> Tensor:
        return fused_mlp(inputs.T.contiguous().T, [weight_0, weight_1])

    compare(target, function, inputs, list(inputs), tolerance=5e-3 if target.device == "cuda" else 1e-5)


def test_gradcheck():
    inputs = [t.double().requires_grad_() for t in _inputs(4, (3, 5, 4, 2)).values()]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda x, *weights: fused_mlp(x, weights), inputs)


def test_errors_name_the_argument():
    with pytest.raises(InputError, match=r"weights\[1\]: expected shape \(outputs, 64\)"):
        fused_mlp(torch.zeros(2, 32), [torch.zeros(64, 32), torch.zeros(3, 63)])
    with pytest.raises(InputError, match="weights: expected at least one"):
        fused_mlp(torch.zeros(2, 32), [])
    with pytest.raises(InputError, match="inputs: expected shape"):
        fused_mlp(torch.zeros(32), [torch.zeros(64, 32)])
