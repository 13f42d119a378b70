"""A grid over all of space: it skips what is empty and nothing else, and gives up what no camera sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import GridConfig
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.ops.march import unpack_bits
from nerfturbo.ops.positions import fold, unfold, unit_positions
from nerfturbo.sampling import ContractedGrid, Draw, RaySpan
from nerfturbo.sampling.contracted import CANDIDATES
from nerfturbo.sampling.grid import Frusta
from nerfturbo.types import Aabb, Rays

BOX = Aabb.cube(1.0, (0.2, 0.0, -0.1))
SPAN = RaySpan(near=0.05, far=200.0, warp="mixed")


def contracted(kind: str = "cube", resolution: int = 16, steps: int = 64) -> ContractedGrid:
    config = GridConfig(resolution=resolution)
    return ContractedGrid(BOX, config, steps=steps, span=SPAN, contraction=kind)  # type: ignore[arg-type]


def some_rays(n: int = 64) -> Rays:
    generator = torch.Generator().manual_seed(5)
    directions = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    return Rays(torch.randn(n, 3, generator=generator) * 0.3, directions)


def two_shells(positions: torch.Tensor) -> torch.Tensor:
    """Dense near the origin, and again on one side far away."""
    size = positions.norm(dim=-1)
    return 300.0 * ((size < 0.4) | ((size > 10.0) & (size < 40.0) & (positions[:, 0] > 0.0)))


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_space_is_folded_into_the_unit_cube_and_back(kind):
    generator = torch.Generator().manual_seed(2)
    directions = torch.nn.functional.normalize(torch.randn(500, 3, generator=generator, dtype=torch.float64), dim=-1)
    positions = directions * torch.logspace(-3, 4, 500, dtype=torch.float64)[:, None]
    unit = BOX.normalize(positions)
    folded = unit_positions(positions, BOX, kind)
    assert float(folded.min()) > 0.0 and float(folded.max()) < 1.0
    torch.testing.assert_close(unfold(folded, kind), unit, rtol=1e-6, atol=1e-9)
    inside = ((unit - 0.5) * 2.0).norm(dim=-1) <= 1.0
    torch.testing.assert_close(folded[inside], unit[inside] * 0.5 + 0.25)
    assert torch.equal(fold(unit, "none"), unit)
    with pytest.raises(InputError, match="contraction"):
        fold(unit, "square")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_samples_are_the_steps_in_occupied_cells_and_no_others(kind):
    grid, rays = contracted(kind), some_rays()
    everything = grid.sample(rays, draw=Draw(stratified=True, seed=1, step=3))
    assert everything.offsets.diff().tolist() == [64] * len(rays)  # a new grid is occupied everywhere
    occupied = torch.rand(16, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    grid.cells.set_occupied(occupied)
    samples = grid.sample(rays, draw=Draw(stratified=True, seed=1, step=3))
    x, y, z = (unit_positions(everything.positions(rays), BOX, kind) * 16).floor().long().clamp(0, 15).unbind(-1)
    expected = occupied[x, y, z]
    assert torch.equal(samples.t_starts, everything.t_starts[expected])
    assert torch.equal(samples.ray_indices, everything.ray_indices[expected])
    assert 0.1 < float(expected.float().mean()) < 0.5


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_what_is_dense_near_and_far_is_learned(kind):
    grid, rays = contracted(kind), some_rays()
    everything = grid.sample(rays)
    for step in range(0, 256, 16):
        grid.update(step, two_shells)
    samples = grid.sample(rays)
    dense = two_shells(everything.positions(rays)) > 0.0
    kept = two_shells(samples.positions(rays)) > 0.0
    assert int(kept.sum()) > 0.93 * int(dense.sum())  # cells at the rim may have been asked where they are empty
    assert int(samples.n_samples) < 0.7 * int(everything.n_samples)


@pytest.mark.parametrize("unit", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_thickness_is_that_of_steps_that_grow_from_the_middle_of_the_box(kind, unit):
    def thinner(positions: torch.Tensor) -> torch.Tensor:
        return ((positions - torch.tensor([0.2, 0.0, -0.1])).norm(dim=-1) / unit).clamp(min=1.0).pow(-2.0)

    span = replace(SPAN, unit=unit)
    grid = ContractedGrid(BOX, GridConfig(resolution=16), steps=64, span=span, contraction=kind)
    grid.update(0, thinner, all_cells=True)
    thickness = grid.cells.thickness[grid.cells.thickness >= 0.0]  # but for cells that are given up
    assert thickness.numel() > 1000
    torch.testing.assert_close(thickness, torch.full_like(thickness, grid.cells.step_size))


def test_thickness_of_even_steps_is_that_of_the_density():
    span = RaySpan(near=0.05, far=200.0, warp="uniform")
    grid = ContractedGrid(BOX, GridConfig(resolution=8), steps=64, span=span, contraction="cube")
    grid.update(0, lambda positions: torch.full_like(positions[:, 0], 3.0), all_cells=True)
    torch.testing.assert_close(grid.cells.thickness.unique(), torch.tensor([3.0 * grid.cells.step_size]))


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_what_is_seen_of_a_cell_is_seen_through_its_sphere(kind):
    draw, away, grid = torch.Generator().manual_seed(3), 0.9, contracted(kind)
    cells = unpack_bits(grid.cells.bits)[: 16**3].nonzero()[:, 0]
    center, radius = grid._spheres(cells, away)
    eye = torch.nn.functional.normalize(torch.randn(len(cells), 3, generator=draw), dim=-1) * away
    eye = eye + torch.tensor([0.2, 0.0, -0.1])
    for _ in range(20):
        point = grid.world_positions(cells, torch.rand(len(cells), 3, generator=draw))
        toward = torch.nn.functional.normalize(point - eye, dim=-1)
        beside = torch.linalg.cross(center - eye, toward).norm(dim=-1)
        assert bool((beside <= radius * 1.001 + 1e-4).all()), float((beside / radius).max())


def test_a_capacity_keeps_whole_rays():
    grid, rays = contracted(), some_rays(8)
    samples = grid.sample(rays, capacity=200, n_active=torch.tensor(6, dtype=torch.int32))
    assert samples.capacity == 200 and samples.offsets.tolist() == [0, 64, 128, 192, 192, 192, 192, 192, 192]
    assert int(samples.n_rays_kept) == 3
    assert float(samples.t_ends[192:].abs().max()) == 0.0


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_cells_that_no_camera_sees_are_given_up(kind):
    grid = contracted(kind)
    pose = look_at(torch.tensor([[-0.8, 0.0, 0.0]]), torch.zeros(3))  # looks along +x
    camera = Cameras.pinhole(pose, width=32, height=32, field_of_view_x=0.6)
    frusta = Frusta(camera.camera_to_world, camera.focal, camera.center, camera.size)
    share = grid.mark_invisible(frusta, 0.05)
    assert 0.4 < share < 0.98
    rays = Rays(torch.tensor([[-0.8, 0.0, 0.0]]).repeat(2, 1), torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))
    seen, behind = grid.sample(rays).offsets.diff().tolist()
    assert seen == 64 and behind < 16
    inside = camera.image_rays(0)
    assert int(grid.sample(inside).n_samples) == 64 * len(inside)  # no pixel loses anything
    for step in range(0, 32, 16):  # and an update does not bring them back
        grid.update(step, lambda positions: torch.full_like(positions[:, 0], 50.0))
    assert grid.sample(rays).offsets.diff().tolist() == [seen, behind]


def test_a_step_takes_as_many_rays_as_their_lattices_have_room():
    few, many = contracted(steps=32), contracted(steps=64)
    assert few.max_rays(1) == 2 * many.max_rays(1) == CANDIDATES // 32


def test_boxes_are_not_contracted():
    with pytest.raises(InputError, match="contraction"):
        contracted("none")


def test_of_a_sphere_the_corners_of_the_cube_are_given_up() -> None:
    """A cell is kept where its nearest corner or face comes within half a unit of the middle of the cube."""
    sampler, r = contracted("sphere", resolution=8), 8
    low = torch.cartesian_prod(*[torch.arange(r)] * 3) / r
    nearest = torch.minimum(torch.maximum(torch.full((3,), 0.5), low), low + 1.0 / r)
    inside = (nearest - 0.5).norm(dim=-1) < 0.5
    assert int((~inside).sum()) > 0 and torch.equal(unpack_bits(sampler.cells.bits)[: r**3], inside)
