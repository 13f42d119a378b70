"""Hash encoding: linear in the table, exact at nodes, continuous; gradients to table and positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, HashLayout, hash_encode, use_backend
from nerfturbo.ops.hash_encode.reference import table_rows

from .cases import (
    SMALL_LAYOUT,
    Target,
    assert_close,
    assert_grads_match,
    compare,
    make_positions,
    make_table,
    require,
    run,
    spare_interpreter,
)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sink_takes_the_gradient_of_the_table(backend: Any):
    positions, table = make_positions(40), make_table(SMALL_LAYOUT).requires_grad_()
    with use_backend(backend):
        hash_encode(positions, table, SMALL_LAYOUT).square().sum().backward()
        want, table.grad = table.grad, None
        buffer = torch.ones_like(table)
        hash_encode(positions, table, SMALL_LAYOUT, sink=GradientSink((buffer,))).square().sum().backward()
    assert table.grad is None and want is not None
    assert_close("buffer", buffer - 1.0, want, 1e-5)


def _tolerance(dtype: torch.dtype) -> float | None:
    return 1e-4 if dtype == torch.float32 else None  # sums of many contributions, in another order


def test_matches_reference(sized: tuple[Target, int], poisoned_empty: None):
    target, n = sized
    require(target)
    inputs = {"positions": make_positions(n), "table": make_table(SMALL_LAYOUT)}
    compare(
        target,
        lambda positions, table: hash_encode(positions, table, SMALL_LAYOUT),
        inputs,
        ["positions", "table"],
        tolerance=1e-4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_features", [1, 2, 4, 8])
def test_features_and_dtypes(target: Target, n_features: int, dtype: torch.dtype):
    require(target)
    spare_interpreter(target, unless=n_features == 2 or (dtype == torch.float32 and n_features < 8))
    layout = replace(SMALL_LAYOUT, n_features=n_features)
    inputs = {"positions": make_positions(target.pick(257, 20)), "table": make_table(layout, dtype=dtype)}
    compare(
        target,
        lambda positions, table: hash_encode(positions, table, layout),
        inputs,
        ["positions", "table"],
        tolerance=_tolerance(dtype),
    )


@pytest.mark.parametrize("wanted", [["table"], ["positions"], []])
def test_only_the_gradients_that_are_needed(target: Target, wanted: list[str]):
    require(target)
    inputs = {"positions": make_positions(target.pick(129, 20)), "table": make_table(SMALL_LAYOUT)}
    function = lambda positions, table: hash_encode(positions, table, SMALL_LAYOUT)  # noqa: E731
    compare(target, function, inputs, wanted, tolerance=1e-4)


def test_real_layout(target: Target):
    """Sixteen levels up to a resolution of 2048: dense, hashed, and all the scales between."""
    require(target)
    layout = HashLayout(log2_entries=14)
    inputs = {"positions": make_positions(target.pick(3001, 20)), "table": make_table(layout)}
    function = lambda positions, table: hash_encode(positions, table, layout)  # noqa: E731
    got, got_grads = run(target.backend, function, {n: t.to(target.device) for n, t in inputs.items()}, list(inputs))
    want, want_grads = run("reference", function, {n: t.to(target.device) for n, t in inputs.items()}, list(inputs))
    # At a scale of 2048 a rounding error of the position is 1e-4 of a cell.
    assert_close("result", got[0], want[0], 1e-3)
    assert_grads_match(["table"], got_grads[1:], want_grads[1:], 1e-3)
    near = (got_grads[0] - want_grads[0]).abs().amax(-1) < 2e-3 * want_grads[0].abs().max()
    assert near.float().mean() > 0.99  # the slope jumps at cell faces, where rounding may choose the other side


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, HashLayout(n_levels=1, log2_entries=15, base_resolution=16)])
def test_no_points(target: Target, layout: HashLayout):
    require(target)
    inputs = {"positions": torch.zeros(0, 3), "table": make_table(layout)}
    compare(target, lambda positions, table: hash_encode(positions, table, layout), inputs, ["positions", "table"])


def test_linear_in_the_table(target: Target):
    require(target)
    positions = make_positions(target.pick(200, 20)).to(target.device)
    a, b = (make_table(SMALL_LAYOUT, seed=seed).to(target.device) for seed in (1, 2))
    with use_backend(target.backend):
        together = hash_encode(positions, 2.0 * a - 3.0 * b, SMALL_LAYOUT)
        apart = 2.0 * hash_encode(positions, a, SMALL_LAYOUT) - 3.0 * hash_encode(positions, b, SMALL_LAYOUT)
    assert_close("linearity", together, apart, 1e-5)


def test_exact_at_nodes_of_dense_levels(target: Target):
    require(target)
    layout = HashLayout(n_levels=1, n_features=2, log2_entries=10, base_resolution=8, max_resolution=8)
    (level,) = layout.levels
    assert not level.hashed
    table = make_table(layout)
    nodes = torch.cartesian_prod(*[torch.arange(1, 9)] * 3)[:: target.pick(1, 29)]
    positions = (nodes - 0.5) / level.scale
    with use_backend(target.backend):
        got = hash_encode(positions.to(target.device), table.to(target.device), layout)
    assert_close("nodes", got.cpu(), table[table_rows(level, nodes)], 1e-5)


def test_continuous_across_cell_faces(target: Target):
    require(target)
    layout = HashLayout(n_levels=2, n_features=2, log2_entries=9, base_resolution=5, max_resolution=31)
    table = make_table(layout)
    for level in layout.levels:
        inner = make_positions(target.pick(100, 10), seed=5, border=False)
        for axis in range(3):
            face = (inner[:, axis] * (level.scale - 1)).floor() + 0.5
            sides = []
            for side in (-1e-6, 1e-6):
                moved = inner.clone()
                moved[:, axis] = face / level.scale + side
                with use_backend(target.backend):
                    sides.append(hash_encode(moved.to(target.device), table.to(target.device), layout))
            assert_close("the two sides of a face", sides[0], sides[1], 3e-4)


def test_outside_is_the_border_without_gradient(target: Target):
    require(target)
    table = make_table(SMALL_LAYOUT).to(target.device)
    outside = torch.tensor([[1.5, 0.5, 0.3], [-2.0, 0.1, 7.0]], device=target.device, requires_grad=True)
    with use_backend(target.backend):
        got = hash_encode(outside, table, SMALL_LAYOUT)
        border = hash_encode(outside.detach().clamp(0.0, 1.0), table, SMALL_LAYOUT)
        (grad,) = torch.autograd.grad(got.sum(), outside)
    assert_close("border", got.detach(), border, 1e-6)
    assert (grad == 0.0).tolist() == [[True, False, False], [True, False, True]]


def test_positions_that_are_not_numbers_touch_no_foreign_memory(target: Target):
    """NaN and infinite positions give some finite features; nothing is read or written out of bounds."""
    require(target)
    if target.interpreted:
        pytest.skip("the interpreter casts NaN as numpy does, not as the hardware")
    table = make_table(SMALL_LAYOUT).to(target.device).requires_grad_()
    bad = torch.tensor([[float("nan"), 0.5, 0.5], [float("inf"), -float("inf"), 0.5]], device=target.device)
    with use_backend(target.backend):
        out = hash_encode(bad, table, SMALL_LAYOUT)
        out.sum().backward()
    assert out.shape == (2, SMALL_LAYOUT.n_outputs)
    assert bool(torch.isfinite(out[1]).all())


def test_repeated_backward_gives_equal_gradients(target: Target):
    """The CPU kernel is deterministic; Triton's atomics may change the last digits."""
    require(target)
    inputs = {"positions": make_positions(target.pick(5000, 20)), "table": make_table(SMALL_LAYOUT)}
    inputs = {name: t.to(target.device) for name, t in inputs.items()}
    function = lambda positions, table: hash_encode(positions, table, SMALL_LAYOUT)  # noqa: E731
    first, second = (run(target.backend, function, inputs, ["table"])[1][0] for _ in range(2))
    assert_close("gradient to table", first, second, 0.0 if target.backend == "cpu" else 1e-5)


@pytest.mark.parametrize("n_features", [1, 2])
def test_gradcheck(n_features: int):
    layout = HashLayout(n_levels=3, n_features=n_features, log2_entries=5, base_resolution=2, max_resolution=9)
    positions = make_positions(5, border=False).double().requires_grad_()
    table = make_table(layout).double().requires_grad_()
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda p, t: hash_encode(p, t, layout), (positions, table))


def test_layout_levels_fill_the_table():
    for layout in (SMALL_LAYOUT, HashLayout(), HashLayout(n_levels=1, base_resolution=3, max_resolution=3)):
        offset = 0
        for level in layout.levels:
            assert level.offset == offset
            assert level.size % 8 == 0
            assert level.size <= 1 << layout.log2_entries
            assert level.hashed == (level.nodes**3 > level.size)
            offset += level.size
        assert layout.n_entries == offset
    scales = [level.scale for level in HashLayout().levels]
    assert scales[0] == 16.0
    assert abs(scales[-1] - 2048.0) < 0.01


def test_errors_name_the_argument():
    table = make_table(SMALL_LAYOUT)
    with pytest.raises(InputError, match="positions: expected shape"):
        hash_encode(torch.zeros(3, 2), table, SMALL_LAYOUT)
    with pytest.raises(InputError, match="table: expected shape"):
        hash_encode(torch.zeros(3, 3), table[:-1], SMALL_LAYOUT)
    with pytest.raises(InputError, match="positions: expected a floating dtype"):
        hash_encode(torch.zeros(3, 3, dtype=torch.int64), table, SMALL_LAYOUT)
    with pytest.raises(InputError, match="n_features: expected 1, 2, 4 or 8"):
        HashLayout(n_features=3)
    with pytest.raises(InputError, match="max_resolution: expected at least"):
        HashLayout(base_resolution=32, max_resolution=16)
