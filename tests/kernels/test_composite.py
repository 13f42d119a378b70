"""What only the compositing kernels have: layouts, many channels, long rays, capture; and real sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.ops import compact, composite, use_backend, visibility
from nerfturbo.ops.composite_loss import composite_loss
from nerfturbo.types import PackedSamples

from ..ops.cases import Target, assert_close, compare, generator, make_samples, run, samples_to

pytest.importorskip("triton", reason="triton has no build for this platform")
OUTPUTS = ("rgb", "opacity", "depth", "weights")
HERE = Target("triton", "cuda" if torch.cuda.is_available() else "cpu", ())


def _field(n: int, channels: int = 3) -> dict[str, Tensor]:
    draw = generator(1)
    return {"density": torch.rand(n, generator=draw) ** 3 * 20.0, "rgb": torch.rand(n, channels, generator=draw)}


def test_feature_major_colours_keep_their_layout(kernel_device: torch.device):
    """Colours stored (3, n) are read in place, and their gradient is stored the same way."""
    samples = samples_to(make_samples(12, tail=5), str(kernel_device))
    inputs = {name: t.to(kernel_device) for name, t in _field(samples.capacity).items()}
    stored = inputs["rgb"].t().contiguous().half()
    results = []
    for rgb in (stored.t(), stored.t().contiguous()):
        rgb = rgb.detach().requires_grad_()
        with use_backend("triton"):
            out = composite(inputs["density"], rgb, samples)
        (grad,) = torch.autograd.grad(out.rgb.square().sum(), rgb)
        assert grad.stride() == rgb.stride()
        assert grad.dtype == torch.float16
        results.append((out.rgb, grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("output", ["opacity", "depth"])
def test_gradients_may_have_strides(kernel_device: torch.device, output: str):
    """Of a sum they are one number, expanded; of a column they lie apart."""
    samples = samples_to(make_samples(10, tail=2), str(kernel_device))
    inputs = {name: t.to(kernel_device) for name, t in _field(samples.capacity).items()}
    density, spread = inputs["density"].requires_grad_(), torch.rand(samples.n_rays, 3, device=kernel_device)
    with use_backend("triton"):
        for given in (spread[:, 1], torch.ones((), device=kernel_device).expand(samples.n_rays)):
            out = getattr(composite(density, inputs["rgb"], samples), output)
            found, expected = (torch.autograd.grad(out, density, g, True)[0] for g in (given, given.contiguous()))
            assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", ["density", "rgb"])
def test_only_the_gradient_that_is_wanted(wanted: str):
    samples = make_samples(10, tail=2)
    inputs, samples = _field(samples.capacity), samples_to(samples, HERE.device)
    compare(HERE, lambda density, rgb: composite(density, rgb, samples), inputs, [wanted], names=OUTPUTS)


@pytest.mark.parametrize("channels", [2, 19])
def test_many_channels(channels: int):
    samples = make_samples(10, tail=2)
    inputs, samples = _field(samples.capacity, channels), samples_to(samples, HERE.device)
    compare(HERE, lambda density, rgb: composite(density, rgb, samples), inputs, ["density", "rgb"], names=OUTPUTS)


def _line(counts: list[int]) -> PackedSamples:
    n = sum(counts)
    starts = torch.cat([torch.arange(c) * 0.02 for c in counts]) if n else torch.zeros(0)
    return PackedSamples.from_counts(torch.tensor(counts), starts, starts + 0.02)


def test_rays_longer_than_a_tile():
    """A ray across many tiles, one that ends on a tile's border, and short ones beside them."""
    samples = _line([100, 8, 0, 32, 1, 33, 64])
    inputs, samples = _field(samples.capacity), samples_to(samples, HERE.device)
    compare(HERE, lambda density, rgb: composite(density, rgb, samples), inputs, ["density", "rgb"], names=OUTPUTS)


def test_dense_samples_get_no_noise():
    """The gradient of an opaque sample is exactly nothing, however many samples lie before and behind it."""
    samples = samples_to(_line([70, 70]), HERE.device)
    density = torch.full((140,), 1.0, device=HERE.device)
    density[[40, 100, 139]] = 1e7
    inputs = {"density": density, "rgb": torch.rand(140, 3, generator=generator(2)).to(HERE.device)}
    _, (grad, _) = run("triton", lambda density, rgb: composite(density, rgb, samples), inputs, ["density", "rgb"])
    assert not grad[40:70].any()
    assert not grad[100:].any()
    assert bool((grad[:40] != 0.0).all())


def _training_samples(n_rays: int, per_ray: float, capacity: int) -> PackedSamples:
    draw = generator(4)
    counts = torch.empty(n_rays).exponential_(1.0 / per_ray, generator=draw).long()
    rows = torch.repeat_interleave(torch.arange(n_rays), counts)
    first = counts.cumsum(0) - counts
    starts = torch.zeros(capacity)
    starts[: len(rows)] = 2.0 + 0.005 * (torch.arange(len(rows)) - first[rows])
    packed = PackedSamples.from_counts(counts, starts[: len(rows)], starts[: len(rows)] + 0.005)
    pad = torch.zeros(capacity - len(rows))
    return PackedSamples(
        torch.cat([packed.t_starts, pad]),
        torch.cat([packed.t_ends, pad]),
        torch.cat([packed.ray_indices, pad.int()]),
        packed.offsets,
        torch.tensor(n_rays, dtype=torch.int32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("n_rays", "per_ray"), [(65536, 3.5), (8192, 25.0)])
def test_real_size_matches_reference(n_rays: int, per_ray: float, poisoned_empty: None):
    samples = samples_to(_training_samples(n_rays, per_ray, 1 << 18), "cuda")
    field = _field(1 << 18)
    field["density"] *= 20.0

    def function(density: Tensor, rgb: Tensor):
        return composite(density, rgb, samples, early_stop_eps=1e-4)

    compare(Target("triton", "cuda", ()), function, field, ["density", "rgb"], names=OUTPUTS, tolerance=1e-4)
    raw = torch.randn(4, 1 << 18, generator=generator(6)).t() * 2.0
    pixels = [torch.rand(n_rays, c, generator=generator(c)).cuda() for c in (3, 4)]
    compare(
        Target("triton", "cuda", ()),
        lambda raw: composite_loss(raw, samples, *pixels),
        {"raw": raw},
        ["raw"],
        names=("loss", "mse", "rgb"),
        tolerance=1e-4,
    )


@pytest.mark.gpu
def test_captured_pruning_and_loss_follow_their_inputs():
    """Visibility, compaction, loss and backward recorded once: replays equal eager runs on new inputs, to the bit."""
    samples = samples_to(_training_samples(20_000, 15.0, 1 << 19), "cuda")
    density = torch.rand(1 << 19, generator=generator()).cuda() ** 6 * 500.0
    raw = torch.randn(4, 1 << 18, device="cuda").t().detach().requires_grad_()
    background, target = torch.rand(20_000, 3, device="cuda"), torch.rand(20_000, 4, device="cuda")
    scale = torch.tensor(128.0, device="cuda")

    def step() -> tuple[Tensor, ...]:
        with use_backend("triton"):
            keep = visibility(density, samples, early_stop_eps=1e-4)
            kept = compact(samples, keep, capacity=1 << 18)
            out = composite_loss(raw, kept, background, target, gradient_scale=scale)
            (grad,) = torch.autograd.grad(out.loss * scale, raw)
        return kept.t_starts, kept.offsets, kept.n_rays_kept, out.loss, out.mse, grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for factor in (1.0, 0.05, 20.0):
        density.mul_(factor)
        with torch.no_grad():
            raw.copy_(raw.roll(7, 0))
        scale.mul_(2.0)
        graph.replay()
        for got, want in zip(recorded, step(), strict=True):
            assert_close("replay", got.detach(), want.detach(), 0.0)
