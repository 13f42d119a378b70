"""Thinning: fewer samples, the same expectation; the same choice on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import compact, composite, random_bits, use_backend
from nerfturbo.ops.ngp_visibility import ngp_visibility
from nerfturbo.ops.reference.composite import composite as plain_composite
from nerfturbo.ops.thinning import HALVINGS, Thinning, stretched, thin_codes
from nerfturbo.types import PackedSamples

from .cases import Target, assert_close, assert_packed, generator, make_rays, make_samples, require, samples_to
from .test_ngp_visibility import composition, field_to, make_field


def _phases(n: int, step: int = 0) -> Tensor:
    return random_bits(n, seed=3, stream=12, step=step, device="cpu")[:, 0]


def _all(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


def test_a_code_is_kept_as_often_as_it_should_be():
    """Over random phases, and nearly exactly along one ray: the sequence is even."""
    n = 4096
    samples = PackedSamples.from_counts(torch.tensor([n]), torch.zeros(n), torch.ones(n))
    for halvings in range(HALVINGS + 1):
        weights = torch.full((n,), 0.75 * 0.5**halvings)
        codes = thin_codes(weights, _all(n), samples, Thinning(1.0, _phases(1)))
        assert set(codes.tolist()) <= {0, halvings + 1}
        assert (codes > 0).float().mean().item() == pytest.approx(0.5**halvings, abs=0.002)
    pairs = thin_codes(torch.full((n,), 0.3), _all(n), samples, Thinning(1.0, _phases(1))).view(-1, 4)
    assert bool(((pairs > 0).sum(-1) - 2).abs().max() <= 1)  # never four in a row, never none of four


def test_thickness_is_right_on_average():
    samples = make_samples(50, mean=10)
    weights = torch.rand(samples.capacity, generator=generator(1)) ** 3 * 0.2
    tau = torch.rand(samples.capacity, generator=generator(2))
    sums = torch.zeros(samples.n_rays)
    for step in range(200):
        codes = thin_codes(weights, samples.used, samples, Thinning(0.1, _phases(samples.n_rays, step)))
        made = compact(samples, codes)
        kept = tau[codes > 0] / (samples.t_ends - samples.t_starts)[codes > 0] * (made.t_ends - made.t_starts)
        sums += torch.zeros(samples.n_rays).index_add(0, made.ray_indices.long(), kept)
    whole = torch.zeros(samples.n_rays).index_add(0, samples.ray_indices.long(), tau)
    assert_close("optical thickness", sums / 200, whole, 0.05)
    assert made.capacity < 0.75 * samples.capacity


def test_colour_and_gradient_are_right_on_average():
    """Of a ray through fog before a wall: the mean over many thinnings, to first order in the weight."""
    n = 40
    starts = torch.arange(n) * 0.05
    samples = PackedSamples.from_counts(torch.tensor([n]), starts, starts + 0.05)
    density = torch.cat([torch.full((n - 4,), 0.1), torch.full((4,), 60.0)]).requires_grad_()
    rgb = torch.linspace(0.0, 1.0, n)[:, None]

    def colour(codes: Tensor) -> tuple[Tensor, Tensor]:
        out = composite(density[codes > 0], rgb[codes > 0], compact(samples, codes)).rgb.sum()
        return out.detach(), torch.autograd.grad(out, density)[0]

    weights = plain_composite(density.detach(), rgb, samples, early_stop_eps=0.0, alpha_thre=0.0)[3]
    want, want_grad = colour(torch.ones(n, dtype=torch.uint8))
    with use_backend("reference"):
        found = [colour(thin_codes(weights, _all(n), samples, Thinning(0.02, _phases(1, s)))) for s in range(300)]
    assert_close("colour", torch.stack([value for value, _ in found]).mean(), want, 0.01)
    grad = torch.stack([grad for _, grad in found]).mean(0)
    assert_close("gradient", grad, want_grad, 0.25)


@pytest.mark.parametrize("share", [None, 0.5, 2.0])
def test_compact_stretches_on_every_backend(sized: tuple[Target, int], share: float | None, poisoned_empty: None):
    target, n_rays = sized
    require(target, "packed")
    samples = samples_to(make_samples(n_rays, tail=9), target.device)
    codes = torch.randint(0, HALVINGS + 2, (samples.capacity,), generator=generator(), dtype=torch.uint8)
    capacity = None if share is None else max(1, int(share * samples.capacity))
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(compact(samples, codes.to(target.device), capacity=capacity))
    assert_packed(results[0])
    for name in ("offsets", "ray_indices", "t_starts", "t_ends"):
        assert_close(name, getattr(results[0], name), getattr(results[1], name), 1e-6)


def test_stretching_keeps_middles_and_multiplies_lengths():
    starts, ends = stretched(
        torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.5]), torch.tensor([1, 3], dtype=torch.uint8)
    )
    assert starts.tolist() == [1.0, 0.25] and ends.tolist() == [1.5, 2.25]


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_visibility_thins_alike(target: Target, eps: float, poisoned_empty: None):
    """Equal to weights of everything, then codes, but where rounding decides."""
    require(target, "ngp_visibility")
    samples = make_samples(target.pick(300, 24), tail=5)
    origins, directions = (value.to(target.device) for value in make_rays(samples.n_rays))
    samples, field = samples_to(samples, target.device), field_to(make_field(), target.device)
    thinning = Thinning(0.05, _phases(samples.n_rays).to(target.device))
    density = composition(origins, directions, samples, field)
    weights = plain_composite(density, density[:, None], samples, early_stop_eps=eps, alpha_thre=0.0)[3]
    with use_backend("reference"):
        keep = ngp_visibility(origins, directions, samples, field, early_stop_eps=eps)
        want = ngp_visibility(origins, directions, samples, field, early_stop_eps=eps, thinning=thinning)
    assert torch.equal(want, thin_codes(weights, keep, samples, thinning))
    with use_backend(target.backend):  # type: ignore[arg-type]
        got = ngp_visibility(origins, directions, samples, field, early_stop_eps=eps, thinning=thinning)
    assert got.dtype == torch.uint8
    assert int((got != want).sum()) <= 1 + samples.capacity // 200
    used = samples.used
    assert not got[~used].any() and bool((got[used] == 0).any()) and bool((got == HALVINGS + 1).any())


def test_nothing_to_thin(target: Target):
    require(target, "ngp_visibility")
    samples = samples_to(make_samples(0), target.device)
    field, nothing = field_to(make_field(), target.device), torch.zeros(0, 3, device=target.device)
    thinning = Thinning(0.1, torch.zeros(0, dtype=torch.int32, device=target.device))
    with use_backend(target.backend):  # type: ignore[arg-type]
        codes = ngp_visibility(nothing, nothing, samples, field, thinning=thinning)
    assert codes.shape == (0,) and codes.dtype == torch.uint8


def test_errors_name_the_argument():
    samples = make_samples(4)
    with pytest.raises(InputError, match="weight: expected"):
        Thinning(0.0, _phases(4))
    with pytest.raises(InputError, match="phases: expected"):
        Thinning(0.1, torch.zeros(4))
    with pytest.raises(InputError, match=r"thinning.phases: expected shape \(4,\)"):
        thin_codes(torch.ones(samples.capacity), samples.used, samples, Thinning(0.1, _phases(3)))
