"""Total variation of sparse voxels: zero where nothing differs, a ramp's slope, gradients in every backend."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from nerfturbo.fields.voxels import split_nodes
from nerfturbo.ops import GradientSink, use_backend
from nerfturbo.ops.voxels import VoxelTables, voxel_variation

from .cases import Target, assert_close, compare, generator, require
from .voxel_cases import index_to, make_tables, make_voxels


def drawn(n: int, m: int) -> Tensor:
    return torch.randint(0, n, (m,), generator=generator(4))


@pytest.mark.usefixtures("poisoned_empty")
def test_matches_reference(sized: tuple[Target, int]) -> None:
    target, m = sized
    require(target)
    index, nodes = make_voxels()
    tables, chosen = make_tables(nodes.shape[0], 9), drawn(nodes.shape[0], m).to(target.device)
    index, nodes = index_to(index, target.device), nodes.to(target.device)

    def function(density: Tensor, color: Tensor) -> Tensor:
        return voxel_variation(VoxelTables(density, color), index, nodes, chosen, n_basis=9)

    compare(target, function, tables._asdict(), ["density", "color"], tolerance=1e-4)


def test_gradients_of_the_reference() -> None:
    index, nodes = make_voxels(3, 0.8)
    tables = make_tables(nodes.shape[0], 1, dtype=torch.float64)
    chosen = drawn(nodes.shape[0], 30)

    def function(density: Tensor, color: Tensor) -> Tensor:
        return voxel_variation(VoxelTables(density, color), index, nodes, chosen, n_basis=1)

    assert torch.autograd.gradcheck(
        function, [table.requires_grad_() for table in tables], eps=1e-6, atol=1e-6, fast_mode=True
    )


def test_a_ramp_has_its_slope_and_a_constant_none(target: Target) -> None:
    require(target)
    resolution = 5
    index, nodes = make_voxels(resolution, 1.0)
    x, y, z = split_nodes(nodes, resolution)
    inner = ((x < resolution) & (y < resolution) & (z < resolution)).nonzero()[:, 0].to(target.device)
    tables = VoxelTables(
        (2.0 * x - y + 2.0 * z).to(target.device), torch.full((nodes.shape[0], 12), 3.0).to(target.device)
    )
    with use_backend(target.backend):  # type: ignore[arg-type]
        found = voxel_variation(tables, index_to(index, target.device), nodes.to(target.device), inner, n_basis=4)
    assert found.tolist() == [pytest.approx(3.0, abs=1e-3), pytest.approx(0.0, abs=1e-6)]


def test_steps_down_the_gradient_make_it_smooth(target: Target) -> None:
    require(target)
    index, nodes = make_voxels(4, 0.9)
    index, nodes = index_to(index, target.device), nodes.to(target.device)
    tables = VoxelTables(*(t.to(target.device).requires_grad_() for t in make_tables(nodes.shape[0], 1)))
    chosen, values = torch.arange(nodes.shape[0], device=target.device), []
    with use_backend(target.backend):  # type: ignore[arg-type]
        for _ in range(target.pick(20, 3)):
            found = voxel_variation(tables, index, nodes, chosen, n_basis=1).sum()
            values.append(found.item())
            grads = torch.autograd.grad(found, list(tables))
            for table, grad in zip(tables, grads, strict=True):
                table.data -= 0.1 * grad / grad.abs().max()
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
    assert all(math.isfinite(value) for value in values)


def test_a_sink_takes_the_gradient(target: Target) -> None:
    require(target)
    index, nodes = make_voxels(4, 0.9)
    index, nodes = index_to(index, target.device), nodes.to(target.device)
    chosen = drawn(nodes.shape[0], 20).to(target.device)
    found = []
    for with_sink in (True, False):
        tables = VoxelTables(*(t.to(target.device).requires_grad_() for t in make_tables(nodes.shape[0], 4)))
        sink = GradientSink(tuple(torch.zeros_like(table).detach() for table in tables))
        with use_backend(target.backend):  # type: ignore[arg-type]
            value = voxel_variation(tables, index, nodes, chosen, n_basis=4, sink=sink if with_sink else None)
            (value * torch.tensor([2.0, 3.0], device=target.device)).sum().backward()
        assert (tables.density.grad is None) == with_sink
        found.append(sink.buffers if with_sink else (tables.density.grad, tables.color.grad))
    for name, got, want in zip(("density", "color"), *found, strict=True):
        assert_close(name, got, want)
