"""Compositing: closed forms, conservation, splitting; every gradient against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import compact, composite, use_backend, visibility
from nerfturbo.ops.composite import composite_pixels
from nerfturbo.types import PackedSamples

from .cases import (
    Target,
    assert_close,
    compare,
    generator,
    make_samples,
    poison_tail,
    require,
    run,
    samples_to,
)

OUTPUTS = ("rgb", "opacity", "depth", "weights")
THRESHOLDS = [(0.0, 0.0), (1e-2, 0.0), (0.0, 5e-2), (1e-2, 5e-2)]


def _inputs(samples: PackedSamples, channels: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = generator(3)
    density = torch.rand(samples.capacity, generator=draw) ** 3 * 20.0
    rgb = torch.rand(samples.capacity, channels, generator=draw)
    return {
        "density": poison_tail(density.to(dtype), samples.offsets),
        "rgb": poison_tail(rgb.to(dtype), samples.offsets),
    }


@pytest.mark.parametrize(("early_stop_eps", "alpha_thre"), THRESHOLDS)
def test_matches_reference(sized: tuple[Target, int], early_stop_eps, alpha_thre, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    inputs = _inputs(samples)
    samples = samples_to(samples, target.device)

    def function(density: Tensor, rgb: Tensor):
        return composite(density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)

    compare(target, function, inputs, ["density", "rgb"], names=OUTPUTS)


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_channels_and_dtypes(target: Target, channels: int, dtype: torch.dtype):
    """Half inputs are widened: results and rounding are those of fp32, gradients come back in the input's dtype."""
    require(target)
    samples = make_samples(target.pick(100, 10), tail=3)
    inputs = _inputs(samples, channels, dtype)
    samples = samples_to(samples, target.device)
    compare(target, lambda density, rgb: composite(density, rgb, samples), inputs, ["density", "rgb"], names=OUTPUTS)


@pytest.mark.parametrize("output", OUTPUTS)
def test_gradient_of_each_output_alone(target: Target, output: str):
    """Outputs without a gradient come as None into the backward."""
    require(target)
    samples = make_samples(target.pick(50, 8), tail=3)
    inputs = _inputs(samples)
    samples = samples_to(samples, target.device)
    wanted = ["density", "rgb"] if output == "rgb" else ["density"]

    def function(density: Tensor, rgb: Tensor):
        return getattr(composite(density, rgb, samples, early_stop_eps=1e-3), output)

    compare(target, function, inputs, wanted, names=(output,))


def test_gradient_to_one_input_only(target: Target):
    require(target)
    samples = make_samples(target.pick(50, 8))
    inputs = _inputs(samples)
    samples = samples_to(samples, target.device)
    for wanted in (["density"], ["rgb"]):
        compare(target, lambda density, rgb: composite(density, rgb, samples), inputs, wanted, names=OUTPUTS)


def test_non_contiguous_inputs_and_expanded_gradients(target: Target):
    """A density cut out of a wider tensor, and the constant gradient that a mean sends back."""
    require(target)
    samples = make_samples(target.pick(60, 8))
    field = torch.rand(samples.capacity, 5, generator=generator())
    samples = samples_to(samples, target.device)

    def function(field: Tensor) -> Tensor:
        out = composite(field[:, 4], field[:, 1:4], samples)
        return out.rgb.mean() + out.opacity.mean() + out.depth.sum() + out.weights.sum()

    compare(target, function, {"field": field}, ["field"])


@pytest.mark.parametrize("behind", ["nothing", "one", "each", "strided"])
def test_pixels_match_the_formula(sized: tuple[Target, int], behind: str, poisoned_empty: None):
    """Over no background, one, one per ray: values, and gradients to field and background through every result."""
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    inputs = _inputs(samples)
    inputs["density"] = 1.0 + inputs["density"] * 0.1  # neither opacities nor what they leave lose their digits
    draw = generator(9)
    backgrounds = {"one": torch.rand(3, generator=draw), "each": torch.rand(n_rays, 3, generator=draw)}
    backgrounds["strided"] = torch.rand(3, n_rays, generator=draw).t()
    if behind != "nothing":
        inputs["background"] = backgrounds[behind]
    samples = samples_to(samples, target.device)

    def function(density: Tensor, rgb: Tensor, background: Tensor | None = None):
        return composite_pixels(density, rgb, samples, background)

    compare(target, function, inputs, list(inputs), names=OUTPUTS)


def test_pixels_of_the_reference_let_the_background_through():
    samples = PackedSamples.from_counts(torch.tensor([1, 0]), torch.tensor([1.0]), torch.tensor([2.0]))
    density, rgb = torch.tensor([math.log(4.0)]), torch.tensor([[0.8]])
    with use_backend("reference"):
        pixels = composite_pixels(density, rgb, samples, torch.tensor([0.4]))
    assert_close("rgb", pixels.rgb, torch.tensor([[0.75 * 0.8 + 0.25 * 0.4], [0.4]]))
    assert_close("opacity", pixels.opacity, torch.tensor([0.75, 0.0]))
    assert_close("depth", pixels.depth, torch.tensor([1.5, 0.0]))


@pytest.mark.parametrize("output", OUTPUTS)
def test_gradient_of_each_output_of_pixels_alone(target: Target, output: str):
    require(target)
    samples = make_samples(target.pick(60, 8), tail=4)
    inputs = _inputs(samples) | {"background": torch.rand(3, generator=generator(9))}
    inputs["density"] = 1.0 + inputs["density"] * 0.1
    samples = samples_to(samples, target.device)
    wanted = ["density", "rgb", "background"] if output == "rgb" else ["density"]
    compare(
        target,
        lambda density, rgb, background: getattr(composite_pixels(density, rgb, samples, background), output),
        inputs,
        wanted,
        names=[output],
    )


def test_a_background_of_another_shape_is_named():
    samples = make_samples(5)
    for wrong in (torch.rand(2), torch.rand(4, 3), torch.rand(1, 5, 3)):
        with pytest.raises(InputError, match="background"):
            composite_pixels(**_inputs(samples), samples=samples, background=wrong)


@pytest.mark.parametrize("n_rays", [0, 5])
@pytest.mark.parametrize("capacity", [0, 4])
def test_no_samples(target: Target, n_rays: int, capacity: int):
    require(target)
    zeros = torch.zeros(capacity, device=target.device)
    offsets = torch.zeros(n_rays + 1, dtype=torch.int32, device=target.device)
    samples = PackedSamples(zeros, zeros, zeros.int(), offsets)
    density = torch.full((capacity,), float("nan"), device=target.device, requires_grad=True)
    rgb = torch.full((capacity, 3), float("nan"), device=target.device, requires_grad=True)
    with use_backend(target.backend):
        out = composite(density, rgb, samples)
        assert not visibility(density, samples).any()
    assert out.rgb.shape == (n_rays, 3)
    assert out.opacity.tolist() == out.depth.tolist() == [0.0] * n_rays
    assert out.weights.tolist() == [0.0] * capacity
    grads = torch.autograd.grad(sum(o.sum() for o in out), [density, rgb])
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize(("early_stop_eps", "alpha_thre"), THRESHOLDS)
def test_visibility_matches_weights(sized: tuple[Target, int], early_stop_eps, alpha_thre, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=13)
    density = _inputs(samples)["density"].to(target.device)
    samples = samples_to(samples, target.device)
    seen = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            seen.append(visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre))
    assert seen[0].dtype == torch.bool
    assert int((seen[0] != seen[1]).sum()) <= n_rays // 500  # a value on the threshold itself may fall either way


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_compacting_the_visible_changes_nothing(backend: str):
    samples = make_samples(80)
    inputs = _inputs(samples)
    with use_backend(backend):
        keep = visibility(inputs["density"], samples, early_stop_eps=1e-2, alpha_thre=3e-2)
        assert 0 < int(keep.sum()) < samples.capacity
        all_of_it = composite(**inputs, samples=samples, early_stop_eps=1e-2, alpha_thre=3e-2)
        kept = composite(inputs["density"][keep], inputs["rgb"][keep], compact(samples, keep))
    for name in ("rgb", "opacity", "depth"):
        assert_close(name, getattr(kept, name), getattr(all_of_it, name))


def test_empty_samples_can_learn_to_be_seen(target: Target):
    """A density of zero has a gradient, unless a threshold is asked for."""
    require(target)
    samples = samples_to(make_samples(20), target.device)
    inputs = _inputs(make_samples(20)) | {"density": torch.zeros(samples.capacity)}
    inputs = {name: value.to(target.device) for name, value in inputs.items()}
    for threshold in (0.0, 0.05):
        seen, (gradient,) = run(
            target.backend,
            lambda density, rgb, t=threshold: composite(density, rgb, samples, alpha_thre=t).weights,
            inputs,
            ["density"],
        )
        assert not seen[0].any() and bool(gradient.any()) is (threshold == 0.0)

    require(target)
    samples = make_samples(20)
    inputs = {name: t.to(target.device) for name, t in _inputs(samples).items()}
    samples = samples_to(samples, target.device)
    with use_backend(target.backend):
        number = composite(**inputs, samples=samples, alpha_thre=0.05)
        tensor = composite(**inputs, samples=samples, alpha_thre=torch.tensor(0.05, device=target.device))
    assert torch.equal(number.rgb, tensor.rgb)


def test_gradcheck():
    samples = make_samples(6, mean=4, tail=2, dtype=torch.float64)
    inputs = {name: t.double().requires_grad_() for name, t in _inputs(samples).items()}
    clean = {name: torch.nan_to_num(t.detach()).requires_grad_() for name, t in inputs.items()}
    with use_backend("reference"):
        for eps, thre in THRESHOLDS:
            assert torch.autograd.gradcheck(
                lambda d, c, eps=eps, thre=thre: tuple(composite(d, c, samples, early_stop_eps=eps, alpha_thre=thre)),
                tuple(clean.values()),
            )


def _line(n: int, length: float) -> PackedSamples:
    edges = torch.linspace(0.0, length, n + 1, dtype=torch.float64)
    return PackedSamples.from_counts(torch.tensor([n]), edges[:-1].float(), edges[1:].float())


@pytest.mark.parametrize("sigma", [0.0, 0.1, 3.0, 80.0])
def test_constant_density_closed_form(target: Target, sigma: float):
    require(target)
    length, n = 2.0, 37
    samples = samples_to(_line(n, length), target.device)
    density = torch.full((n,), sigma, device=target.device)
    with use_backend(target.backend):
        out = composite(density, torch.ones(n, 2, device=target.device), samples)
    expected = 1.0 - torch.exp(torch.tensor(-sigma * length, dtype=torch.float64))
    torch.testing.assert_close(out.opacity.double().cpu(), expected[None], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.rgb, out.opacity[:, None].expand(-1, 2))


def test_weights_and_transmittance_sum_to_one(target: Target):
    require(target)
    samples = samples_to(make_samples(target.pick(200, 12)), target.device)
    inputs = {name: t.to(target.device) for name, t in _inputs(samples).items()}
    with use_backend(target.backend):
        out = composite(**inputs, samples=samples)
    optical = inputs["density"] * (samples.t_ends - samples.t_starts)
    for ray, (first, count) in enumerate(samples.packed_info.tolist()):
        left = torch.exp(-optical[first : first + count].double().sum())
        assert abs(float(out.opacity[ray]) + float(left) - 1.0) < 1e-5
        torch.testing.assert_close(out.weights[first : first + count].sum(), out.opacity[ray], atol=1e-6, rtol=1e-5)


def test_splitting_an_interval_changes_nothing(target: Target):
    """Each interval cut in two with the same density and colour: colour and opacity stay."""
    require(target)
    draw = generator(1)
    density, rgb = torch.rand(9, generator=draw) * 4, torch.rand(9, 3, generator=draw)
    whole, halves = samples_to(_line(9, 3.0), target.device), samples_to(_line(18, 3.0), target.device)
    density, rgb = density.to(target.device), rgb.to(target.device)
    with use_backend(target.backend):
        once = composite(density, rgb, whole)
        twice = composite(density.repeat_interleave(2), rgb.repeat_interleave(2, 0), halves)
    assert_close("rgb", twice.rgb, once.rgb)
    assert_close("opacity", twice.opacity, once.opacity)


def test_permuting_rays_permutes_the_result(target: Target):
    require(target)
    samples = make_samples(target.pick(40, 8))
    inputs = _inputs(samples)
    order = torch.randperm(samples.n_rays, generator=generator())
    info = samples.packed_info[order]
    rows = torch.cat([torch.arange(first, first + count) for first, count in info.tolist()])
    shuffled = PackedSamples.from_counts(info[:, 1], samples.t_starts[rows], samples.t_ends[rows])
    results = []
    for packed, data in ((samples, inputs), (shuffled, {name: t[rows] for name, t in inputs.items()})):
        packed = samples_to(packed, target.device)
        with use_backend(target.backend):
            results.append(composite(**{name: t.to(target.device) for name, t in data.items()}, samples=packed))
    for name in ("rgb", "opacity", "depth"):
        assert_close(name, getattr(results[1], name), getattr(results[0], name)[order.to(target.device)], 1e-6)


def test_opaque_sample_hides_the_rest(target: Target):
    """Enormous density must give weight one, zero behind it and finite gradients."""
    require(target)
    samples = samples_to(_line(4, 4.0), target.device)
    density = torch.tensor([0.0, 1e20, 1.0, 1e38], device=target.device)
    inputs = {"density": density, "rgb": torch.ones(4, 3, device=target.device)}
    outputs, grads = run(target.backend, lambda density, rgb: composite(density, rgb, samples), inputs, list(inputs))
    assert outputs[3].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


def test_errors_name_the_argument():
    samples = make_samples(4)
    n = samples.capacity
    with pytest.raises(InputError, match=r"density: expected shape .*squeeze the last dimension"):
        composite(torch.zeros(n, 1), torch.zeros(n, 3), samples)
    with pytest.raises(InputError, match="rgb: expected shape"):
        composite(torch.zeros(n), torch.zeros(n + 1, 3), samples)
    with pytest.raises(InputError, match="density: expected a floating dtype"):
        visibility(torch.zeros(n, dtype=torch.int32), samples)
