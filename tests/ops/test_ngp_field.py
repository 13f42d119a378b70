"""Both networks of Instant-NGP as one op: values, every gradient, sinks, unused rows, repeated backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, use_backend
from nerfturbo.ops.hash_encode import hash_encode
from nerfturbo.ops.ngp import NgpDensity, NgpWeights, ngp_field
from nerfturbo.types import Aabb

from .cases import (
    SMALL_LAYOUT,
    Target,
    assert_close,
    assert_grads_match,
    compare,
    generator,
    make_positions,
    make_table,
    require,
    run,
)

NAMES = ("encoding", "directions", *NgpWeights._fields)


def _inputs(
    n: int, *, encoding: int = 32, hidden: int = 64, features: int = 16, directions: int = 16
) -> dict[str, Tensor]:
    draw = generator(5)
    sizes = ((hidden, encoding), (features, hidden), (hidden, directions + features), (hidden, hidden), (3, hidden))
    result = {"encoding": torch.randn(n, encoding, generator=draw)}
    result["directions"] = torch.randn(n // 8 + 1, directions, generator=draw)
    for name, size in zip(NgpWeights._fields, sizes, strict=True):
        result[name] = torch.randn(size, generator=draw) / size[1] ** 0.5
    return result


def _rays(n: int) -> Tensor:
    return torch.sort(torch.randint(0, n // 8 + 1, (n,), generator=generator(6))).values.int()


def _field(n: int, device: str, **options):
    rays = _rays(n).to(device)

    def function(encoding: Tensor, directions: Tensor, **weights: Tensor) -> Tensor:
        return ngp_field(encoding, directions, rays, NgpWeights(**weights), **options)

    return function


def _tolerance(target: Target) -> float:
    return 5e-3 if target.device == "cuda" else 2e-5  # tensor cores round products


def test_matches_reference(sized: tuple[Target, int], poisoned_empty: None):
    target, n = sized
    require(target)
    compare(target, _field(n, target.device), _inputs(n), NAMES, names=("raw",), tolerance=_tolerance(target))


def test_widths_that_fill_no_register(sized: tuple[Target, int]):
    """Sizes that are no multiple of four, as a user may choose them."""
    target, n = sized
    require(target)
    inputs = _inputs(n, encoding=30, hidden=20, features=15, directions=9)
    compare(target, _field(n, target.device), inputs, NAMES, names=("raw",), tolerance=_tolerance(target))


@pytest.mark.parametrize("hidden", [96, 136])
def test_networks_too_wide_for_one_kernel(target: Target, hidden: int, monkeypatch: pytest.MonkeyPatch):
    """Two kernels up to 128 (`fused_mlp`), the library's products beyond."""
    require(target)
    if target.backend == "triton":  # a GPU with little shared memory
        monkeypatch.setattr("nerfturbo.ops.mlp.triton.fits", lambda *_, beside=0: not beside and hidden <= 128)
    n = target.pick(300, 20)
    inputs = _inputs(n, hidden=hidden)
    compare(target, _field(n, target.device), inputs, NAMES, names=("raw",), tolerance=_tolerance(target))


def test_feature_major_encoding(target: Target):
    """The encoder stores features first: no copy, and the gradient comes back the same way."""
    require(target)
    n = target.pick(300, 20)
    plain = _field(n, target.device)
    inputs = {name: t.to(target.device) for name, t in _inputs(n).items()}

    def turned(encoding: Tensor, **rest: Tensor) -> Tensor:
        return plain(encoding.t().contiguous().t(), **rest)

    got, got_grads = run(target.backend, turned, inputs, NAMES)
    want, want_grads = run("reference", plain, inputs, NAMES)
    assert_close("raw", got[0], want[0], _tolerance(target))
    assert_grads_match(NAMES, got_grads, want_grads, _tolerance(target))


@pytest.mark.parametrize("used", [0, 1, 17])
def test_rows_past_the_count_are_zero(target: Target, used: int, poisoned_empty: None):
    require(target)
    n = target.pick(300, 20)
    inputs = _inputs(n)
    inputs["encoding"][used:] = float("nan")
    count = torch.tensor(used, dtype=torch.int32, device=target.device)
    field = _field(n, target.device, n_used=count)
    inputs = {name: t.to(target.device) for name, t in inputs.items()}
    outputs, grads = run(target.backend, field, inputs, NAMES)
    assert not outputs[0][used:].any()
    assert not grads[0][used:].any()
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


def test_a_sink_takes_the_gradients_of_the_weights(target: Target):
    require(target)
    n = target.pick(300, 20)
    inputs = {name: t.to(target.device) for name, t in _inputs(n).items()}
    _, want = run("reference", _field(n, target.device), inputs, NAMES)
    buffers = tuple(torch.ones_like(inputs[name]) for name in NgpWeights._fields)
    found_inf = torch.zeros((), device=target.device)
    field = _field(n, target.device, sink=GradientSink(buffers, found_inf))
    _, got = run(target.backend, field, inputs, ["encoding"])
    assert_grads_match(["encoding"], got, want[:1], _tolerance(target))
    weights = {name: inputs[name].requires_grad_() for name in NgpWeights._fields}
    with use_backend(target.backend):
        out = field(inputs["encoding"], inputs["directions"], **weights)
        cotangent = torch.randn(out.shape, generator=generator(7)).to(out)
        for buffer in buffers:
            buffer.fill_(1.0)
        out.backward(cotangent)
    assert all(weight.grad is None for weight in weights.values())
    assert_grads_match(NgpWeights._fields, [buffer - 1.0 for buffer in buffers], want[2:], _tolerance(target))
    assert found_inf.item() == 0.0


def test_a_sink_is_told_of_a_gradient_that_is_not_finite(target: Target):
    require(target)
    inputs = {name: t.to(target.device).requires_grad_(name != "directions") for name, t in _inputs(20).items()}
    buffers = tuple(torch.zeros_like(inputs[name]) for name in NgpWeights._fields)
    found_inf = torch.zeros((), device=target.device)
    with use_backend(target.backend):
        out = _field(20, target.device, sink=GradientSink(buffers, found_inf))(**inputs)
        out.backward(torch.full_like(out, float("inf")))
    assert found_inf.item() == 1.0


def test_a_second_backward_gives_the_same_gradients(target: Target):
    require(target)
    n = target.pick(300, 20)
    inputs = {name: t.to(target.device).requires_grad_() for name, t in _inputs(n).items()}
    with use_backend(target.backend):
        out = _field(n, target.device)(**inputs)
        if target.backend == "cpu":
            from nerfturbo.ops.mlp.cpu import POINTS

            assert out.grad_fn.kept.shape[0] == -(-n // POINTS)  # blocks of activations
        other = _field(n, target.device)(**inputs)  # reuses whatever the first one left
        first = torch.autograd.grad(out.sum(), list(inputs.values()), retain_graph=True)
        between = torch.autograd.grad(other.square().sum(), list(inputs.values()))
        second = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert_grads_match(NAMES, second, first, 1e-6)
    assert not torch.equal(between[0], first[0])


def _density(table: Tensor, weights: tuple[Tensor, Tensor]) -> NgpDensity:
    return NgpDensity(Aabb.cube(1.0), table, SMALL_LAYOUT, weights)


def test_density_matches_reference(sized: tuple[Target, int], poisoned_empty: None):
    target, n = sized
    require(target)
    inputs = _inputs(1, encoding=SMALL_LAYOUT.n_outputs)
    tensors = {
        "positions": make_positions(n),
        "table": make_table(SMALL_LAYOUT),
        "density_in": inputs["density_in"],
        "density_out": inputs["density_out"],
    }

    def function(positions: Tensor, table: Tensor, density_in: Tensor, density_out: Tensor) -> Tensor:
        return _density(table, (density_in, density_out)).at(positions, logits=True)

    compare(target, function, tensors, tolerance=5e-3 if target.device == "cuda" else 1e-4)


def test_density_is_the_last_channel_of_the_field():
    inputs = _inputs(50, encoding=SMALL_LAYOUT.n_outputs)
    positions, table = make_positions(50), make_table(SMALL_LAYOUT)
    weights = NgpWeights(*(inputs[name] for name in NgpWeights._fields))
    raw = ngp_field(hash_encode(positions, table, SMALL_LAYOUT), inputs["directions"], _rays(50), weights)
    assert_close("density", _density(table, weights[:2]).at(positions, logits=True), raw[:, 3], 1e-5)


def test_gradcheck():
    inputs = _inputs(4, encoding=3, hidden=5, features=4, directions=2)
    tensors = [t.double().requires_grad_() for t in inputs.values()]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda encoding, directions, *weights: ngp_field(encoding, directions, _rays(4), NgpWeights(*weights)),
            tensors,
        )


def test_errors_name_the_argument():
    inputs = _inputs(4)
    weights = {name: inputs[name] for name in NgpWeights._fields}
    with pytest.raises(InputError, match="colour_in: expected shape"):
        ngp_field(inputs["encoding"], inputs["directions"][:, :9], _rays(4), NgpWeights(**weights))
    with pytest.raises(InputError, match="ray_indices: expected"):
        ngp_field(inputs["encoding"], inputs["directions"], _rays(4).long(), NgpWeights(**weights))
