"""Packed sums, scans and compaction: packed = padded, tails are ignored, order is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import compact, packed_cumsum, packed_sum, use_backend
from nerfturbo.types import PackedSamples

from .cases import (
    Target,
    assert_close,
    assert_packed,
    compare,
    generator,
    make_samples,
    poison_tail,
    require,
    samples_to,
)

MODES = [(e, r) for e in (False, True) for r in (False, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [None, 1, 3, 5])
def test_sum_matches_reference(sized: tuple[Target, int], channels, dtype, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=17)
    shape = (samples.capacity,) if channels is None else (samples.capacity, channels)
    values = poison_tail(torch.randn(shape, generator=generator()).to(dtype), samples.offsets)
    offsets = samples.offsets.to(target.device)
    compare(target, lambda values: packed_sum(values, offsets), {"values": values}, ["values"])


@pytest.mark.parametrize(("exclusive", "reverse"), MODES)
def test_cumsum_matches_reference(sized: tuple[Target, int], exclusive, reverse, poisoned_empty: None):
    target, n_rays = sized
    require(target)
    samples = make_samples(n_rays, tail=5)
    values = poison_tail(torch.randn(samples.capacity, generator=generator()), samples.offsets)
    offsets = samples.offsets.to(target.device)
    compare(
        target,
        lambda values: packed_cumsum(values, offsets, exclusive=exclusive, reverse=reverse),
        {"values": values},
        ["values"],
    )


@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("n_rays", [0, 3])
def test_nothing_to_sum(target: Target, n: int, n_rays: int):
    """No rays, no samples, or only a tail: zeros, and a gradient of zeros."""
    require(target)
    values = torch.full((n,), float("nan"), device=target.device, requires_grad=True)
    offsets = torch.zeros(n_rays + 1, dtype=torch.int32, device=target.device)
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            total, running = packed_sum(values, offsets), packed_cumsum(values, offsets)
        assert total.tolist() == [0.0] * n_rays
        assert running.tolist() == [0.0] * n
        (grad,) = torch.autograd.grad(total.sum() + running.sum(), values)
        assert grad.tolist() == [0.0] * n


def test_packed_equals_padded():
    samples = make_samples(40, tail=3)
    values = torch.randn(samples.capacity, generator=generator())
    total, running = packed_sum(values, samples.offsets), packed_cumsum(values, samples.offsets)
    backwards = packed_cumsum(values, samples.offsets, exclusive=True, reverse=True)
    for ray, (first, count) in enumerate(samples.packed_info.tolist()):
        own = values[first : first + count]
        torch.testing.assert_close(total[ray], own.sum())
        torch.testing.assert_close(running[first : first + count], own.cumsum(0))
        torch.testing.assert_close(backwards[first : first + count], own.flip(0).cumsum(0).flip(0) - own)


@pytest.mark.parametrize(("exclusive", "reverse"), MODES)
def test_gradcheck(exclusive, reverse):
    samples = make_samples(6, mean=3, tail=2)
    values = torch.randn(samples.capacity, 2, generator=generator(), dtype=torch.float64, requires_grad=True)
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda v: packed_sum(v, samples.offsets), values)
        column = values.detach()[:, 0].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda v: packed_cumsum(v, samples.offsets, exclusive=exclusive, reverse=reverse), column
        )


def _same(got: PackedSamples, want: PackedSamples) -> None:
    assert_packed(got)
    for name in ("t_starts", "t_ends", "ray_indices", "offsets"):
        assert_close(name, getattr(got, name), getattr(want, name), 0.0)
    assert (got.n_rays_kept is None) == (want.n_rays_kept is None)
    if got.n_rays_kept is not None and want.n_rays_kept is not None:
        assert_close("n_rays_kept", got.n_rays_kept, want.n_rays_kept)


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0, 2.0])
def test_compact_matches_reference(sized: tuple[Target, int], share, poisoned_empty: None):
    """Exact length, and capacities that hold nothing, half, just everything, and more."""
    target, n_rays = sized
    require(target)
    samples = samples_to(make_samples(n_rays, tail=9), target.device)
    keep = (torch.rand(samples.capacity, generator=generator()) < 0.6).to(target.device)
    capacity = None if share is None else max(1, int(share * int((keep & samples.used).sum())))
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            results.append(compact(samples, keep, capacity=capacity))
    _same(*results)


def test_compact_keeps_what_marching_kept(target: Target):
    """Rays that marching dropped for lack of room stay dropped."""
    require(target)
    samples = samples_to(make_samples(10), target.device)
    kept = torch.tensor(7, dtype=torch.int32, device=target.device)
    samples = replace(samples, n_rays_kept=kept)
    keep = torch.ones(samples.capacity, dtype=torch.bool, device=target.device)
    with use_backend(target.backend):
        assert compact(samples, keep).n_rays_kept == 7
        assert compact(samples, keep, capacity=samples.capacity).n_rays_kept == 7
        first = int(samples.offsets[3])
        assert compact(samples, keep, capacity=max(first, 1)).n_rays_kept <= 7


@pytest.mark.parametrize("n_rays", [0, 3])
def test_compact_nothing(target: Target, n_rays: int):
    require(target)
    samples = samples_to(make_samples(n_rays), target.device)
    keep = torch.zeros(samples.capacity, dtype=torch.bool, device=target.device)
    with use_backend(target.backend):
        assert compact(samples, keep).capacity == 0
        out = compact(samples, keep, capacity=4)
    assert_packed(out)
    assert out.capacity == 4
    assert out.n_rays_kept == n_rays


def test_errors_name_the_argument():
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(InputError, match=r"values: expected shape \(n,\)"):
        packed_cumsum(torch.zeros(2, 1), offsets)
    with pytest.raises(InputError, match=r"offsets: expected torch\.int32"):
        packed_sum(torch.zeros(2), offsets.long())
    with pytest.raises(InputError, match="values: expected a floating dtype"):
        packed_sum(torch.zeros(2, dtype=torch.int64), offsets)
    with pytest.raises(InputError, match="offsets: expected at least one"):
        packed_sum(torch.zeros(2), offsets[:0])
    samples = make_samples(4)
    with pytest.raises(InputError, match="keep: expected shape"):
        compact(samples, torch.ones(samples.capacity + 1, dtype=torch.bool))
    with pytest.raises(InputError, match="capacity: expected at least 1"):
        compact(samples, torch.ones(samples.capacity, dtype=torch.bool), capacity=0)
