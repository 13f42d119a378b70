"""Scale-aware features: the weight is that of a Gaussian in a cell; backends agree; unused rows do nothing."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import HashLayout, use_backend
from nerfturbo.ops.hash_encode import fade_levels, level_weights

from .cases import SMALL_LAYOUT, Target, assert_close, compare, generator, require

LAYOUTS = [SMALL_LAYOUT, HashLayout(n_levels=3, n_features=4, log2_entries=9, base_resolution=5, max_resolution=64)]


def _case(n: int, layout: HashLayout, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    encoding = torch.randn(n, layout.n_outputs, generator=generator()).to(dtype)
    footprints = torch.rand(n, generator=generator(1)) ** 3 * 0.3
    footprints[:: max(1, n // 3)] = 0.0
    return {"encoding": encoding, "footprints": footprints}


@pytest.mark.parametrize("layout", LAYOUTS, ids=["2 features", "4 features"])
@pytest.mark.parametrize("used", [None, 0.6])
def test_matches_reference(sized: tuple[Target, int], layout: HashLayout, used: float | None, poisoned_empty: None):
    target, n = sized
    require(target)
    inputs, count = _case(n, layout), None
    if used is not None:
        count = torch.tensor(int(used * n), dtype=torch.int32, device=target.device)
        for value in inputs.values():
            value[int(used * n) :] = float("nan")
    compare(
        target,
        lambda encoding, footprints: fade_levels(encoding, footprints, layout, n_used=count),
        inputs,
        ["encoding"],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_and_feature_major_storage(target: Target, dtype: torch.dtype):
    require(target)
    inputs = _case(40, SMALL_LAYOUT, dtype)
    inputs["encoding"] = inputs["encoding"].t().contiguous()
    compare(
        target, lambda encoding, footprints: fade_levels(encoding.t(), footprints, SMALL_LAYOUT), inputs, ["encoding"]
    )


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
    inputs = _case(5, SMALL_LAYOUT)
    encoding, footprints = inputs["encoding"].double().requires_grad_(), inputs["footprints"].double()
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda encoding: fade_levels(encoding, footprints, SMALL_LAYOUT), encoding)


def test_no_rows(target: Target):
    require(target)
    with use_backend(target.backend):  # type: ignore[arg-type]
        out = fade_levels(
            torch.zeros(0, SMALL_LAYOUT.n_outputs, device=target.device),
            torch.zeros(0, device=target.device),
            SMALL_LAYOUT,
        )
    assert_close("result", out, torch.zeros(0, SMALL_LAYOUT.n_outputs, device=target.device))


def test_errors_name_the_argument():
    with pytest.raises(InputError, match="encoding: expected shape"):
        fade_levels(torch.zeros(3, 5), torch.zeros(3), SMALL_LAYOUT)
    with pytest.raises(InputError, match=r"footprints: expected shape \(3,\)"):
        fade_levels(torch.zeros(3, SMALL_LAYOUT.n_outputs), torch.zeros(4), SMALL_LAYOUT)
