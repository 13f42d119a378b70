"""The fused field: values and every gradient by name, unused rows, buffers, the look-ahead density."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, HashLayout, use_backend
from nerfturbo.ops.ngp import NgpDensity, NgpWeights, ngp_field
from nerfturbo.types import Aabb

from ..ops.cases import assert_as_good_as_torch, assert_close, assert_within, generator, steady_rows

BACKENDS = ["cpu", "triton"]
ODD = (20, 9, 10, 24)  # encoding, directions, features, hidden: nothing is a power of two
PLAIN = (32, 16, 16, 64)
WIDE = (20, 16, 16, 100)  # two launches for the colour network's gradients


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_weights(widths: tuple[int, int, int, int], device: torch.device) -> NgpWeights:
    encoding, directions, features, hidden = widths
    draw = generator(3)
    shapes = [(hidden, encoding), (features, hidden), (hidden, directions + features), (hidden, hidden), (3, hidden)]
    return NgpWeights(*((torch.randn(s, generator=draw) * (2 / s[1]) ** 0.5).to(device) for s in shapes))


def make_inputs(widths: tuple[int, int, int, int], n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = generator(4)
    encoding = torch.randn(widths[0], n, generator=draw).to(device).t()  # feature-major
    directions = torch.randn(max(1, n // 9), widths[1], generator=draw).to(device)
    rays = torch.randint(0, directions.shape[0], (n,), generator=draw).sort().values.int().to(device)
    return encoding, directions, rays


def run(
    backend: str,
    encoding: Tensor,
    directions: Tensor,
    rays: Tensor | None,
    weights: NgpWeights,
    rows: Tensor | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """raw and all gradients, by name, under a random gradient of raw: of all rows, or of those given."""
    leaves = [t.detach().clone().requires_grad_() for t in (encoding, directions, *weights)]
    with use_backend(backend):  # type: ignore[arg-type]
        raw = ngp_field(leaves[0], leaves[1], rays, NgpWeights(*leaves[2:]), **options)  # type: ignore[arg-type]
        grad = torch.randn(raw.shape, generator=generator(5)).to(raw)
        raw.backward(grad if rows is None else grad * rows[:, None])
    names = ["encoding", "directions", *NgpWeights._fields]
    return {"raw": raw.detach(), **{name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    for name, value in want.items():
        assert_close(name, got[name].to(value.dtype), value, tolerance)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("widths", "n"), [(PLAIN, 128), (ODD, 77), (WIDE, 77), (PLAIN, 1), (ODD, 0)])
def test_matches_reference(
    kernel_device: torch.device, backend: str, widths: tuple[int, int, int, int], n: int
) -> None:
    device = kernel_device if backend == "triton" else torch.device("cpu")
    inputs, weights = make_inputs(widths, n, device), make_weights(widths, device)
    compare(run(backend, *inputs, weights), run("reference", *inputs, weights), 1e-5)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("widths", "n"), [(PLAIN, 128), (ODD, 77), (ODD, 0)])
def test_without_rays_every_sample_has_its_own_direction(
    kernel_device: torch.device, backend: str, widths: tuple[int, int, int, int], n: int
) -> None:
    device = kernel_device if backend == "triton" else torch.device("cpu")
    encoding, _, _ = make_inputs(widths, n, device)
    directions, weights = torch.randn(n, widths[1], generator=generator(8)).to(device), make_weights(widths, device)
    rows = torch.arange(n, dtype=torch.int32, device=device)
    want = run("reference", encoding, directions, rows, weights)
    compare(run(backend, encoding, directions, None, weights), want, 1e-5)
    compare(run("reference", encoding, directions, None, weights), want, 1e-6)


def test_half_encoding_trains_fp32_weights(kernel_device: torch.device) -> None:
    encoding, directions, rays = make_inputs(PLAIN, 128, kernel_device)
    weights = make_weights(PLAIN, kernel_device)
    got = run("triton", encoding.half(), directions, rays, weights)
    assert got["raw"].dtype == torch.float32
    assert got["raw"].t().is_contiguous(), "raw is stored channel by channel"
    assert got["density_in"].dtype == torch.float32
    compare(got, run("reference", encoding.half(), directions, rays, weights), 5e-2)  # ReLUs near zero flip


@pytest.mark.usefixtures("poisoned_empty")
def test_unused_rows_are_zero_and_give_no_gradient(kernel_device: torch.device) -> None:
    encoding, directions, rays = make_inputs(PLAIN, 192, kernel_device)
    weights = make_weights(PLAIN, kernel_device)
    count = torch.tensor(70, dtype=torch.int32, device=kernel_device)
    encoding = encoding.clone()
    encoding[70:] = float("nan")
    got = run("triton", encoding, directions, rays, weights, n_used=count)
    assert (got["raw"][70:] == 0).all()
    assert (got["encoding"][70:] == 0).all()
    compare(got, run("reference", encoding, directions, rays, weights, n_used=count), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_sink_takes_the_weights_gradients(kernel_device: torch.device, backend: str) -> None:
    inputs, weights = make_inputs(PLAIN, 64, kernel_device), make_weights(PLAIN, kernel_device)
    buffers = tuple(torch.ones_like(w) for w in weights)
    got = run(backend, *inputs, weights, sink=GradientSink(buffers))
    want = run("reference", *inputs, weights)
    for name, buffer in zip(NgpWeights._fields, buffers, strict=True):
        assert got[name] is None
        assert_close(name, buffer - 1, want[name], 1e-5)
    assert_close("encoding", got["encoding"], want["encoding"], 1e-5)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("widths", [PLAIN, WIDE])
def test_deterministic_mode_matches_reference(kernel_device: torch.device, widths: tuple[int, int, int, int]) -> None:
    inputs, weights = make_inputs(widths, 192, kernel_device), make_weights(widths, kernel_device)
    compare(run("triton", *inputs, weights), run("reference", *inputs, weights), 1e-5)
    own = inputs[0][: inputs[1].shape[0]], inputs[1], None
    compare(run("triton", *own, weights), run("reference", *own, weights), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("levels", "features", "hidden"), [(3, 2, 64), (2, 4, 24), (2, 1, 16)])
def test_density_matches_reference(
    kernel_device: torch.device, backend: str, levels: int, features: int, hidden: int
) -> None:
    device = kernel_device if backend == "triton" else torch.device("cpu")
    layout = HashLayout(n_levels=levels, n_features=features, log2_entries=8, base_resolution=4, max_resolution=300)
    draw = generator(6)
    positions = torch.rand(45, 3, generator=draw).to(device)
    table = torch.randn(layout.n_entries, features, generator=draw).to(device)
    weights = (torch.randn(hidden, layout.n_outputs, generator=draw), torch.randn(5, hidden, generator=draw))
    weights = (weights[0].to(device), weights[1].to(device))
    count = torch.tensor(40, dtype=torch.int32, device=device)
    field = NgpDensity(Aabb.cube(1.0), table, layout, weights)
    for options in ({}, {"n_used": count}):
        with use_backend(backend):  # type: ignore[arg-type]
            got = field.at(positions, logits=True, **options)
        with use_backend("reference"):
            want = field.at(positions, logits=True, **options)
        assert_close("logit", got, want, 1e-5)
    with use_backend(backend):  # type: ignore[arg-type]
        assert field.at(positions[:0], logits=True).shape == (0,)
        scale = 20.0 / field.at(positions, logits=True).abs().max()  # the largest saturate
        steep = replace(field, weights=(weights[0], weights[1] * scale))
        logits = steep.at(positions, logits=True)
        assert_close("densities", steep.at(positions), logits.clamp(max=15.0).exp(), 1e-5)


def test_wrong_weights_are_named(kernel_device: torch.device) -> None:
    inputs, weights = make_inputs(PLAIN, 4, kernel_device), make_weights(PLAIN, kernel_device)
    with pytest.raises(InputError, match="colour_in"):
        ngp_field(*inputs, weights._replace(colour_in=weights.colour_in[:, 1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", [PLAIN, (40, 16, 16, 128)])
def test_real_shapes(dtype: torch.dtype, widths: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    encoding, directions, rays = make_inputs(widths, 1 << 18, device)
    weights = make_weights(widths, device)
    count = torch.tensor(226_001, dtype=torch.int32, device=device)
    got = run("triton", encoding.to(dtype), directions, rays, weights, n_used=count)
    monkeypatch.setattr("nerfturbo.ops._dispatch._in_autocast", lambda tensor: False)
    with torch.autocast("cuda", dtype=dtype):  # inside the reference, which itself computes in fp32
        half = run("reference", encoding.to(dtype), directions, rays, weights, n_used=count)
    truth = run("reference", encoding.to(dtype).float(), directions, rays, weights, n_used=count)
    assert_as_good_as_torch(got, half, truth)
    if dtype == torch.bfloat16:
        assert_within(got, truth, 0.1)


def test_half_is_off_by_its_rounding_alone(kernel_device: torch.device) -> None:
    n = 1 << 18 if kernel_device.type == "cuda" else 256
    encoding, directions, rays = make_inputs(PLAIN, n, kernel_device)
    encoding, directions = encoding.half().float(), directions.half().float()
    weights = NgpWeights(*(w.half().float() for w in make_weights(PLAIN, kernel_device)))
    before = [encoding @ weights.density_in.t()]
    features = before[0].relu() @ weights.density_out.t()
    before.append(torch.cat([directions[rays.long()], features], dim=-1) @ weights.colour_in.t())
    before.append(before[1].relu() @ weights.colour_mid.t())
    rows = steady_rows(before, torch.float16)
    got = run("triton", encoding.half(), directions, rays, weights, rows)
    assert_within(got, run("reference", encoding, directions, rays, weights, rows), 0.003)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradients_are_bit_equal() -> None:
    device = torch.device("cuda")
    encoding, directions, rays = make_inputs(PLAIN, 1 << 17, device)
    weights = make_weights(PLAIN, device)
    first, second = (run("triton", encoding.half(), directions, rays, weights) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_sink_reports_a_gradient_that_is_not_finite(kernel_device: torch.device, bad: float) -> None:
    encoding, directions, rays = make_inputs(PLAIN, 64, kernel_device)
    weights = make_weights(PLAIN, kernel_device)
    leaves = NgpWeights(*(w.clone().requires_grad_() for w in weights))
    for channel, expected in ((0, 1), (3, 1), (None, 0)):
        flag = torch.zeros((), device=kernel_device)
        sink = GradientSink(tuple(torch.zeros_like(w) for w in weights), flag)
        grad = torch.ones(64, 4, device=kernel_device)
        if channel is not None:
            grad[7, channel] = bad
        with use_backend("triton"):
            ngp_field(encoding, directions, rays, leaves, sink=sink).backward(grad)
        assert flag.item() == expected
