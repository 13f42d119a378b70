"""A field's answer as one op: its three parts and their activations, values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.hash_encode import hash_encode
from nerfturbo.ops.ngp import NgpGrid, NgpWeights, ngp_field, ngp_query, skips_unused

from .cases import SMALL_LAYOUT, Target, assert_close, compare, generator, make_positions, make_table, require

OUTPUTS = ("rgb", "density")


def _inputs(n: int, hidden: int = 16, directions: int = 16) -> dict[str, Tensor]:
    draw = generator(7)
    features, encoding = 8, SMALL_LAYOUT.n_outputs
    sizes = ((hidden, encoding), (features, hidden), (hidden, directions + features), (hidden, hidden), (3, hidden))
    result = {"positions": make_positions(n), "directions": torch.randn(n, directions, generator=draw)}
    result["table"] = make_table(SMALL_LAYOUT)
    for name, size in zip(NgpWeights._fields, sizes, strict=True):
        result[name] = torch.randn(size, generator=draw) * (2.0 / size[1]) ** 0.5
    return result


def _query(positions: Tensor, directions: Tensor, table: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
    return ngp_query(positions, directions, None, NgpGrid(table, SMALL_LAYOUT), NgpWeights(**weights))


def _tolerance(target: Target) -> float:
    return 5e-3 if target.device == "cuda" else 5e-5  # tensor cores round products


@pytest.mark.parametrize("moving", [False, True])
def test_matches_reference(sized: tuple[Target, int], moving: bool, poisoned_empty: None):
    """With and without gradients to where points lie and whence they are seen."""
    target, n = sized
    require(target)
    inputs = _inputs(n)
    wanted = [name for name in inputs if moving or name not in ("positions", "directions")]
    compare(target, _query, inputs, wanted, names=OUTPUTS, tolerance=_tolerance(target))


def test_is_its_parts_in_a_row(target: Target):
    require(target)
    inputs = {name: value.to(target.device) for name, value in _inputs(50).items()}
    weights = NgpWeights(**{name: inputs[name] for name in NgpWeights._fields})
    inputs["table"] *= 100.0  # some densities saturate
    with use_backend(target.backend):
        grid = NgpGrid(inputs["table"], SMALL_LAYOUT)
        rgb, density = ngp_query(inputs["positions"], inputs["directions"], None, grid, weights)
        encoding = hash_encode(inputs["positions"], inputs["table"], SMALL_LAYOUT)
        logits = ngp_field(encoding, inputs["directions"], None, weights)
    assert bool((logits[:, 3] > 15.0).any())
    assert_close("rgb", rgb, torch.sigmoid(logits[:, :3]), 1e-5)
    assert_close("density", density, torch.exp(logits[:, 3].clamp(max=15.0)), 1e-5)


def test_reads_the_half_copy_and_trains_the_table(target: Target):
    require(target)
    inputs = {name: value.to(target.device) for name, value in _inputs(64).items()}
    weights = NgpWeights(**{name: inputs[name].requires_grad_() for name in NgpWeights._fields})
    table, half = torch.zeros_like(inputs["table"]).requires_grad_(), inputs["table"].half()
    seen = inputs["positions"], inputs["directions"]
    with use_backend(target.backend):
        out = ngp_query(*seen, None, NgpGrid(table, SMALL_LAYOUT, half), weights)
        (out[0].sum() + out[1].sum()).backward()
    with use_backend("reference"):
        want = ngp_query(*seen, None, NgpGrid(half.float(), SMALL_LAYOUT), weights)
    for name, mine, theirs in zip(OUTPUTS, out, want, strict=True):
        assert mine.dtype == torch.float32
        assert_close(name, mine, theirs, 1e-2)
    assert table.grad is not None and table.grad.dtype == torch.float32 and bool((table.grad != 0.0).any())


def test_deterministic_mode_matches_reference(target: Target):
    require(target)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        inputs = _inputs(70)
        compare(target, _query, inputs, list(inputs), names=OUTPUTS, tolerance=_tolerance(target))
    finally:
        torch.use_deterministic_algorithms(False)


def test_wrong_shapes_are_named(target: Target):
    require(target)
    good = {name: value.to(target.device) for name, value in _inputs(5).items()}
    wrong = {"positions": good["positions"][:, :2], "directions": good["directions"][:4], "table": good["table"][1:]}
    wrong["colour_mid"] = good["colour_mid"][1:]
    for name, value in wrong.items():
        with use_backend(target.backend), pytest.raises(InputError, match=name):
            _query(**good | {name: value})


def test_the_reference_leaves_out_unused_rows() -> None:
    inputs = _inputs(4)
    weights = NgpWeights(*(inputs[name] for name in NgpWeights._fields))
    with use_backend("reference"):
        assert skips_unused(inputs["table"], weights) is True  # as its docstring says: rendering may ask for many
        seen = inputs["positions"], inputs["directions"], None, NgpGrid(inputs["table"], SMALL_LAYOUT), weights
        whole = ngp_query(*seen)
        for used in (0, 3, 4):
            part = ngp_query(*seen, n_used=torch.tensor(used, dtype=torch.int32))
            for mine, theirs in zip(part, whole, strict=True):
                assert mine.shape == theirs.shape
                assert_close("used rows", mine[:used], theirs[:used])
