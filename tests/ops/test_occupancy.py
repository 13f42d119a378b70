"""The grid's arithmetic: running maximum with one decay per update, threshold, bits."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import decay_and_max, pack_bits, threshold_bits, unpack_bits

from .cases import Target, assert_close, generator, require


def _density(n: int) -> torch.Tensor:
    density = torch.rand(n, generator=generator(8)) ** 4
    density[torch.rand(n, generator=generator(9)) < 0.2] = -1.0  # cells no camera sees
    return density


@pytest.mark.parametrize("repeats", [False, True])
def test_decay_and_max_matches_reference(sized: tuple[Target, int], repeats: bool):
    target, n = sized
    require(target)
    n_cells = 512
    draw = generator(n)
    cells = torch.randint(0, n_cells, (n,), generator=draw) if repeats else torch.randperm(n_cells, generator=draw)[:n]
    fresh = torch.rand(cells.shape[0], generator=draw)
    if cells.shape[0] > 4:
        fresh[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    results = []
    for backend in (target.backend, "reference"):
        density = _density(n_cells).to(target.device)
        with use_backend(backend):
            decay_and_max(density, cells.to(target.device), fresh.to(target.device), 0.95)
        results.append(density)
    assert_close("density", *results, 1e-6)
    assert torch.equal(results[0] < 0, _density(n_cells).to(target.device) < 0)


def test_repeated_cell_decays_once(target: Target):
    require(target)
    density = torch.tensor([1.0, 1.0, -1.0] + [0.5] * 29, device=target.device)
    cells = torch.tensor([0, 0, 0, 1, 1, 2], device=target.device)
    fresh = torch.tensor([0.1, 0.2, 0.3, 2.0, 3.0, 9.0], device=target.device)
    with use_backend(target.backend):
        decay_and_max(density, cells, fresh, 0.5)
    assert density[:4].tolist() == [0.5, 3.0, -1.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_fresh_values(target: Target, dtype: torch.dtype):
    require(target)
    density = torch.zeros(32, device=target.device)
    with use_backend(target.backend):
        decay_and_max(density, torch.arange(8, device=target.device), torch.ones(8, dtype=dtype).to(target.device), 0.5)
    assert density.tolist() == [1.0] * 8 + [0.0] * 24


def test_no_cells(target: Target):
    require(target)
    density = _density(64).to(target.device)
    with use_backend(target.backend):
        decay_and_max(density, torch.zeros(0, dtype=torch.int64, device=target.device), density[:0], 0.5)
    assert torch.equal(density.cpu(), _density(64))


@pytest.mark.parametrize("threshold", [0.01, 100.0])
@pytest.mark.parametrize("n_words", [1, 2, 67])
def test_threshold_matches_reference(target: Target, n_words: int, threshold: float, poisoned_empty: None):
    """A threshold below the mean, and one above, where the mean takes over."""
    require(target)
    density = _density(32 * n_words).to(target.device)
    results = []
    for backend in (target.backend, "reference"):
        bits = torch.full((n_words,), 0x5A5A5A5A, dtype=torch.int32, device=target.device)
        with use_backend(backend):
            mean = threshold_bits(density, bits, threshold)
        results.append((bits, mean))
    assert torch.equal(results[0][0], results[1][0])
    assert_close("mean", results[0][1], results[1][1], 1e-6)


def test_mean_of_no_seen_cells(target: Target):
    require(target)
    bits = torch.ones(2, dtype=torch.int32, device=target.device)
    with use_backend(target.backend):
        mean = threshold_bits(torch.full((64,), -1.0, device=target.device), bits, 0.5)
    assert mean.item() == 0.0
    assert not bits.any()


def test_bits_round_trip():
    occupied = torch.rand(32 * 9, generator=generator()) < 0.5
    occupied[31] = True  # the sign bit
    bits = pack_bits(occupied)
    assert bits.dtype == torch.int32
    assert torch.equal(unpack_bits(bits), occupied)
    for cell in (0, 31, 32, 200):
        assert bool((bits[cell >> 5].item() >> (cell & 31)) & 1) == bool(occupied[cell])


def test_errors_name_the_argument():
    with pytest.raises(InputError, match=r"cells: expected torch\.int64"):
        decay_and_max(torch.zeros(32), torch.zeros(3, dtype=torch.int32), torch.zeros(3), 0.9)
    with pytest.raises(InputError, match="fresh: expected shape"):
        decay_and_max(torch.zeros(32), torch.zeros(3, dtype=torch.int64), torch.zeros(4), 0.9)
    with pytest.raises(InputError, match="bits: expected shape"):
        threshold_bits(torch.zeros(64), torch.zeros(1, dtype=torch.int32), 0.1)
