"""Sparse voxels: linear in the tables, exact at nodes, continuous everywhere; gradients to all that has one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import GradientSink, use_backend
from nerfturbo.ops.voxels import VoxelIndex, VoxelTables, voxel_density, voxel_lookup
from nerfturbo.ops.voxels.reference import node_rows

from .cases import Target, assert_close, compare, generator, make_positions, require, spare_interpreter
from .voxel_cases import index_to, make_tables, make_voxels


def inputs_for(n: int, n_basis: int, n_nodes: int, n_rays: int = 7) -> dict[str, Tensor]:
    tables = make_tables(n_nodes, n_basis)
    basis = torch.randn(n_rays, n_basis, generator=generator(2))
    return {"positions": make_positions(n), "basis": basis, "density": tables.density, "color": tables.color}


def rays_for(n: int, n_rays: int = 7) -> Tensor:
    return torch.randint(0, n_rays, (n,), generator=generator(3)).sort().values.to(torch.int32)


def check(target: Target, n: int, n_basis: int, wanted: list[str]) -> None:
    index, nodes = make_voxels()
    index, rays = index_to(index, target.device), rays_for(n).to(target.device)

    def function(positions: Tensor, basis: Tensor, density: Tensor, color: Tensor) -> Tensor:
        return voxel_lookup(positions, basis, rays, VoxelTables(density, color), index)

    compare(target, function, inputs_for(n, n_basis, nodes.shape[0]), wanted, tolerance=1e-4)


@pytest.mark.usefixtures("poisoned_empty")
def test_matches_reference(sized: tuple[Target, int]) -> None:
    target, n = sized
    require(target)
    check(target, n, 4, ["positions", "basis", "density", "color"])


@pytest.mark.parametrize("n_basis", [1, 9, 16])
def test_other_degrees(target: Target, n_basis: int) -> None:
    require(target)
    spare_interpreter(target, unless=n_basis == 9)
    check(target, target.pick(257, 20), n_basis, ["density", "color"])


def test_nothing_at_all(target: Target) -> None:
    require(target)
    check(target, 0, 4, ["density", "color"])


def test_gradients_of_the_reference() -> None:
    index, nodes = make_voxels(3, 0.7)
    tables = make_tables(nodes.shape[0], 4, dtype=torch.float64)
    positions = torch.rand(6, 3, dtype=torch.float64, generator=generator(4))
    basis = torch.randn(2, 4, dtype=torch.float64, generator=generator(5))
    rays = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    leaves = [tensor.requires_grad_() for tensor in (positions, basis, *tables)]

    def function(positions: Tensor, basis: Tensor, density: Tensor, color: Tensor) -> Tensor:
        return voxel_lookup(positions, basis, rays, VoxelTables(density, color), index)

    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6, fast_mode=True)


def test_exact_at_stored_nodes_and_empty_at_missing_ones(target: Target) -> None:
    require(target)
    resolution = 11
    index, nodes = make_voxels(resolution)
    tables = make_tables(nodes.shape[0], 1)
    places = torch.arange((resolution + 1) ** 3)[:: target.pick(1, 40)]
    xyz = torch.stack([places // 144, places // 12 % 12, places % 12], -1)
    assert set(node_rows(index, *xyz.unbind(-1)).tolist()) <= {-1, *range(nodes.shape[0])}
    truth = torch.full((12**3,), index.empty)
    truth[nodes.long()] = tables.density
    with use_backend(target.backend):  # type: ignore[arg-type]
        found = voxel_density(
            (xyz / resolution).to(target.device), tables.density.to(target.device), index_to(index, target.device)
        )
    assert_close("density", found.cpu(), truth[places], 1e-5)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_no_seams_at_voxel_faces_stored_or_not(target: Target, share: float) -> None:
    """Just before and just behind a face, both values are the same, whatever of its two voxels is stored."""
    require(target)
    index, nodes = make_voxels(share=share)
    index, r = index_to(index, target.device), index.resolution
    tables = VoxelTables(*(table.to(target.device) for table in make_tables(nodes.shape[0], 4)))
    n = target.pick(600, 40)
    places = torch.rand(n, 3, generator=generator(6), dtype=torch.float64)
    axis = torch.arange(n) % 3
    face = torch.randint(1, r, (n,), generator=generator(7)).double() / r
    basis, rays = torch.ones(1, 4, device=target.device), torch.zeros(n, dtype=torch.int32, device=target.device)
    values = []
    for side in (-1e-6, 1e-6):
        places[torch.arange(n), axis] = face + side
        with use_backend(target.backend):  # type: ignore[arg-type]
            values.append(voxel_lookup(places.float().to(target.device), basis, rays, tables, index))
    assert (values[0] - values[1]).abs().max() < 1e-3  # a slope of at most ~20 per voxel, times 2e-6 * 11
    assert values[0].std() > 0.1  # and there is something to see


def test_density_alone_is_the_last_column(target: Target) -> None:
    require(target)
    n = target.pick(500, 30)
    index, nodes = make_voxels()
    index, rays = index_to(index, target.device), rays_for(n).to(target.device)
    given = {name: value.to(target.device) for name, value in inputs_for(n, 4, nodes.shape[0]).items()}
    count = torch.tensor(n - 9, dtype=torch.int32, device=target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        tables = VoxelTables(given["density"], given["color"])
        whole = voxel_lookup(given["positions"], given["basis"], rays, tables, index, n_used=count)
        alone = voxel_density(given["positions"], given["density"], index, n_used=count)
    assert_close("density", alone, whole[:, 3].contiguous(), 1e-6)
    assert not whole[n - 9 :].any() and not alone[n - 9 :].any()
    with use_backend("reference"):
        plain = voxel_density(given["positions"], given["density"], index, n_used=count)
    assert_close("density of the reference", plain, alone, 1e-4)


def test_where_no_node_is_stored_all_is_empty() -> None:
    index = make_voxels(share=0.0)[0]
    positions, unused = torch.rand(9, 3, generator=generator(1)), torch.ones(1)
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            assert voxel_density(positions, unused, index).tolist() == pytest.approx([index.empty] * 9)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("half", [None, torch.float16])
def test_a_sink_takes_the_gradients_and_unused_rows_give_none(target: Target, half: torch.dtype | None) -> None:
    require(target)
    n, used = target.pick(200, 33), target.pick(150, 21)
    index, nodes = make_voxels()
    index, rays = index_to(index, target.device), rays_for(n).to(target.device)
    given = {name: value.to(target.device) for name, value in inputs_for(n, 4, nodes.shape[0]).items()}
    given["positions"][used:] = float("nan")
    grad = torch.randn(n, 4, generator=generator(8)).to(target.device)
    grad[used:] = float("nan")
    count = torch.tensor(used, dtype=torch.int32, device=target.device)
    found: dict[str, list[Tensor]] = {}
    for backend in (target.backend, "reference"):
        tables = VoxelTables(*(given[name].clone().requires_grad_() for name in ("density", "color")))
        flag = torch.zeros((), device=target.device)
        sink = GradientSink(tuple(torch.ones_like(table).detach() for table in tables), flag)
        copy = None if half is None else tables.color.detach().to(half)
        positions, basis = (given[name].clone().requires_grad_() for name in ("positions", "basis"))
        with use_backend(backend):  # type: ignore[arg-type]
            out = voxel_lookup(positions, basis, rays, tables, index, half=copy, sink=sink, n_used=count)
            out.backward(grad)
        assert tables.density.grad is None and tables.color.grad is None and flag.item() == 0.0
        found[backend] = [out.detach(), *sink.buffers, positions.grad, basis.grad]
    names = ("value", "density", "color", "positions", "basis")
    for name, got, want in zip(names, found[target.backend], found["reference"], strict=True):
        assert_close(name, got, want, 1e-3 if half else 1e-4)


def test_a_sink_reports_a_gradient_that_is_not_finite(target: Target) -> None:
    require(target)
    index, nodes = make_voxels()
    index, rays = index_to(index, target.device), rays_for(5).to(target.device)
    given = {name: value.to(target.device) for name, value in inputs_for(5, 4, nodes.shape[0]).items()}
    for bad, column in ((float("inf"), 0), (float("nan"), 3)):
        tables = VoxelTables(given["density"].requires_grad_(), given["color"].requires_grad_())
        flag, grad = torch.zeros(1, device=target.device), torch.ones(5, 4, device=target.device)
        grad[3, column] = bad
        with use_backend(target.backend):  # type: ignore[arg-type]
            sink = GradientSink(tuple(torch.zeros_like(table).detach() for table in tables), flag)
            voxel_lookup(given["positions"], given["basis"], rays, tables, index, sink=sink).backward(grad)
        assert flag.item() == 1.0


def test_wrong_arguments_are_named() -> None:
    index, nodes = make_voxels(3, 1.0)
    tables = make_tables(nodes.shape[0], 4)
    positions, basis, rays = torch.zeros(2, 3), torch.ones(1, 4), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InputError, match=r"basis: expected shape .*"):
        voxel_lookup(positions, torch.ones(4), rays, tables, index)
    with pytest.raises(InputError, match=r"tables.color: expected shape \(\d+, 28\)"):
        voxel_lookup(positions, torch.ones(1, 9), rays, tables, index)
    with pytest.raises(InputError, match=r"ray_indices: expected torch\.int32"):
        voxel_lookup(positions, basis, rays.long(), tables, index)
    with pytest.raises(InputError, match="resolution: expected 1 to 1024"):
        VoxelIndex(index.blocks, index.rows, 4096)
    with pytest.raises(InputError, match=r"blocks: expected shape \(2, 2, 2\)"):
        VoxelIndex(index.blocks, index.rows, 8)
    with pytest.raises(InputError, match="at least one row"):
        voxel_density(positions, torch.zeros(0), index)
