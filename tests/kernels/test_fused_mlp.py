"""What the fused MLP's kernels add to the op: unused rows, gradient buffers, several launches, a deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, fused_mlp, use_backend

from ..ops.cases import assert_as_good_as_torch, assert_close, assert_within, generator, steady_rows

REAL_WIDTHS = [(32, 64, 16), (32, 64, 64, 16), (16, 128, 128, 128, 3), (48, 16)]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make(widths: tuple[int, ...], n: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    draw = generator(1)
    weights = [(torch.randn(b, a, generator=draw) * (2 / a) ** 0.5).to(device) for a, b in pairwise(widths)]
    return torch.randn(n, widths[0], generator=draw).to(device), weights


def run(
    backend: str, inputs: Tensor, weights: list[Tensor], rows: Tensor | None = None, **options: object
) -> dict[str, Tensor]:
    """Result and all gradients, by name, under a random gradient of the result: of all rows, or of those given."""
    leaves = [t.detach().clone().requires_grad_() for t in (inputs, *weights)]
    with use_backend(backend):  # type: ignore[arg-type]
        out = fused_mlp(leaves[0], leaves[1:], **options)  # type: ignore[arg-type]
        grad = torch.randn(out.shape, generator=generator(2)).to(out)
        out.backward(grad if rows is None else grad * rows[:, None])
    names = ["inputs", *(f"weights[{k}]" for k in range(len(weights)))]
    return {"result": out.detach(), **{name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, value in want.items():
        assert_close(name, got[name].to(value.dtype), value, tolerance)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("widths", [(32, 64, 16), (20, 33, 9, 3)])
@pytest.mark.parametrize("n", [70, 192])
def test_unused_rows_are_zero_and_give_no_gradient(
    kernel_device: torch.device, widths: tuple[int, ...], n: int
) -> None:
    inputs, weights = make(widths, n, kernel_device)
    inputs[50:] = float("nan")
    count = torch.tensor(50, dtype=torch.int32, device=kernel_device)
    got = run("triton", inputs, weights, n_used=count)
    assert (got["result"][50:] == 0).all()
    assert (got["inputs"][50:] == 0).all()
    compare(got, run("reference", inputs, weights, n_used=count), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_sink_takes_the_weights_gradients(kernel_device: torch.device, backend: str) -> None:
    inputs, weights = make((32, 16, 5), 33, kernel_device)
    buffers = tuple(torch.ones_like(w) for w in weights)
    got, want = run(backend, inputs, weights, sink=GradientSink(buffers)), run("reference", inputs, weights)
    for k, buffer in enumerate(buffers):
        assert got[f"weights[{k}]"] is None
        assert_close(f"weights[{k}]", buffer - 1, want[f"weights[{k}]"], 1e-5)
    assert_close("inputs", got["inputs"], want["inputs"], 1e-5)


def test_only_the_gradients_that_are_wanted(kernel_device: torch.device) -> None:
    inputs, weights = make((16, 32, 4), 20, kernel_device)
    weights[1].requires_grad_()
    with use_backend("triton"):
        fused_mlp(inputs, weights).sum().backward()
    got = weights[1].grad
    weights[1].grad = None
    with use_backend("reference"):
        fused_mlp(inputs, weights).sum().backward()
    assert_close("weights[1]", got, weights[1].grad, 1e-5)


@pytest.mark.usefixtures("deterministic", "poisoned_empty")
def test_deterministic_mode_matches_reference(kernel_device: torch.device) -> None:
    inputs, weights = make((32, 64, 16), 200, kernel_device)
    compare(run("triton", inputs, weights), run("reference", inputs, weights), 1e-5)


def test_too_large_a_network_is_refused(kernel_device: torch.device) -> None:
    for widths in ((16, 256, 3), (256, 3), (16, 256)):
        inputs, weights = make(widths, 2, kernel_device)
        with use_backend("triton"), pytest.raises(InputError, match="wide"):
            fused_mlp(inputs, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", REAL_WIDTHS)
def test_real_shapes(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, weights = make(widths, 1 << 17, torch.device("cuda"))
    count = torch.tensor(100_001, dtype=torch.int32, device="cuda")
    got = run("triton", inputs.to(dtype), weights, n_used=count)
    half = run("reference", inputs.to(dtype), weights, n_used=count)
    truth = run("reference", inputs.to(dtype).float(), weights, n_used=count)
    assert_as_good_as_torch(got, half, truth)
    if dtype == torch.bfloat16:
        assert_within(got, truth, 0.1)


@pytest.mark.parametrize("widths", REAL_WIDTHS)
def test_half_is_off_by_its_rounding_alone(kernel_device: torch.device, widths: tuple[int, ...]) -> None:
    inputs, weights = make(widths, 1 << 17 if kernel_device.type == "cuda" else 256, kernel_device)
    inputs, weights = inputs.half().float(), [w.half().float() for w in weights]
    hidden, before = inputs, []
    for weight in weights[:-1]:
        before.append(hidden @ weight.t())
        hidden = before[-1].relu()
    rows = steady_rows(before, torch.float16) if before else None
    got = run("triton", inputs.half(), weights, rows)
    assert_within(got, run("reference", inputs, weights, rows), 0.003)


def test_what_does_not_fit_a_fused_kernel_runs_by_layers(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mlp = pytest.importorskip("nerfturbo.ops.mlp.triton")
    small = [torch.empty(64, 32, device="meta"), torch.empty(16, 64, device="meta")]
    large = [torch.empty(128, 128, device="meta")] * 3
    device = torch.device("cuda")
    for generation, shared, expected in (
        (9, 227, (1, 1, 0)),
        (8, 227, (1, 0, 0)),
        (8, 99, (1, 0, 0)),
        (7, 64, (0,) * 3),
    ):
        monkeypatch.setattr(_mlp, "_capability", lambda _, found=(generation, shared * 1024): found)
        assert tuple(_mlp.fits(w, torch.float16, device) for w in (small, large[:2], large)) == expected
    monkeypatch.setattr(_mlp, "fp32_precision", lambda: "ieee")
    assert not _mlp.fits(small, torch.float32, device)
    asked: list[tuple] = []
    monkeypatch.setattr(_mlp, "fits", lambda *given: asked.append(given))
    inputs, weights = make((32, 64, 16), 9, kernel_device)
    assert_within(run("triton", inputs, weights), run("reference", inputs, weights), 0.003)
    assert [(len(own), *rest) for own, *rest in asked] == [(2, torch.float32, inputs.device)]


def test_the_larger_tile_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/kernels/test_compile.py holds that what is said to fit does."""
    _mlp = pytest.importorskip("nerfturbo.ops.mlp.triton")
    device = torch.device("cuda")
    for widths, rows in (
        ((32, 64, 16), {(9, 227): 64, (8, 163): 64, (8, 99): 64}),
        ((40, 128, 16), {(9, 227): 128, (8, 163): 128, (8, 99): 64, (12, 99): 64}),
        ((128, 128, 16), {(9, 227): 128, (8, 163): 64, (8, 99): None}),
        ((128, 128, 128), {(9, 227): 64, (8, 163): None}),
        ((128, 16, 128), {(9, 227): 64, (8, 163): 64, (8, 99): None}),  # few weights, but wide tiles
    ):
        weights = [torch.empty(b, a, device="meta") for a, b in pairwise(widths)]
        for (generation, shared), expected in rows.items():
            monkeypatch.setattr(_mlp, "_capability", lambda _, found=(generation, shared * 1024): found)
            assert _mlp.fits(weights, torch.float16, device) == (expected is not None), (widths, generation, shared)
            tile = _mlp._tile(torch.empty(128, widths[0], dtype=torch.float16, device="meta"), weights, True)
            assert (tile["BLOCK"], tile["num_warps"]) == ((128, 8) if expected == 128 else (64, 4)), (widths, shared)


def test_a_gpu_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's GPUs count their generations otherwise: theirs have matrix cores, and 64 KiB where nothing is said."""
    _mlp = pytest.importorskip("nerfturbo.ops.mlp.triton")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))
    for hip, expected in ((None, (7, 1 << 16)), ("6.2", (9, 1 << 16))):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert _mlp._capability.__wrapped__(torch.device("cuda")) == expected


def test_sums_begin_at_aligned_addresses_and_share_no_memory() -> None:
    _mlp = pytest.importorskip("nerfturbo.ops.mlp.triton")
    weights = [torch.empty(size) for size in ((5, 7), (1, 32), (3, 11))]
    sums = _mlp.zero_sums(weights)
    assert [one.storage_offset() for one in sums] == [0, 64, 96] and sums[0].untyped_storage().nbytes() == 4 * 160
    for index, one in enumerate(sums):
        one.fill_(index + 1.0)
    assert [one.unique().tolist() for one in sums] == [[1.0], [2.0], [3.0]]
