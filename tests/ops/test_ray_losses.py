"""The regularisers of rays: the sums they are named after, their gradients, and nothing where nothing is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import composite, use_backend
from nerfturbo.ops.composite_loss import SURE, RayLossRule, ray_losses
from nerfturbo.rendering.losses import distortion_loss, weights_loss
from nerfturbo.types import PackedSamples

from .cases import Target, assert_close, compare, generator, make_samples, poison_tail, require, run, samples_to

RULES = {
    "distortion": RayLossRule(distortion=0.3, unit=2.5),
    "opacity": RayLossRule(opacity=0.2),
    "all": RayLossRule(0.3, 0.2, unit=0.7),
}


def _logits(samples: PackedSamples, dtype: torch.dtype = torch.float32, thick: float = 0.0) -> Tensor:
    raw = torch.randn(samples.capacity, 4, generator=generator(3)) * 1.5
    raw[:, 3] += thick
    raw[::7, 3] = 20.0  # past the clamp
    return poison_tail(raw.to(dtype), samples.offsets)


def _elsewhere(samples: PackedSamples) -> PackedSamples:
    """The same samples at other distances, in the same order along each ray."""
    starts, ends = (1.0 + 0.7 * side.square() for side in (samples.t_starts, samples.t_ends))
    return replace(samples, t_starts=starts, t_ends=ends)


def _by_hand(raw: Tensor, samples: PackedSamples, rule: RayLossRule, places: PackedSamples) -> Tensor:
    """Ray by ray, every pair of samples."""
    total, kept = raw.new_zeros(()), samples.n_rays if samples.n_rays_kept is None else int(samples.n_rays_kept)
    offsets, middles = samples.offsets.tolist(), places.midpoints()
    for ray in range(kept):
        part = slice(offsets[ray], offsets[ray + 1])
        lengths, middle = (places.t_ends - places.t_starts)[part], middles[part]
        tau = torch.exp(raw[part, 3].clamp(max=15.0)) * (samples.t_ends - samples.t_starts)[part]
        weights = torch.exp(-(tau.cumsum(0) - tau)) * (1.0 - torch.exp(-tau))
        pairs = (weights[:, None] * weights[None, :] * (middle[:, None] - middle[None, :]).abs()).sum()
        opacity = weights.sum().clamp(SURE, 1.0 - SURE)
        total = total + rule.distortion / rule.unit * (pairs + (weights.square() * lengths).sum() / 3.0)
        total = total - rule.opacity * (opacity * opacity.log() + (1.0 - opacity) * (1.0 - opacity).log())
    return total / max(kept, 1)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_reference_is_the_double_sum(rule: RayLossRule, elsewhere: bool):
    samples = replace(make_samples(9, mean=5, dtype=torch.float64), n_rays_kept=torch.tensor(7, dtype=torch.int32))
    raw = _logits(samples).double().clamp(max=4.0).requires_grad_()
    places = _elsewhere(samples) if elsewhere else None
    with use_backend("reference"):
        value = ray_losses(raw, samples, rule, places=places)
    wanted = _by_hand(raw, samples, rule, places or samples)
    assert_close("loss", value, wanted)
    assert_close("gradient to raw", *(torch.autograd.grad(x, raw)[0] for x in (value, wanted)))


def test_the_spread_of_far_rays_keeps_its_digits():
    """Distances count from a ray's first sample: far away their own digits would not do."""
    samples, rule = make_samples(9, mean=5), RULES["distortion"]
    raw, values = torch.nan_to_num(_logits(samples)).clamp(max=4.0), []
    starts, ends = (2048.0 + (side * 512.0).round() / 512.0 for side in (samples.t_starts, samples.t_ends))  # exact
    for dtype in (torch.float32, torch.float64):
        far = replace(samples, t_starts=starts.to(dtype), t_ends=ends.to(dtype))
        with use_backend("reference"):
            values.append(float(ray_losses(raw.to(dtype), far, rule)))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradcheck(rule: RayLossRule):
    samples = make_samples(6, mean=4, tail=2, dtype=torch.float64)
    raw = torch.nan_to_num(_logits(samples).double()).clamp(max=3.0).requires_grad_()
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda raw: ray_losses(raw, samples, rule), raw)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_matches_reference(sized: tuple[Target, int], rule: RayLossRule, poisoned_empty: None, four_threads: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    kept = None if n_rays == 1 else torch.tensor(n_rays - n_rays // 4, dtype=torch.int32)
    samples = replace(samples, n_rays_kept=kept)
    raw, samples = _logits(samples), samples_to(samples, target.device)
    compare(target, lambda raw: ray_losses(raw, samples, rule), {"raw": raw}, ["raw"])
    if rule.distortion:
        places = _elsewhere(samples)
        compare(target, lambda raw: ray_losses(raw, samples, rule, places=places), {"raw": raw}, ["raw"])


def test_rays_longer_than_a_tile(target: Target):
    require(target)
    counts = [100, 8, 0, 32, 1, 33, 64]
    starts = torch.cat([torch.arange(count) * 0.02 for count in counts])
    samples = samples_to(PackedSamples.from_counts(torch.tensor(counts), starts, starts + 0.02), target.device)
    raw = _logits(samples).to(target.device)
    raw[torch.arange(raw.shape[0]) % 29 != 0, 3] -= 2.0
    compare(target, lambda raw: ray_losses(raw, samples, RULES["all"]), {"raw": raw}, ["raw"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "features", "cut"])
def test_dtypes_and_layouts(target: Target, dtype: torch.dtype, layout: str):
    require(target)
    samples = make_samples(target.pick(200, 12), tail=3)
    raw = _logits(samples, dtype)
    wide = raw if layout == "rows" else raw.t().contiguous() if layout == "features" else torch.cat([raw, raw], 1)
    samples = samples_to(samples, target.device)

    def function(wide: Tensor):
        raw = {"rows": lambda: wide, "features": wide.t, "cut": lambda: wide[:, 2:6].roll(2, 1)}[layout]()
        return ray_losses(raw, samples, RULES["all"])

    tolerance = {torch.float16: 2e-2, torch.bfloat16: 2e-2}.get(dtype)
    compare(target, function, {"wide": wide}, ["wide"], tolerance=tolerance)


def test_gradient_scale_keeps_half_gradients(target: Target):
    require(target)
    samples = samples_to(make_samples(target.pick(200, 12)), target.device)
    scale = torch.tensor(1024.0, device=target.device)
    exact = None
    for dtype, early in ((torch.float32, None), (torch.float32, scale), (torch.float16, scale)):
        raw = _logits(samples).to(device=target.device, dtype=dtype).requires_grad_()
        with use_backend(target.backend):
            loss = ray_losses(raw, samples, RULES["all"], gradient_scale=early)
            (grad,) = torch.autograd.grad(loss * scale, raw)
        if exact is None:
            exact = grad
        assert_close("gradient to raw", grad.float(), exact, 8e-3 if dtype == torch.float16 else 4e-6)


@pytest.mark.parametrize("n_rays", [0, 5])
@pytest.mark.parametrize("capacity", [0, 4])
def test_no_samples(target: Target, n_rays: int, capacity: int, poisoned_empty: None):
    require(target)
    zeros = torch.zeros(capacity, device=target.device)
    offsets = torch.zeros(n_rays + 1, dtype=torch.int32, device=target.device)
    for kept in (None, torch.tensor(0, dtype=torch.int32, device=target.device)):
        samples = PackedSamples(zeros, zeros, zeros.int(), offsets, kept)
        raw = torch.full((capacity, 4), float("nan"), device=target.device, requires_grad=True)
        with use_backend(target.backend):
            loss = ray_losses(raw, samples, RayLossRule(distortion=1.0))
        assert loss.item() == 0.0
        (grad,) = torch.autograd.grad(loss, raw)
        assert not grad.any()


def test_a_sample_that_is_not_a_number_spoils_no_other(target: Target):
    require(target)
    samples = samples_to(make_samples(8), target.device)
    raw, rule = _logits(samples).to(target.device), RayLossRule(distortion=1.0)
    raw[5, 3] = float("nan")
    empty = torch.where(raw.isnan(), -99.0, raw)
    raw.requires_grad_()
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            loss = ray_losses(raw, samples, rule)
            (grad,) = torch.autograd.grad(loss, raw)
            assert_close("loss", loss, ray_losses(empty, samples, rule))
        assert bool(torch.isfinite(grad[torch.arange(raw.shape[0], device=raw.device) != 5]).all())


def test_of_weights_as_of_logits():
    """Fields that give densities are regularised alike."""
    samples = replace(make_samples(20, tail=3), n_rays_kept=torch.tensor(15, dtype=torch.int32))
    raw = torch.nan_to_num(_logits(samples)).clamp(max=5.0)
    density = torch.exp(raw[:, 3])
    out = composite(density, torch.sigmoid(raw[:, :3]), samples)
    for rule in RULES.values():
        value = weights_loss(out.weights, out.opacity, samples, rule)
        assert_close("loss", value, ray_losses(raw, samples, rule))
    assert_close(
        "distortion", distortion_loss(out.weights, samples)[:15].mean(), ray_losses(raw, samples, RayLossRule(1))
    )


def test_light_from_one_place_costs_less():
    together = torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, -9.0]])
    samples = PackedSamples.from_counts(torch.tensor([3]), torch.arange(3) / 4.0, torch.arange(3) / 4.0 + 0.05)
    apart = together[[0, 2, 1]]
    rule = RayLossRule(distortion=1.0)
    assert ray_losses(together, samples, rule) < 0.8 * ray_losses(apart, samples, rule)


def test_errors_name_the_argument():
    samples = make_samples(4)
    raw = _logits(samples)
    with pytest.raises(InputError, match="raw: expected shape"):
        ray_losses(raw[:, :3], samples, RULES["all"])
    with pytest.raises(InputError, match="distortion: expected"):
        RayLossRule(distortion=-1.0)
    with pytest.raises(InputError, match="unit: expected"):
        RayLossRule(unit=0.0)
    with pytest.raises(InputError, match="gradient_scale: expected shape"):
        ray_losses(raw, samples, RULES["all"], gradient_scale=torch.ones(2))


def test_no_gradient_wanted(target: Target):
    require(target)
    samples = samples_to(make_samples(6), target.device)
    raw = _logits(samples).to(target.device)
    outputs, _ = run(target.backend, lambda raw: ray_losses(raw, samples, RULES["all"]), {"raw": raw}, [])
    assert not outputs[0].requires_grad
