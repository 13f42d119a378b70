"""What only the packed kernels have: layouts and real sizes."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.ops import compact, packed_cumsum, packed_sum, use_backend

from ..ops.cases import Target, assert_close, compare, generator, make_samples, samples_to

pytest.importorskip("triton", reason="triton has no build for this platform")
HERE = Target("triton", "cuda" if torch.cuda.is_available() else "cpu", ())


def test_layouts_are_read_in_place():
    samples = make_samples(9, tail=4)
    wide = torch.randn(6, samples.capacity, generator=generator())
    offsets = samples.offsets.to(HERE.device)
    compare(HERE, lambda wide: packed_sum(wide.t()[:, 1:4], offsets), {"wide": wide}, ["wide"])
    compare(HERE, lambda wide: packed_cumsum(wide.t()[:, 2], offsets, exclusive=True), {"wide": wide}, ["wide"])


def test_half_sums_run_in_single_precision():
    offsets = torch.tensor([0, 3000], dtype=torch.int32, device=HERE.device)
    values = torch.full((3000, 1), 1.25, dtype=torch.float16, device=HERE.device)
    with use_backend("triton"):
        assert packed_sum(values, offsets).item() == 3750.0


@pytest.mark.parametrize("share", [2.0, 0.5])  # all fits, half does
def test_programs_begin_behind_the_sums_of_others(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nerfturbo.ops.packed.triton.FIT_BLOCK", 16)
    samples = samples_to(make_samples(63), HERE.device)
    keep = (torch.rand(samples.capacity, generator=generator()) < 0.6).to(HERE.device)
    results = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            results.append(compact(samples, keep, capacity=int(share * keep.sum())))
    assert torch.equal(results[0].offsets, results[1].offsets) and results[0].n_rays_kept == results[1].n_rays_kept


@pytest.mark.gpu
@pytest.mark.parametrize(("n_rays", "mean"), [(65536, 18), (8192, 100)])
def test_real_size_matches_reference(n_rays: int, mean: int, poisoned_empty: None):
    samples = samples_to(make_samples(n_rays, mean, tail=100_000), "cuda")
    target = Target("triton", "cuda", ())
    values = torch.randn(samples.capacity, 3, generator=generator())
    compare(target, lambda values: packed_sum(values, samples.offsets), {"values": values}, ["values"], tolerance=1e-4)
    column = {"values": values[:, 0].contiguous()}
    compare(target, lambda values: packed_cumsum(values, samples.offsets), column, ["values"], tolerance=1e-4)
    keep = (torch.rand(samples.capacity, generator=generator()) < 0.25).cuda()
    for capacity in (None, 1 << 16, 1 << 18, 1 << 20):
        results = []
        for backend in ("triton", "reference"):
            with use_backend(backend):
                results.append(compact(samples, keep, capacity=capacity))
        for name in ("t_starts", "t_ends", "ray_indices", "offsets"):
            assert_close(name, getattr(results[0], name), getattr(results[1], name), 0.0)
        if capacity is not None:
            assert results[0].n_rays_kept == results[1].n_rays_kept
