"""What runs where no fused kernel does: the library's products, weight gradients summed in slices of the samples."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nerfturbo.ops import GradientSink, fused_mlp, use_backend
from nerfturbo.ops.mlp import triton as _library
from nerfturbo.ops.mlp import triton as mlp_kernels
from nerfturbo.ops.mlp import wide_mlp
from nerfturbo.ops.ngp import NgpWeights, ngp_field

from ..ops.cases import assert_close, generator

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> None:
    """Slices of 16 samples, and no fused kernel."""
    monkeypatch.setattr(_library, "SLICE", 16)
    monkeypatch.setattr(mlp_kernels, "fits", lambda *_: False)


def draw(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(device)


@pytest.mark.parametrize("n", [0, 5, 31, 32, 64, 70, 97])
@pytest.mark.parametrize("feature_major", [False, True])
def test_slices_add_up_to_the_product(kernel_device: torch.device, n: int, feature_major: bool) -> None:
    a, b = draw(n, 9, seed=1, device=kernel_device), draw(n, 12, seed=2, device=kernel_device)
    if feature_major:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    got = _library.sum_of_products(a[:, :7], b)
    assert_close("product", got, (a[:, :7].double().t() @ b.double()).float(), 1e-6)


def test_partial_sums_stay_within_their_memory(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[torch.Size] = []
    bmm = torch.bmm

    def watch(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(bmm(a, b).shape)
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", watch)
    monkeypatch.setattr(_library, "LARGEST_PARTIAL", 3 * 9 * 12)
    a, b = draw(160, 9, seed=1, device=kernel_device), draw(160, 12, seed=2, device=kernel_device)
    assert_close("product", _library.sum_of_products(a, b), a.t() @ b, 1e-5)
    assert sizes == [(3, 9, 12)]


def test_tf32_and_half_are_left_to_the_library(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("sliced")

    monkeypatch.setattr(torch, "bmm", refuse)
    a, b = draw(64, 8, seed=1, device=kernel_device), draw(64, 8, seed=2, device=kernel_device)
    _library.sum_of_products(a.half(), b.half())
    with pytest.raises(AssertionError, match="sliced"):
        _library.sum_of_products(a, b)
    monkeypatch.setattr(_library, "fp32_precision", lambda: "tf32")
    _library.sum_of_products(a, b)


@pytest.mark.parametrize("n_used", [None, 50])
def test_a_small_network_matches_the_reference(kernel_device: torch.device, n_used: int | None) -> None:
    widths = (20, 33, 9, 3)
    weights = [draw(b, a, seed=a, device=kernel_device) * (2 / a) ** 0.5 for a, b in pairwise(widths)]
    inputs = draw(70, 20, seed=1, device=kernel_device)
    count = None if n_used is None else torch.tensor(n_used, dtype=torch.int32, device=kernel_device)
    if n_used is not None:
        inputs[n_used:] = float("nan")
    found: dict[str, list[Tensor]] = {}
    for backend in ("triton", "reference"):
        x, own = inputs.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
        buffers = tuple(torch.zeros_like(w) for w in weights)
        with use_backend(backend):
            out = fused_mlp(x, own, n_used=count)
            out.backward(draw(70, 3, seed=3, device=kernel_device))
            fused_mlp(inputs, own, sink=GradientSink(buffers), n_used=count).sum().backward()
        found[backend] = [out.detach(), x.grad, *(w.grad for w in own), *buffers]
    names = ["result", "inputs", *(f"{kind}[{k}]" for kind in ("weights", "buffers") for k in range(3))]
    for name, got, want in zip(names, found["triton"], found["reference"], strict=True):
        assert_close(name, got, want, 1e-5)


def test_the_field_matches_the_reference(kernel_device: torch.device) -> None:
    shapes = [(16, 8), (6, 16), (16, 10), (16, 16), (3, 16)]
    weights = [draw(*s, seed=k, device=kernel_device) * (2 / s[1]) ** 0.5 for k, s in enumerate(shapes)]
    rays = torch.randint(0, 5, (70,), generator=generator(9)).int().to(kernel_device)
    leaves = [draw(70, 8, seed=6, device=kernel_device), draw(5, 4, seed=7, device=kernel_device), *weights]
    found: dict[str, list[Tensor]] = {}
    for backend in ("triton", "reference"):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        with use_backend(backend):
            raw = ngp_field(own[0], own[1], rays, NgpWeights(*own[2:]))
        raw.backward(draw(70, 4, seed=8, device=kernel_device))
        found[backend] = [raw.detach(), *(leaf.grad for leaf in own)]
    names = ("raw", "encoding", "directions", *NgpWeights._fields)
    for name, got, want in zip(names, found["triton"], found["reference"], strict=True):
        assert_close(name, got, want, 1e-5)


def test_second_derivatives_exist(kernel_device: torch.device) -> None:
    x = draw(40, 5, seed=1, device=kernel_device)
    weights = [draw(8, 5, seed=2, device=kernel_device), draw(1, 8, seed=3, device=kernel_device)]
    found = []
    for backend in ("triton", "reference"):
        leaf, own = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
        with use_backend(backend):
            (slope,) = torch.autograd.grad(fused_mlp(leaf, own).sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        found.append([w.grad for w in own])
    for k, (got, want) in enumerate(zip(*found, strict=True)):
        assert_close(f"weights[{k}]", got, want, 1e-5)


def test_the_wide_network_matches_the_reference(kernel_device: torch.device) -> None:
    shapes = [(20, 7), (20, 20), (20, 27), (5, 20)]
    weights = [draw(*s, seed=k, device=kernel_device) * (2 / s[1]) ** 0.5 for k, s in enumerate(shapes)]
    leaves = [draw(70, 7, seed=6, device=kernel_device), *weights]
    leaves += [0.1 * draw(s[0], seed=10 + k, device=kernel_device) for k, s in enumerate(shapes)]
    found: dict[str, list[Tensor]] = {}
    for backend in ("triton", "reference"):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        with use_backend(backend):
            out = wide_mlp(own[0], own[1:5], own[5:], skip=2)
        out.backward(draw(70, 5, seed=8, device=kernel_device))
        found[backend] = [out.detach(), *(leaf.grad for leaf in own)]
    names = ["result", "inputs", *(f"{kind}[{k}]" for kind in ("weights", "biases") for k in range(4))]
    for name, got, want in zip(names, found["triton"], found["reference"], strict=True):
        assert_close(name, got, want, 2e-5)


@pytest.mark.parametrize("op", ["wide", "fused"])
def test_autocast_is_followed_by_every_product(kernel_device: torch.device, op: str) -> None:
    """The result has autocast's type, as that of a torch layer, and the masters' gradients are fp32."""
    x = draw(40, 8, seed=1, device=kernel_device).requires_grad_()
    weights = [draw(16, 8, seed=2, device=kernel_device) / 3, draw(3, 16, seed=3, device=kernel_device) / 4]
    found = []
    for backend in ("triton", "reference"):
        own = [w.clone().requires_grad_() for w in weights]
        biases = [torch.zeros(16, device=kernel_device), torch.zeros(3, device=kernel_device)]
        with use_backend(backend), torch.autocast(kernel_device.type, dtype=torch.bfloat16):
            out = fused_mlp(x, own) if op == "fused" else wide_mlp(x, own, biases)
        assert out.dtype == torch.bfloat16
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *own])])
    for name, got, want in zip(("result", "inputs", "weights[0]", "weights[1]"), *found, strict=True):
        assert got.dtype == want.dtype
        assert_close(name, got.float(), want.float(), 0.03)
