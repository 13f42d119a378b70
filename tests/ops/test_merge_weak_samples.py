"""Thinning: fewer samples, the same expectation; the same choice on every backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import compact, composite, random_bits, use_backend
from nerfturbo.ops.composite import LONGEST, Thinning, merge_weak_samples, stretched
from nerfturbo.ops.composite.cpu import _chance as cpu_chance
from nerfturbo.ops.composite.reference import _chance
from nerfturbo.ops.composite.reference import composite as plain_composite
from nerfturbo.types import PackedSamples

from .cases import Target, assert_close, assert_packed, generator, make_rays, make_samples, require, samples_to
from .test_ngp_visibility import composition, field_to, make_field


def _phases(n: int, step: int = 0) -> Tensor:
    return random_bits(n, seed=3, stream=12, step=step, device="cpu")[:, 0]


def _walk(optical: Tensor, samples: PackedSamples, thinning: Thinning, backend: str = "cpu") -> Tensor:
    with use_backend(backend):  # type: ignore[arg-type]
        return merge_weak_samples(optical, samples, thinning)


def _fog(n_rays: int = 60) -> tuple[Tensor, PackedSamples]:
    """Optical thickness from nothing to a wall, in any order, some of it not to be seen."""
    samples = make_samples(n_rays, mean=20)
    optical = 0.3 * torch.rand(samples.capacity, generator=generator(1)) ** 6
    optical[torch.rand(samples.capacity, generator=generator(2)) < 0.1] = 3.0
    optical[torch.rand(samples.capacity, generator=generator(3)) < 0.1] = 0.0
    return torch.where(samples.used, optical, torch.zeros(())), samples


def _weights(optical: Tensor, samples: PackedSamples) -> Tensor:
    density = optical / (samples.t_ends - samples.t_starts)
    return plain_composite(density, density[:, None], samples, early_stop_eps=0.0, alpha_thre=0.0)[3]


def _runs(optical: Tensor, samples: PackedSamples, limit: float) -> list[list[int]]:
    """Rows of every run, by the definition."""
    weights, thick, runs = _weights(optical, samples).tolist(), optical.tolist(), []
    for first, last in itertools.pairwise(samples.offsets.tolist()):
        run: list[int] = []
        for i in (i for i in range(first, last) if thick[i] > 0):
            if run and (len(run) == LONGEST or sum(weights[j] for j in run) + weights[i] > limit):
                runs.append(run)
                run = []
            run.append(i)
        runs += [run] if run else []
    return runs


def test_one_sample_of_every_run_as_thick_as_all_of_it():
    """So that the light that passes behind every run is what it was; a sample that weighs much stays as it is."""
    optical, samples = _fog()
    codes = _walk(optical, samples, Thinning(0.02, _phases(samples.n_rays)), "reference")
    runs = _runs(optical, samples, 0.02)
    assert len(runs) < 0.6 * int((optical > 0).sum())
    stretch = torch.exp2((codes.float() - 1.0) / 16)
    for run in runs:
        kept = [i for i in run if codes[i] > 0]
        assert len(kept) == 1
        assert (stretch[kept[0]] * optical[kept[0]]).item() == pytest.approx(optical[run].sum().item(), rel=0.0221)
        assert len(run) > 1 or codes[run[0]] == 1
    assert int((codes > 0).sum()) == len(runs)
    assert bool((codes[_weights(optical, samples) > 0.02] == 1).all())


def test_chances_are_the_same_on_a_cpu_to_the_bit():
    plain = cpu_chance.py_func  # type: ignore[attr-defined]
    for place in (0, 1, 977):
        wanted = _chance(_phases(300), place).tolist()
        with np.errstate(over="ignore"):  # compiled it wraps around
            assert [float(plain(phase, place)) for phase in _phases(300).tolist()] == wanted
        assert len(set(wanted)) == 300


def test_a_run_shows_each_sample_as_often_as_it_weighs():
    optical = torch.tensor([0.001, 0.004, 0.002, 0.0, 0.008])
    samples = PackedSamples.from_counts(torch.full((20000,), 5), *(torch.arange(100000.0) + k for k in (0, 1)))
    codes = _walk(optical.repeat(20000), samples, Thinning(0.1, _phases(20000))).view(-1, 5)
    weights = _weights(optical, PackedSamples.from_counts(torch.tensor([5]), torch.arange(5.0), torch.arange(1.0, 6.0)))
    assert_close("share", (codes > 0).float().mean(0), weights / weights.sum(), 0.01)


def test_colour_is_right_on_average_and_never_far():
    """Of any rays: chance adds no more than the weight of a run times the difference of its colours."""
    optical, samples = _fog()
    density, limit, n = optical / (samples.t_ends - samples.t_starts), 0.1, 400
    colour = torch.rand(samples.capacity, 1, generator=generator(4))
    want = plain_composite(density, colour, samples, early_stop_eps=0.0, alpha_thre=0.0)[0]
    total, worst = torch.zeros_like(want), 0.0
    for step in range(n):
        codes = _walk(optical, samples, Thinning(limit, _phases(samples.n_rays, step)))
        found = composite(density[codes > 0], colour[codes > 0], compact(samples, codes)).rgb
        total, worst = total + found / n, max(worst, (found - want).square().mean().sqrt().item())
    assert_close("colour", total, want, 0.01)
    assert worst < 0.5 * limit


def test_gradient_is_right_on_average():
    """To the density's logit, of a ray through fog before a wall: to first order in the thickness of a run."""
    n, many = 40, 2000
    starts = (torch.arange(n) * 0.05).repeat(many)
    samples = PackedSamples.from_counts(torch.full((many,), n), starts, starts + 0.05)
    logit = torch.cat([torch.full((n - 4,), -2.0), torch.full((4,), 4.0)]).requires_grad_()
    rgb = torch.linspace(0.0, 1.0, n)[:, None].repeat(many, 1)

    def slope(codes: Tensor) -> Tensor:
        density = logit.exp().repeat(many)
        out = composite(density[codes > 0], rgb[codes > 0], compact(samples, codes)).rgb
        return torch.autograd.grad(out.sum() / many, logit)[0].view(-1, 4).sum(1)  # of neighbours together

    want = slope(torch.ones(many * n, dtype=torch.uint8))
    optical = logit.detach().exp().repeat(many) * 0.05
    codes = _walk(optical, samples, Thinning(0.02, _phases(many)))
    assert (codes > 0).float().mean() < 0.5
    assert_close("gradient", slope(codes), want, 0.05)


@pytest.mark.parametrize("limit", [0.01, 0.2])
def test_same_choice_on_every_backend(sized: tuple[Target, int], limit: float, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    optical, samples = _fog(n_rays)
    optical[::7] = float("nan")  # counts as nothing
    thinning = Thinning(limit, _phases(n_rays))
    want = _walk(optical, samples, thinning, "reference")
    there = Thinning(limit, thinning.phases.to(target.device))
    got = _walk(optical.to(target.device), samples_to(samples, target.device), there, target.backend).cpu()
    assert got.dtype == torch.uint8 and not got[::7].any()
    assert int((got != want).sum()) <= samples.capacity // 500  # where rounding decides


@pytest.mark.parametrize("share", [None, 0.5, 2.0])
def test_compact_stretches_on_every_backend(sized: tuple[Target, int], share: float | None, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = samples_to(make_samples(n_rays, tail=9), target.device)
    codes = torch.randint(0, 65, (samples.capacity,), generator=generator(), dtype=torch.uint8)
    capacity = None if share is None else max(1, int(share * samples.capacity))
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(compact(samples, codes.to(target.device), capacity=capacity))
    assert_packed(results[0])
    for name in ("offsets", "ray_indices", "t_starts", "t_ends"):
        assert_close(name, getattr(results[0], name), getattr(results[1], name), 1e-6)
    alone = torch.nonzero(codes[codes > 0][: int(results[0].offsets[-1])] == 1)[:, 0].to(target.device)
    for name in ("t_starts", "t_ends"):  # what stands for nothing else stays as it is, to the bit
        assert torch.equal(getattr(results[0], name)[alone], getattr(results[1], name)[alone])


def test_stretching_keeps_middles_and_multiplies_lengths():
    codes = torch.tensor([1, 33, 9], dtype=torch.uint8)
    starts, ends = stretched(torch.full((3,), 1.0), torch.full((3,), 1.5), codes)
    assert_close("starts", starts, torch.tensor([1.0, 0.25, 1.25 - 0.25 * 2**0.5]), 1e-6)
    assert_close("ends", ends, torch.tensor([1.5, 2.25, 1.25 + 0.25 * 2**0.5]), 1e-6)
    assert starts[0] == 1.0 and ends[0] == 1.5  # to the bit


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_visibility_thins_alike(target: Target, eps: float, poisoned_empty: None):
    """Equal to weights of everything, then codes, but where rounding decides."""
    require(target)
    samples = make_samples(target.pick(300, 24), tail=5)
    origins, directions = (value.to(target.device) for value in make_rays(samples.n_rays))
    samples, field = samples_to(samples, target.device), field_to(make_field(), target.device)
    thinning = Thinning(0.05, _phases(samples.n_rays).to(target.device))
    density = composition(origins, directions, samples, field)
    with use_backend("reference"):
        keep = field.visibility(origins, directions, samples, early_stop_eps=eps)
        want = field.visibility(origins, directions, samples, early_stop_eps=eps, thinning=thinning)
    optical = torch.where(keep, density * (samples.t_ends - samples.t_starts), 0.0)
    assert torch.equal(want, _walk(optical, samples, thinning, "reference"))
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = field.visibility(origins, directions, samples, early_stop_eps=eps, thinning=thinning)
    assert got.dtype == torch.uint8
    assert int((got != want).sum()) <= 1 + samples.capacity // 200
    used = samples.used
    assert not got[~used].any() and bool((got[used] == 0).any()) and bool((got > 1).any())


def test_nothing_to_thin(target: Target):
    require(target)
    samples = samples_to(make_samples(0), target.device)
    field, nothing = field_to(make_field(), target.device), torch.zeros(0, 3, device=target.device)
    thinning = Thinning(0.1, torch.zeros(0, dtype=torch.int32, device=target.device))
    with use_backend(target.backend):  # type: ignore[arg-type]
        codes = field.visibility(nothing, nothing, samples, thinning=thinning)
    assert codes.shape == (0,) and codes.dtype == torch.uint8


def test_errors_name_the_argument():
    samples = make_samples(4)
    with pytest.raises(InputError, match="weight: expected"):
        Thinning(0.0, _phases(4))
    with pytest.raises(InputError, match="phases: expected"):
        Thinning(0.1, torch.zeros(4))
    with pytest.raises(InputError, match=r"thinning.phases: expected shape \(4,\)"):
        merge_weak_samples(torch.ones(samples.capacity), samples, Thinning(0.1, _phases(3)))
    with pytest.raises(InputError, match="optical: expected shape"):
        merge_weak_samples(torch.ones(3), samples, Thinning(0.1, _phases(4)))
