"""Offsets from counts: more rays than one program owns, and every place where a capacity can break."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.ops.packed import reference as reference

offsets_module = pytest.importorskip("nerfturbo.ops.packed.triton", reason="triton is not installed")


def _fit(counts: torch.Tensor, capacity: int | None, limit: torch.Tensor | None = None):
    group = offsets_module.GROUP
    padded = torch.nn.functional.pad(counts, (0, -counts.shape[0] % group))
    return offsets_module.fit_offsets(counts, padded.view(-1, group).sum(1, dtype=torch.int32), capacity, limit)


@pytest.mark.parametrize("n_rays", [1, 4096, 4097, 13_000])
def test_matches_reference(n_rays: int, kernel_device: torch.device, poisoned_empty: None):
    draw = torch.Generator().manual_seed(n_rays)
    counts = torch.randint(0, 30, (n_rays,), generator=draw, dtype=torch.int32).to(kernel_device)
    counts[n_rays // 3 : n_rays // 2] = 0
    total = int(counts.sum())
    for capacity in (None, 1, total // 7, total // 2, total - 1, total, total + 5):
        if capacity == 0:
            continue
        got, want = _fit(counts, capacity), reference.fit_offsets(counts, capacity)
        assert torch.equal(got[0], want[0]), f"offsets at capacity {capacity} of {total}"
        assert (got[1] is None) == (want[1] is None)
        if want[1] is not None:
            assert torch.equal(got[1], want[1]), f"kept at capacity {capacity} of {total}"


def test_totals_past_31_bits_are_cut_not_wrapped(kernel_device: torch.device):
    counts = torch.full((6000,), 1 << 20, dtype=torch.int32, device=kernel_device)
    offsets, kept = _fit(counts, 1 << 30)
    assert kept == 1024
    assert offsets[-1] == 1 << 30
    assert bool((offsets[1:] >= offsets[:-1]).all())


def test_limit(kernel_device: torch.device):
    counts = torch.ones(10, dtype=torch.int32, device=kernel_device)
    limit = torch.tensor(3, dtype=torch.int32, device=kernel_device)
    assert _fit(counts, 100, limit)[1] == 3
    assert _fit(counts, 2, limit)[1] == 2
