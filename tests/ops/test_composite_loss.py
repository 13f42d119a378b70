"""The fused loss: equal to compositing and comparing by hand, with the gradient of the logits, at any scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import composite, use_backend
from nerfturbo.ops.composite_loss import LossRule, composite_loss
from nerfturbo.types import PackedSamples

from .cases import Target, assert_close, compare, generator, make_samples, poison_tail, require, run, samples_to

OUTPUTS = ("loss", "mse", "rgb")
RULES = [LossRule("huber", 0.1), LossRule("huber", 0.5), LossRule("mse")]


def _logits(samples: PackedSamples, dtype: torch.dtype = torch.float32) -> Tensor:
    raw = torch.randn(samples.capacity, 4, generator=generator(3)) * 1.5
    raw[:, 3] += 1.0
    raw[::7, 3] = 20.0  # past the clamp
    return poison_tail(raw.to(dtype), samples.offsets)


def _pixels(n_rays: int, channels: int) -> tuple[Tensor, Tensor]:
    draw = generator(5)
    return torch.rand(n_rays, 3, generator=draw), torch.rand(n_rays, channels, generator=draw)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.delta}")
@pytest.mark.parametrize("channels", [3, 4])
def test_matches_reference(
    sized: tuple[Target, int], rule: LossRule, channels: int, poisoned_empty: None, four_threads: None
):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    kept = None if n_rays == 1 else torch.tensor(n_rays - n_rays // 4, dtype=torch.int32)
    raw, pixels = _logits(samples), [t.to(target.device) for t in _pixels(n_rays, channels)]
    samples = samples_to(replace(samples, n_rays_kept=kept), target.device)

    def function(raw: Tensor):
        return composite_loss(raw, samples, *pixels, rule=rule)

    compare(target, function, {"raw": raw}, ["raw"], names=OUTPUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "features", "cut"])
def test_dtypes_and_layouts(target: Target, dtype: torch.dtype, layout: str):
    """The gradient comes back in the dtype and, where it can, the layout of the logits."""
    require(target)
    samples = make_samples(target.pick(200, 12), tail=3)
    pixels = [t.to(target.device) for t in _pixels(samples.n_rays, 4)]
    raw = _logits(samples, dtype)
    wide = raw if layout == "rows" else raw.t().contiguous() if layout == "features" else torch.cat([raw, raw], 1)
    samples = samples_to(samples, target.device)

    def function(wide: Tensor):
        raw = {"rows": lambda: wide, "features": wide.t, "cut": lambda: wide[:, 2:6].roll(2, 1)}[layout]()
        return composite_loss(raw, samples, *pixels)

    # Half gradients of a mean over rays are subnormal without a scale; their error is that of the smallest step.
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 2e-2}.get(dtype)
    compare(target, function, {"wide": wide}, ["wide"], names=OUTPUTS, tolerance=tolerance)


def test_gradient_scale_keeps_half_gradients(target: Target):
    """Scaled early or late, the fp32 gradient is the same; in half precision only the early scale keeps its digits."""
    require(target)
    samples = samples_to(make_samples(target.pick(200, 12)), target.device)
    pixels = [t.to(target.device) for t in _pixels(samples.n_rays, 3)]
    scale = torch.tensor(1024.0, device=target.device)
    exact = None
    for dtype, early in ((torch.float32, None), (torch.float32, scale), (torch.float16, scale)):
        raw = _logits(samples).to(device=target.device, dtype=dtype).requires_grad_()
        with use_backend(target.backend):
            out = composite_loss(raw, samples, *pixels, gradient_scale=early)
            (grad,) = torch.autograd.grad(out.loss * scale, raw)
        if exact is None:
            exact = grad
        assert_close("gradient to raw", grad.float(), exact, 4e-3 if dtype == torch.float16 else 2e-6)


def test_equals_composite_and_compare(target: Target):
    require(target)
    samples = samples_to(make_samples(target.pick(100, 8)), target.device)
    background, wanted = (t.to(target.device) for t in _pixels(samples.n_rays, 3))
    raw = _logits(samples).clamp(max=6.0).to(target.device)
    with use_backend(target.backend):
        fused = composite_loss(raw, samples, background, wanted, rule=LossRule("huber", 0.1))
        out = composite(torch.exp(raw[:, 3]), torch.sigmoid(raw[:, :3]), samples)
    rgb = out.rgb + background * (1.0 - out.opacity[:, None])
    assert_close("rgb", fused.rgb, rgb)
    assert_close("loss", fused.loss, torch.nn.functional.smooth_l1_loss(rgb, wanted, beta=0.1))
    assert_close("mse", fused.mse, torch.nn.functional.mse_loss(rgb, wanted))


@pytest.mark.parametrize("n_rays", [0, 5])
@pytest.mark.parametrize("capacity", [0, 4])
def test_no_samples(target: Target, n_rays: int, capacity: int, poisoned_empty: None):
    require(target)
    zeros = torch.zeros(capacity, device=target.device)
    offsets = torch.zeros(n_rays + 1, dtype=torch.int32, device=target.device)
    kept = torch.tensor(0, dtype=torch.int32, device=target.device)
    background, wanted = (t.to(target.device) for t in _pixels(n_rays, 3))
    for samples in (PackedSamples(zeros, zeros, zeros.int(), offsets, k) for k in (None, kept)):
        raw = torch.full((capacity, 4), float("nan"), device=target.device, requires_grad=True)
        with use_backend(target.backend):
            out = composite_loss(raw, samples, background, wanted)
        assert torch.equal(out.rgb, background)
        assert bool(torch.isfinite(out.loss))
        assert (out.loss == 0.0) == (n_rays == 0 or samples.n_rays_kept is not None)
        (grad,) = torch.autograd.grad(out.loss, raw)
        assert not grad.any()


def test_gradcheck():
    samples = make_samples(6, mean=4, tail=2, dtype=torch.float64)
    background, wanted = (t.double() for t in _pixels(6, 4))
    raw = torch.nan_to_num(_logits(samples).double()).clamp(max=5.0).requires_grad_()
    with use_backend("reference"):
        for rule in RULES:
            assert torch.autograd.gradcheck(
                lambda raw, rule=rule: composite_loss(raw, samples, background, wanted, rule=rule).loss, raw
            )


def test_no_gradient_wanted(target: Target):
    require(target)
    samples = samples_to(make_samples(6), target.device)
    pixels = [t.to(target.device) for t in _pixels(6, 3)]
    raw = _logits(samples).to(target.device)
    outputs, _ = run(target.backend, lambda raw: composite_loss(raw, samples, *pixels), {"raw": raw}, [])
    assert not outputs[0].requires_grad


def test_errors_name_the_argument():
    samples = make_samples(4)
    raw, (background, wanted) = _logits(samples), _pixels(4, 3)
    with pytest.raises(InputError, match="raw: expected shape"):
        composite_loss(raw[:, :3], samples, background, wanted)
    with pytest.raises(InputError, match=r"target: expected shape \(4, 3 or 4\)"):
        composite_loss(raw, samples, background, wanted[:, :2])
    with pytest.raises(InputError, match="background: expected shape"):
        composite_loss(raw, samples, background[:2], wanted)
    with pytest.raises(InputError, match="kind: expected one of"):
        LossRule("l1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="delta: expected a finite number"):
        LossRule("huber", 0.0)
