"""The wide MLP: values and every gradient by name against the reference, skip, odd widths, unused rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.mlp import triton as triton_mlp
from nerfturbo.ops.mlp import wide_mlp

from ..ops.cases import assert_as_good_as_torch, assert_close, assert_within, generator, steady_rows
from ..peak import PeakBytes

# inputs, widths of the layers, skip
SHAPES = [(7, (20, 20, 20, 5), 2), (63, (130, 3), None), (8, (16,), None)]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make(
    inputs: int, widths: tuple[int, ...], skip: int | None, n: int, device: torch.device
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    draw = generator(1)
    weights, biases, width = [], [], inputs
    for index, outputs in enumerate(widths):
        width += inputs if index == skip else 0
        weights.append((torch.randn(outputs, width, generator=draw) * (2 / width) ** 0.5).to(device))
        biases.append((0.1 * torch.randn(outputs, generator=draw)).to(device))
        width = outputs
    return torch.randn(n, inputs, generator=draw).to(device), weights, biases


def run(
    backend: str,
    inputs: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    rows: Tensor | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """Result and all gradients, by name, under a random gradient of the result: of all rows, or of those given."""
    leaves = [t.detach().clone().requires_grad_() for t in (inputs, *weights, *biases)]
    depth = len(weights)
    with use_backend(backend):  # type: ignore[arg-type]
        out = wide_mlp(leaves[0], leaves[1 : 1 + depth], leaves[1 + depth :], **options)  # type: ignore[arg-type]
        grad = torch.randn(out.shape, generator=generator(2)).to(out)
        out.backward(grad if rows is None else grad * rows[:, None])
    names = ["inputs", *(f"{kind}[{k}]" for kind in ("weights", "biases") for k in range(depth))]
    return {"result": out.detach(), **{name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, value in want.items():
        assert_close(name, got[name].to(value.dtype), value, tolerance)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 70])
@pytest.mark.parametrize(("inputs", "widths", "skip"), SHAPES)
def test_matches_reference(
    kernel_device: torch.device, inputs: int, widths: tuple[int, ...], skip: int | None, n: int, relu_last: bool
) -> None:
    case = make(inputs, widths, skip, n, kernel_device)
    options = {"skip": skip, "relu_last": relu_last}
    compare(run("triton", *case, **options), run("reference", *case, **options), 2e-5)


def test_weights_learn_where_inputs_do_not(kernel_device: torch.device) -> None:
    inputs, weights, biases = make(7, (20, 20, 5), 1, 70, kernel_device)
    both = run("triton", inputs, weights, biases, skip=1)
    leaves = [weight.requires_grad_() for weight in weights]
    with use_backend("triton"):
        out = wide_mlp(inputs, leaves, biases, skip=1)
        grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator(2)).to(out))
    for index, grad in enumerate(grads):
        assert_close(f"weights[{index}]", grad, both[f"weights[{index}]"])


@pytest.mark.usefixtures("deterministic", "poisoned_empty")
def test_deterministic_mode_and_unused_rows(kernel_device: torch.device) -> None:
    inputs, weights, biases = make(7, (20, 20, 5), 1, 70, kernel_device)
    inputs[50:] = float("nan")
    options = {"skip": 1, "n_used": torch.tensor(50, dtype=torch.int32, device=kernel_device)}
    got = run("triton", inputs, weights, biases, **options)
    assert (got["result"][50:] == 0).all()
    compare(got, run("reference", inputs, weights, biases, **options), 2e-5)


def test_wrong_arguments_are_named(kernel_device: torch.device) -> None:
    inputs, weights, biases = make(7, (20, 5), None, 3, kernel_device)
    with pytest.raises(InputError, match="skip"):
        wide_mlp(inputs, weights, biases, skip=2)
    with pytest.raises(InputError, match=r"weights\[1\]"):
        wide_mlp(inputs, weights, biases, skip=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_real_shapes(dtype: torch.dtype) -> None:
    inputs, weights, biases = make(63, (256,) * 8, 4, 1 << 15, torch.device("cuda"))
    options = {"skip": 4, "relu_last": True}
    got = run("triton", inputs.to(dtype), weights, biases, **options)
    half = run("reference", inputs.to(dtype), weights, biases, **options)
    truth = run("reference", inputs.to(dtype).float(), weights, biases, **options)
    assert_as_good_as_torch(got, half, truth)
    if dtype == torch.bfloat16:
        assert_within(got, truth, 0.2)


def test_half_is_off_by_its_rounding_alone(kernel_device: torch.device) -> None:
    """Eight layers; biases put most units far from zero, on or off, so that there are rows where no ReLU is near it."""
    n, width = (1 << 15, 256) if kernel_device.type == "cuda" else (256, 64)
    skip = 4
    inputs, weights, biases = make(63, (width,) * 8, skip, n, kernel_device)
    inputs, weights = inputs.half().float(), [w.half().float() for w in weights]
    hidden, before, draw = inputs, [], generator(3)
    for index, weight in enumerate(weights):
        product = (torch.cat([hidden, inputs], dim=-1) if index == skip else hidden) @ weight.t()
        sign = torch.randint(0, 2, (width,), generator=draw).to(product) * 2.0 - 1.0
        biases[index] = (2.5 * sign * product.std(0) - product.mean(0)).half().float()
        before.append(product + biases[index])
        hidden = before[-1].relu()
    options = {"skip": skip, "relu_last": True, "rows": steady_rows(before, torch.float16)}
    got = run("triton", inputs.half(), weights, biases, **options)
    assert_within(got, run("reference", inputs, weights, biases, **options), 0.003)


def test_without_a_gradient_the_values_are_the_same(kernel_device: torch.device) -> None:
    inputs, weights, biases = make(7, (20, 20, 20, 5), 2, 70, kernel_device)
    with use_backend("triton"):
        want = wide_mlp(inputs.requires_grad_(), weights, biases, skip=2)
        with torch.no_grad():
            assert torch.equal(wide_mlp(inputs, weights, biases, skip=2), want)


@pytest.mark.gpu
def test_without_a_gradient_no_layer_is_kept() -> None:
    """A row more costs its input, the layer before and the layer after; the library's workspace is the same for any."""
    peaks = []
    for n in (1 << 16, 1 << 16, 1 << 17):  # the first time kernels are loaded and the workspace is allocated
        inputs, weights, biases = make(64, (256,) * 8, None, n, torch.device("cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), use_backend("triton"):
            wide_mlp(inputs.half(), weights, biases)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    layer = (1 << 16) * 256 * 2
    assert peaks[2] - peaks[1] < 2.5 * layer, peaks


def test_without_a_gradient_two_layers_are_held_at_a_time(kernel_device: torch.device) -> None:
    inputs, weights, biases = make(64, (256,) * 8, 4, 64, kernel_device)
    with torch.no_grad(), use_backend("triton"), PeakBytes() as peak:
        wide_mlp(inputs, weights, biases, skip=4)
    assert peak.n_bytes <= 2.25 * 64 * 256 * 4  # where the skip joins: 256 + 64 columns in, 256 out


@pytest.mark.parametrize(("largest", "slices"), [(1 << 23, 3), (12, 2), (6, None)])
def test_partial_sums_are_long_and_fit_their_memory(
    monkeypatch: pytest.MonkeyPatch, largest: int, slices: int | None
) -> None:
    """At least SLICE rows in each, at most LARGEST_PARTIAL numbers in all of them."""
    seen, bmm = [], torch.bmm
    monkeypatch.setattr(triton_mlp, "LARGEST_PARTIAL", largest)
    monkeypatch.setattr(torch, "bmm", lambda a, b: seen.append(a.shape[0]) or bmm(a, b))
    n = 3 * triton_mlp.SLICE + 5
    a, b = torch.randn(n, 2, generator=generator(1)), torch.randn(n, 3, generator=generator(2))
    found = triton_mlp.sum_of_products(a, b)
    torch.testing.assert_close(found.double(), a.double().T @ b.double(), rtol=1e-4, atol=1e-3)
    assert seen == ([] if slices is None else [slices])
