"""Encodings of regions: means over points, levels faded as a Gaussian in a cell is; every gradient by backend."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, HashLayout, hash_encode, use_backend
from nerfturbo.ops.hash_encode import level_weights
from nerfturbo.ops.hash_encode.reference import thin_out

from .cases import (
    SMALL_LAYOUT,
    Target,
    assert_close,
    compare,
    generator,
    make_positions,
    make_table,
    require,
    spare_interpreter,
)

# Coarse levels, which a GPU adds up in runs, and a fine one.
WIDE = HashLayout(n_levels=3, n_features=4, log2_entries=9, base_resolution=5, max_resolution=700)


def _case(n: int, points: int, layout: HashLayout, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    footprints = torch.rand(n, points, generator=generator(1)) ** 3 * 0.3
    footprints[:: max(1, n // 3)] = 0.0
    positions = make_positions(n * points).view(points, n, 3).transpose(0, 1)  # stored point by point
    return {"positions": positions, "footprints": footprints, "table": make_table(layout, dtype=dtype)}


def _encode(layout: HashLayout, **options: object):
    return lambda positions, footprints, table: hash_encode(
        positions, table, layout, footprints=footprints, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("points", [1, 6])
@pytest.mark.parametrize("used", [None, 0.6])
def test_matches_reference(sized: tuple[Target, int], points: int, used: float | None, poisoned_empty: None):
    target, n = sized
    require(target)
    spare_interpreter(target, unless=n < 2 or points == 6)
    inputs, count = _case(n, points, WIDE if points == 6 else SMALL_LAYOUT), None
    if used is not None:
        count = torch.tensor(int(used * n), dtype=torch.int32, device=target.device)
        for name in ("positions", "footprints"):
            inputs[name] = inputs[name].clone()
            inputs[name][int(used * n) :] = float("nan")
    function = _encode(WIDE if points == 6 else SMALL_LAYOUT, n_used=count)
    compare(target, function, inputs, ["positions", "table"], tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_halves_and_any_strides(target: Target, dtype: torch.dtype, contiguous: bool):
    require(target)
    inputs = _case(40, 3, SMALL_LAYOUT, dtype)
    if contiguous:
        inputs = {name: value.contiguous() for name, value in inputs.items()}
    compare(target, _encode(SMALL_LAYOUT), inputs, ["positions", "table"], tolerance=1e-2)


def test_one_point_without_a_footprint_is_the_encoding(target: Target):
    require(target)
    inputs = _case(50, 1, SMALL_LAYOUT)
    positions, table = inputs["positions"].to(target.device), inputs["table"].to(target.device)
    zero = torch.zeros(50, 1, device=target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        one = hash_encode(positions, table, SMALL_LAYOUT, footprints=zero)
        same = hash_encode(positions.expand(50, 6, 3), table, SMALL_LAYOUT, footprints=zero.expand(50, 6))
        plain = hash_encode(positions[:, 0], table, SMALL_LAYOUT)
    assert_close("one point", one, plain)
    assert_close("six points in one place", same, plain)


@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_a_sink_takes_what_every_point_gives(backend: str, kernel_device: torch.device):
    device = kernel_device if backend == "triton" else torch.device("cpu")
    inputs = {name: value.to(device) for name, value in _case(70, 3, WIDE).items()}
    master = inputs.pop("table").requires_grad_()
    grad = torch.randn(70, WIDE.n_outputs, generator=generator(2)).to(device)
    with use_backend("reference"):
        hash_encode(table=master, layout=WIDE, **inputs).backward(grad)  # type: ignore[arg-type]
    want, master.grad, buffer = master.grad, None, torch.ones_like(master)
    flag = torch.zeros((), device=device)
    with use_backend(backend):  # type: ignore[arg-type]
        options = {"half": master.detach().half(), "sink": GradientSink((buffer,), flag)}
        out = hash_encode(table=master, layout=WIDE, **inputs, **options)  # type: ignore[arg-type]
        out.backward(grad.half())
    assert out.dtype == torch.float16 and master.grad is None and flag.item() == 0 and want is not None
    assert_close("buffer", buffer - 1.0, want, 5e-3)


def test_thinning_counts_a_region_once(kernel_device: torch.device):
    """What goes is chosen by the first point; what stays goes to all of them."""
    layout = HashLayout(n_levels=2, n_features=2, log2_entries=8, base_resolution=600, max_resolution=4000)
    inputs = {name: value.to(kernel_device) for name, value in _case(200, 3, layout).items()}
    inputs["positions"] = torch.rand(3, 200, 3, generator=generator(4)).to(kernel_device).transpose(0, 1)
    table = inputs.pop("table").requires_grad_()
    grad, buffer = torch.randn(200, 4, generator=generator(2)).to(kernel_device).pow(3), torch.zeros_like(table)
    with use_backend("triton"):
        options = {"sink": GradientSink((buffer,), thin=1.5)}
        hash_encode(table=table, layout=layout, **inputs, **options).backward(grad)  # type: ignore[arg-type]
    thinned = thin_out(grad, inputs["positions"][:, 0], layout, 1.5)
    assert 0.2 < (thinned == 0).float().mean().item() < 0.8
    with use_backend("reference"):
        hash_encode(table=table, layout=layout, **inputs).backward(thinned)  # type: ignore[arg-type]
    assert table.grad is not None
    assert_close("buffer", buffer, table.grad)


def test_the_weight_is_the_share_of_a_gaussian_in_a_cell():
    """Of a normal variable with this deviation, the share within half a cell of its middle."""
    footprint, draw = 0.01, torch.randn(400_000, generator=generator())
    weights = level_weights(torch.tensor([footprint]), SMALL_LAYOUT)[0]
    for level, weight in zip(SMALL_LAYOUT.levels, weights, strict=True):
        inside = ((draw * footprint).abs() < 0.5 / level.scale).float().mean().item()
        assert weight.item() == pytest.approx(inside, abs=0.003)
        assert weight.item() == pytest.approx(math.erf(1.0 / (math.sqrt(8.0) * footprint * level.scale)), rel=1e-5)


def test_nothing_is_faded_at_a_point_and_the_finest_first():
    weights = level_weights(torch.tensor([0.0, 0.02]), SMALL_LAYOUT)
    assert torch.equal(weights[0], torch.ones(SMALL_LAYOUT.n_levels))
    assert bool((weights[1, 1:] < weights[1, :-1]).all())


def test_gradcheck():
    inputs = {name: value.double() for name, value in _case(4, 3, SMALL_LAYOUT).items()}
    positions = inputs["positions"].clamp(0.05, 0.95).requires_grad_()
    layout = HashLayout(n_levels=1, n_features=2, log2_entries=9, base_resolution=4, max_resolution=4)
    table = inputs["table"][: layout.n_entries].detach().requires_grad_()
    with use_backend("reference"):
        encode = lambda x, t: hash_encode(x, t, layout, footprints=inputs["footprints"])  # noqa: E731
        assert torch.autograd.gradcheck(encode, (positions, table))


def test_no_rows(target: Target):
    require(target)
    compare(target, _encode(SMALL_LAYOUT), _case(0, 6, SMALL_LAYOUT), ["positions", "table"])


def test_errors_name_the_argument():
    table, footprints = make_table(SMALL_LAYOUT), torch.zeros(3, 2)
    for shape, words in (((3, 3), r"positions: expected shape \(n, points, 3\)"), ((3, 4, 3), "footprints: expected")):
        with pytest.raises(InputError, match=words):
            hash_encode(torch.zeros(shape), table, SMALL_LAYOUT, footprints=footprints)
    with pytest.raises(InputError, match="positions: expected one point or more in each row"):
        hash_encode(torch.zeros(3, 0, 3), table, SMALL_LAYOUT, footprints=footprints[:, :0])
