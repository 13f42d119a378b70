"""Random numbers, spherical harmonics, importance sampling and the grid's arithmetic at real sizes and in a graph."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.ops import Stream, importance_sample, random_bits, random_uniform, spherical_harmonics, use_backend
from nerfturbo.ops.march import decay_and_max, threshold_bits

from ..ops.cases import Target, assert_close, compare, generator

pytest.importorskip("triton", reason="triton has no build for this platform")


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**40 + 5])
def test_indices_past_31_bits(kernel_device: torch.device, first: int):
    arguments = {"columns": 4, "seed": -1 << 40, "stream": Stream.USER, "step": 2**33 + 1, "first": first}
    bits = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            bits.append(random_bits(9, device=kernel_device, **arguments))
    assert torch.equal(*bits)


def test_strided_directions(kernel_device: torch.device):
    directions = torch.nn.functional.normalize(torch.randn(3, 7, generator=generator()), dim=0).t()
    target = Target("triton", str(kernel_device), ())
    compare(target, lambda directions: spherical_harmonics(directions, 4), {"directions": directions}, ["directions"])


@pytest.mark.gpu
def test_captured_draws_follow_the_step():
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    arguments = {"columns": 3, "seed": 5, "stream": Stream.JITTER, "device": "cuda"}
    with use_backend("triton"):
        random_uniform(65536, step=step, **arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = random_uniform(65536, step=step, **arguments)
        for number in (1, 77, 2**32 + 4):
            step.fill_(number)
            graph.replay()
            assert torch.equal(recorded, random_uniform(65536, step=number, **arguments))
    with use_backend("reference"):
        assert torch.equal(recorded, random_uniform(65536, step=2**32 + 4, **arguments))


@pytest.mark.gpu
def test_real_sizes():
    target = Target("triton", "cuda", ())
    directions = torch.nn.functional.normalize(torch.randn(65536, 3, generator=generator()), dim=-1)
    compare(target, lambda directions: spherical_harmonics(directions, 4), {"directions": directions}, ["directions"])
    edges = torch.rand(8192, 97, generator=generator()).cumsum(-1)
    weights = torch.rand(8192, 96, generator=generator(1)) ** 3
    jitter = torch.rand(8192, 49, generator=generator(2))
    compare(
        target,
        lambda edges, weights, jitter: importance_sample(edges, weights, 48, jitter=jitter),
        {"edges": edges, "weights": weights, "jitter": jitter},
        tolerance=1e-4,
    )


@pytest.mark.gpu
def test_grid_update_at_real_size():
    n_cells = 5 * 128**3
    draw = generator()
    start = torch.rand(n_cells, generator=draw).cuda() ** 8
    start[torch.randperm(n_cells, generator=draw)[: n_cells // 5].cuda()] = -1.0
    cells = torch.randint(0, n_cells, (n_cells // 2,), generator=draw).cuda()
    fresh = torch.rand(n_cells // 2, generator=draw).cuda() ** 6
    fresh[::97] = float("nan")
    results = []
    for backend in ("triton", "reference"):
        density, bits = start.clone(), torch.zeros(n_cells // 32, dtype=torch.int32, device="cuda")
        with use_backend(backend):
            decay_and_max(density, cells, fresh, 0.95)
            mean = threshold_bits(density, bits, 1e9)
            threshold_bits(density, bits, 0.03)  # far from the mean, whose last digits depend on the order of the sum
        results.append((density, bits, mean))
    assert_close("density", results[0][0], results[1][0], 1e-6)
    assert_close("bits", results[0][1], results[1][1])
    assert_close("mean", results[0][2], results[1][2], 1e-5)
