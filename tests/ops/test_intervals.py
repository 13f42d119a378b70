"""Intervals along rays: placed as spacing and contraction say, weighed as compositing does, by every backend."""

from __future__ import annotations

import itertools

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.composite import composite
from nerfturbo.ops.intervals import Space, interval_weights, place_intervals
from nerfturbo.ops.positions import unit_positions
from nerfturbo.types import Aabb, PackedSamples

from .cases import Target, assert_close, compare, generator, require

BOX = Aabb((-1.0, -2.0, -1.5), (1.0, 2.0, 1.0))
SPACES = {"world": Space(), "box": Space(BOX), "ball": Space(BOX, "sphere"), "cube": Space(BOX, "cube")}


def some_intervals(n_rays: int, n: int) -> dict[str, torch.Tensor]:
    draw = generator(4)
    places = torch.sort(torch.rand(n_rays, n + 1, generator=draw), dim=-1).values
    near = 0.1 + torch.rand(n_rays, 1, generator=draw)
    rays = {name: torch.randn(n_rays, 3, generator=draw) for name in ("origins", "directions")}
    return {"places": places, **rays, "near": near, "far": near + 20.0 * torch.rand(n_rays, 1, generator=draw)}


@pytest.mark.parametrize(
    ("warp", "space"), [*itertools.product(["mixed"], SPACES), ("uniform", "cube"), ("disparity", "world")]
)
def test_places_as_the_reference(sized: tuple[Target, int], warp: str, space: str, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    inputs = {name: value.to(target.device) for name, value in some_intervals(n_rays, 37).items()}
    options = {"spacing": warp, "unit": 0.7, "space": SPACES[space]}  # type: ignore[arg-type]
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            results.append(place_intervals(**inputs, **options))
    for name, got, want in zip(results[0]._fields, *results, strict=True):
        assert_close(name, got, want, 1e-4 if warp == "mixed" else 2e-5)  # far away 1 - g has few digits left


def test_middles_lie_where_the_contraction_puts_them():
    inputs = {name: value.double() for name, value in some_intervals(5, 8).items()}
    world = place_intervals(**inputs, spacing="mixed")
    assert bool((world.distances.diff() >= 0.0).all())
    folded = place_intervals(**inputs, spacing="mixed", space=SPACES["ball"])
    torch.testing.assert_close(folded.positions, unit_positions(world.positions, BOX, "sphere"))
    assert bool((folded.positions > 0.0).all()) and bool((folded.positions < 1.0).all())


@pytest.mark.parametrize("n", [1, 70])
def test_weights_and_their_gradient_match_the_reference(sized: tuple[Target, int], n: int, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    draw = generator(5)
    distances = torch.rand(n_rays, n + 1, generator=draw).cumsum(-1).to(target.device)
    density = 8.0 * torch.rand(n_rays, n, generator=draw) ** 3
    density[:, n // 2] = 1e6  # a wall: nothing behind it, all digits before it
    compare(target, lambda density: interval_weights(density, distances), {"density": density}, ["density"])


def test_weights_are_those_of_compositing(target: Target):
    require(target)
    density, distances = torch.rand(6, 9) * 3.0, torch.rand(6, 10).cumsum(-1)
    samples = PackedSamples.from_counts(
        torch.full((6,), 9), distances[:, :-1].reshape(-1), distances[:, 1:].reshape(-1)
    )
    want = composite(density.view(-1), torch.zeros(54, 1), samples).weights.view(6, 9)
    with use_backend(target.backend):
        got = interval_weights(density.to(target.device), distances.to(target.device))
    assert_close("weights", got.cpu(), want, 2e-5)


def test_gradcheck():
    distances = torch.rand(3, 6, dtype=torch.float64).cumsum(-1)
    density = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: interval_weights(d, distances), density)


def test_no_rays(target: Target):
    require(target)
    empty = {name: value.to(target.device) for name, value in some_intervals(0, 3).items()}
    with use_backend(target.backend):
        assert place_intervals(**empty).positions.shape == (0, 3)
        assert interval_weights(empty["places"][:, 1:], empty["places"]).shape == (0, 3)


def test_errors_name_the_argument():
    inputs = some_intervals(2, 3)
    with pytest.raises(InputError, match="near: expected shape"):
        place_intervals(**(inputs | {"near": torch.zeros(2)}))
    with pytest.raises(InputError, match="at least one interval"):
        place_intervals(**(inputs | {"places": torch.zeros(2, 1)}))
    with pytest.raises(InputError, match="space: expected a box"):
        place_intervals(**inputs, space=Space(None, "cube"))
    with pytest.raises(InputError, match="spacing"):
        place_intervals(**inputs, spacing="log")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="distances: expected shape"):
        interval_weights(torch.zeros(2, 3), torch.zeros(2, 3))
