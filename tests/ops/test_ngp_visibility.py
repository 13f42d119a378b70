"""Visibility with the density computed on the way: equal to density of everything, then the visibility test."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import HashLayout, use_backend
from nerfturbo.ops.composite.reference import visibility
from nerfturbo.ops.ngp import NgpDensity
from nerfturbo.ops.ngp.reference import density_at
from nerfturbo.ops.positions.reference import sample_positions
from nerfturbo.types import Aabb, PackedSamples

from .cases import (
    SMALL_LAYOUT,
    Target,
    generator,
    make_rays,
    make_samples,
    make_table,
    poison_tail,
    require,
    samples_to,
    with_tail,
)

BOX = Aabb((-2.1, -2.4, -1.9), (2.3, 2.0, 2.2))
THRESHOLDS = [(0.0, 0.0), (1e-4, 0.0), (1e-2, 5e-2), (0.0, 5e-2)]
MARGIN = {torch.float32: 3e-4, torch.bfloat16: 0.2, torch.float16: 0.05}  # of the optical depth or alpha


def make_field(layout: HashLayout = SMALL_LAYOUT, width: int = 16, dtype: torch.dtype = torch.float32) -> NgpDensity:
    """Some rays become opaque after a few samples, some never: logits spread over several units."""
    draw = generator(5)
    density_in = torch.randn(width, layout.n_outputs, generator=draw) * (2 / layout.n_outputs) ** 0.5
    density_out = torch.randn(3, width, generator=draw) * (16 / width) ** 0.5
    return NgpDensity(BOX, make_table(layout, dtype=dtype), layout, (density_in, density_out))


def field_to(field: NgpDensity, device: str) -> NgpDensity:
    density_in, density_out = field.weights
    return replace(field, table=field.table.to(device), weights=(density_in.to(device), density_out.to(device)))


def composition(origins: Tensor, directions: Tensor, samples: PackedSamples, field: NgpDensity) -> Tensor:
    positions = sample_positions(origins, directions, samples, aabb=field.aabb)
    positions = torch.where(samples.used[:, None], positions, 0.0)
    return density_at(field, positions, n_used=None, logits=False)


def undecided(density: Tensor, samples: PackedSamples, eps: float, alpha_thre: float, margin: float) -> Tensor:
    """(capacity,) bool: samples from a ray's first decision on that rounding may turn."""
    result = torch.zeros(samples.capacity, dtype=torch.bool)
    limit = math.inf if eps == 0.0 else -math.log(eps)
    optical = (density * (samples.t_ends - samples.t_starts)).tolist()
    for first, last in itertools.pairwise(samples.offsets.tolist()):
        depth = 0.0
        for i in range(first, last):
            alpha = -math.expm1(-optical[i])
            near = alpha_thre > 0.0 and abs(alpha - alpha_thre) < margin * alpha_thre
            if near or abs(depth - limit) < margin * (1.0 + depth):
                result[i:last] = True
                break
            depth += optical[i] if alpha >= alpha_thre else 0.0
    return result


def check(
    target: Target, samples: PackedSamples, field: NgpDensity, eps: float, alpha_thre: float, *, on_device: bool = False
) -> Tensor:
    """The target's flags equal the composition's, wherever rounding cannot turn them."""
    origins, directions = (value.to(target.device) for value in make_rays(samples.n_rays))
    samples, field = samples_to(samples, target.device), field_to(field, target.device)
    density = composition(origins, directions, samples, field)
    want = visibility(density, samples, early_stop_eps=eps, alpha_thre=alpha_thre).cpu()
    threshold = torch.tensor(alpha_thre, device=target.device) if on_device else alpha_thre
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = field.visibility(origins, directions, samples, early_stop_eps=eps, alpha_thre=threshold)
    assert got.dtype == torch.bool and got.shape == (samples.capacity,) and got.device == origins.device
    got = got.cpu()
    margin = MARGIN[field.table.dtype]
    free = undecided(density.cpu(), samples_to(samples, "cpu"), eps, alpha_thre, margin)
    assert free.sum() <= 20 + (0.02 + 2.0 * margin) * samples.capacity, "the case decides too little"
    wrong = (got != want) & ~free
    assert not wrong.any(), f"{int(wrong.sum())} of {samples.capacity} flags differ, first at {int(wrong.nonzero()[0])}"
    return got


@pytest.mark.parametrize(("eps", "alpha_thre"), THRESHOLDS)
def test_equals_the_composition(sized: tuple[Target, int], eps: float, alpha_thre: float, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    kept = check(target, samples, make_field(), eps, alpha_thre)
    if n_rays > 50 and eps > 0.0:
        assert 0.1 < kept.float().mean() < 0.9, "the case should have visible and hidden samples"


def test_the_reference_is_the_composition():
    rays, samples, field = make_rays(50), make_samples(50, tail=3), make_field()
    limits = {"early_stop_eps": 1e-3, "alpha_thre": 3e-2}
    with use_backend("reference"):
        got = field.visibility(*rays, samples, **limits)
    assert torch.equal(got, visibility(composition(*rays, samples, field), samples, **limits)) and got.any()


@pytest.mark.parametrize(
    ("levels", "features", "width", "dtype"),
    [(16, 2, 64, torch.float16), (8, 4, 16, torch.float32), (5, 1, 24, torch.float32), (3, 8, 128, torch.bfloat16)],
)
def test_layouts_and_precisions(target: Target, levels: int, features: int, width: int, dtype: torch.dtype):
    require(target)
    layout = HashLayout(levels, features, log2_entries=9, base_resolution=4, max_resolution=40)
    samples = make_samples(target.pick(300, 21), tail=5, seed=2)
    check(target, samples, make_field(layout, width, dtype), 1e-3, 0.0)


def test_threshold_on_the_device(target: Target):
    require(target)
    check(target, make_samples(target.pick(200, 19), tail=3), make_field(), 1e-3, 3e-2, on_device=True)


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [1], [0, 70, 0, 0, 131, 1, 0], [8, 16, 4, 32]])
def test_empty_and_long_rays(target: Target, counts: list[int], poisoned_empty: None):
    require(target)
    total = sum(counts)
    place = torch.cat([torch.arange(n) for n in counts]) if counts else torch.zeros(0)
    starts = 1.0 + 0.03 * place.float()
    samples = with_tail(PackedSamples.from_counts(torch.tensor(counts, dtype=torch.int64), starts, starts + 0.03), 6)
    kept = check(target, samples, make_field(), 1e-4, 0.0)
    assert not kept[total:].any()


def test_rays_without_a_sample_type_of_their_own(target: Target):
    """No capacity at all is an ordinary value."""
    require(target)
    samples = PackedSamples.from_counts(torch.zeros(4, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    assert check(target, samples, make_field(), 1e-4, 0.0).shape == (0,)


def test_overflowed_capacity_and_poisoned_tail(target: Target, poisoned_empty: None):
    """Rays that did not fit have empty ranges; what lies in the tail is never read."""
    require(target)
    n_rays = target.pick(200, 23)
    samples = make_samples(n_rays, seed=4)
    n_kept = n_rays * 2 // 3
    offsets = samples.offsets.clamp(max=int(samples.offsets[n_kept]))
    kept_rays = torch.tensor(n_kept, dtype=torch.int32)
    cut = replace(samples, offsets=offsets, n_rays_kept=kept_rays)
    clean = check(target, cut, make_field(), 1e-3, 0.0)
    assert not clean[int(offsets[-1]) :].any()
    poisoned = replace(cut, t_starts=poison_tail(cut.t_starts, offsets), t_ends=poison_tail(cut.t_ends, offsets))
    origins, directions = (value.to(target.device) for value in make_rays(n_rays))
    field = field_to(make_field(), target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = field.visibility(origins, directions, samples_to(poisoned, target.device), early_stop_eps=1e-3)
    assert torch.equal(got.cpu(), clean)


@pytest.mark.parametrize("logit", [float("nan"), 1e4, -1e4])
def test_extreme_densities(target: Target, logit: float):
    """NaN is never visible, an opaque first sample hides the rest, and nothing hides behind nothing."""
    require(target)
    field = make_field()
    table = torch.full_like(field.table, logit / 1e4)
    weights = tuple(torch.full_like(w, 10.0) for w in field.weights)
    if logit < 0:
        table, weights = table.abs(), (weights[0], -weights[1])
    samples = make_samples(target.pick(100, 17), tail=2)
    origins, directions = (value.to(target.device) for value in make_rays(samples.n_rays))
    field = field_to(replace(field, table=table, weights=weights), target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = field.visibility(origins, directions, samples_to(samples, target.device), early_stop_eps=1e-4).cpu()
    first = torch.zeros(samples.capacity, dtype=torch.bool)
    filled = samples.offsets[1:] > samples.offsets[:-1]
    first[samples.offsets[:-1][filled].long()] = True
    want = {True: samples.used, False: torch.zeros_like(first)}[logit < 0] if logit != 1e4 else first
    assert torch.equal(got, want)


def test_same_in_every_run(target: Target):
    require(target)
    samples = samples_to(make_samples(target.pick(1000, 30)), target.device)
    origins, directions = (value.to(target.device) for value in make_rays(samples.n_rays))
    field = field_to(make_field(), target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        runs = [field.visibility(origins, directions, samples, early_stop_eps=1e-3) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_bad_inputs_are_named():
    samples, field = make_samples(3), make_field()
    origins, directions = make_rays(3)
    with pytest.raises(InputError, match="origins"):
        field.visibility(origins[:2], directions, samples)
    with pytest.raises(InputError, match="table"):
        replace(field, table=field.table[:-1])
    with pytest.raises(InputError, match=r"weights\[1\]"):
        replace(field, weights=(field.weights[0], torch.ones(3, 5)))
