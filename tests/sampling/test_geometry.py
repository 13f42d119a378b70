"""Grids from points and meshes, rays of many scenes in one batch, and the contraction of unbounded space."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo import (
    Aabb,
    InputError,
    OccupancyGrid,
    Rays,
    contract,
    distortion_loss,
    ray_marching,
    uncontract,
    volume_rendering,
)
from nerfturbo.config import GridConfig
from nerfturbo.ops.march import unpack_bits
from nerfturbo.ops.march.reference import is_occupied
from nerfturbo.sampling.geometry import _barycentric, cells_with_points, flood_fill
from nerfturbo.sampling.histograms import RaySpan
from nerfturbo.sampling.uniform import UniformEstimator, even_edges
from nerfturbo.types import PackedSamples

BOX = Aabb.cube(1.0)


def cells(grid: OccupancyGrid) -> torch.Tensor:
    r = grid.config.resolution
    return unpack_bits(grid.bits).view(grid.config.levels, r, r, r)


def icosphere() -> tuple[torch.Tensor, torch.Tensor]:
    """An octahedron, split three times and put on a sphere of radius 0.6."""
    vertices = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]])
    faces = torch.tensor([[a, b, c] for a in (0, 1) for b in (2, 3) for c in (4, 5)])
    for _ in range(3):
        corner = vertices[faces]
        middle = torch.nn.functional.normalize(corner + corner.roll(-1, 1), dim=-1)
        n, m = vertices.shape[0], faces.shape[0]
        ab, bc, ca = (n + torch.arange(m) * 3 + k for k in range(3))
        vertices = torch.cat([vertices, middle.reshape(-1, 3)])
        a, b, c = faces.unbind(-1)
        faces = torch.cat([torch.stack(t, -1) for t in ((a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca))])
    return vertices * 0.6, faces


@pytest.mark.parametrize("levels", [1, 3])
def test_every_point_lies_in_an_occupied_cell(levels: int):
    torch.manual_seed(0)
    points = torch.randn(500, 3)
    grid = OccupancyGrid.from_points(points, BOX, GridConfig(resolution=16, levels=levels), margin=0)
    occupied = cells(grid)
    centers = grid.cell_positions(torch.arange(grid.n_cells)).view(levels, 16, 16, 16, 3)
    for level in range(levels):
        half = 2.0**level / 16
        inside = points[(points.abs() <= 2.0**level).all(-1)]
        near = (centers[level][occupied[level]][:, None] - inside[None]).abs().amax(-1)
        assert (near.amin(0) <= half + 1e-5).all()  # each point has its cell
        assert (near.amin(1) <= half + 1e-5).all()  # each cell has its point


def test_a_box_is_found_around_points():
    points = torch.tensor([[5.0, 1.0, 0.0], [9.0, 2.0, 1.0]])
    grid = OccupancyGrid.from_points(points)
    low, high = grid.aabb.tensor()
    assert (low < points).all() and (points < high).all()
    assert grid.aabb.size == pytest.approx((4.4, 4.4, 4.4)) and grid.aabb.center == pytest.approx((7.0, 1.5, 0.5))
    assert grid.step_size == pytest.approx(grid.aabb.diagonal / 1024)
    for wrong in (torch.zeros(0, 3), torch.zeros(3), torch.full((1, 3), float("nan"))):
        with pytest.raises(InputError, match="points"):
            OccupancyGrid.from_points(wrong)


def test_a_mesh_occupies_its_surface_and_what_it_encloses():
    vertices, faces = icosphere()
    config = GridConfig(resolution=16, levels=2)
    shell = OccupancyGrid.from_mesh(vertices, faces, BOX, config, margin=0)
    solid = OccupancyGrid.from_mesh(vertices, faces, BOX, config, margin=0, fill=True)
    centers = shell.cell_positions(torch.arange(shell.n_cells)).norm(dim=-1).view(2, 16, 16, 16)
    diagonal = torch.tensor([2.0, 4.0])[:, None, None, None] / 16 * 3**0.5
    away = (centers - 0.6).abs() > diagonal
    assert not cells(shell)[away].any() and cells(shell)[0].any() and cells(shell)[1].any()
    assert cells(solid)[(centers < 0.6) & away].all() and not cells(solid)[(centers > 0.6) & away].any()
    directions = torch.nn.functional.normalize(torch.randn(200, 3), dim=-1)
    hit = ray_marching(Rays(-2.0 * directions, directions), shell, render_step_size=0.02)
    assert (hit.packed_info[:, 1] > 0).all()  # no hole in the surface
    with pytest.raises(InputError, match="faces"):
        OccupancyGrid.from_mesh(vertices, faces + 10**6)


def test_what_the_outer_level_encloses_is_inside_all_the_way():
    """The shell goes around the cells of the outer level that the inner one fills, 4 to 11 of 16."""
    surface = torch.zeros(2, 16, 16, 16, dtype=torch.bool)
    surface[1, 4:12, 4:12, 4:12] = True
    surface[1, 5:11, 5:11, 5:11] = False
    filled = flood_fill(surface)
    assert filled[0].all() and filled[1, 4:12, 4:12, 4:12].all() and int(filled[1].sum()) == 8**3


def test_a_cell_at_the_border_is_outside_where_the_cell_around_it_is():
    draw = torch.Generator().manual_seed(2)
    surface = torch.ones(2, 16, 16, 16, dtype=torch.bool)
    surface[0, ::3, ::3, ::3] = False  # each alone
    surface[1] = torch.rand(16, 16, 16, generator=draw) < 0.4
    filled = flood_fill(surface)
    cells = torch.cartesian_prod(*[torch.arange(0, 16, 3)] * 3)
    cells = cells[((cells == 0) | (cells == 15)).any(-1)]
    x, y, z = (4 + cells // 2).unbind(-1)
    assert torch.equal(filled[0][tuple(cells.unbind(-1))], filled[1, x, y, z])
    assert 0.2 < float(filled[1, x, y, z].float().mean()) < 0.8


def test_a_triangle_around_the_origin_has_no_hole():
    angle = torch.arange(3) * (2.0 * math.pi / 3.0) + 0.2
    vertices = 0.95 * torch.stack([angle.cos(), 0.8 * angle.sin(), 0.6 * angle.sin()], dim=-1)
    weights = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(1))
    inside = weights / weights.sum(-1, keepdim=True) @ vertices
    grid = OccupancyGrid.from_mesh(vertices, torch.tensor([[0, 1, 2]]), BOX, GridConfig(resolution=16), margin=0)
    assert float(is_occupied(grid.occupancy, inside).float().mean()) > 0.99


def test_a_triangle_leaves_no_hole_in_a_flat_box():
    """Cells of a flat box are flat: points lie half of their shortest side apart."""
    box = Aabb((-1.0, -1.0, -0.05), (1.0, 1.0, 0.05))
    vertices = torch.tensor([[0.0, 0.0, -0.049], [0.06, 0.0, 0.049], [0.0, 0.06, 0.049]])
    weights = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(1))
    inside = weights / weights.sum(-1, keepdim=True) @ vertices
    grid = OccupancyGrid.from_mesh(vertices, torch.tensor([[0, 1, 2]]), box, GridConfig(resolution=16), margin=0)
    assert float(is_occupied(grid.occupancy, inside).float().mean()) > 0.98
    for n in (1, 2, 8):
        weights = _barycentric(n, vertices)
        assert weights.shape == ((n + 1) * (n + 2) // 2, 3) and len(weights.unique(dim=0)) == len(weights)
        assert float(weights.min()) >= 0.0 and torch.allclose(weights.sum(-1), torch.ones(len(weights)))


def test_a_grid_set_by_hand_must_fit():
    grid = OccupancyGrid(BOX, GridConfig(resolution=8), step_size=0.1)
    with pytest.raises(InputError, match="occupied"):
        grid.set_occupied(torch.ones(4, 4, 4, dtype=torch.bool))


def test_rays_of_many_scenes_are_those_of_each_scene():
    torch.manual_seed(0)
    grids = []
    for _ in range(3):
        grid = OccupancyGrid(BOX, GridConfig(resolution=8), step_size=0.1)
        grid.set_occupied(torch.rand(1, 8, 8, 8) > 0.6)
        grid.mean.fill_(0.5)
        grids.append(grid)
    origins = torch.nn.functional.normalize(torch.randn(40, 3), dim=-1) * 2.0
    rays = Rays(origins, torch.nn.functional.normalize(-origins + 0.3 * torch.randn(40, 3), dim=-1))
    scenes = torch.randint(0, 3, (40,))
    density = torch.tensor([0.5, 4.0, 30.0])  # a field per scene, chosen by the ray

    def sigma_fn(t_starts, t_ends, ray_indices):
        return density[scenes[ray_indices.long()]]

    for how in ({}, {"sigma_fn": sigma_fn, "alpha_thre": 0.01, "stratified": True, "seed": 3}):
        mixed = ray_marching(rays, grids, scene_indices=scenes, **how)
        for scene, grid in enumerate(grids):
            own = {**how, "sigma_fn": lambda s, e, i, d=density[scene]: d.expand(len(s))} if how else {}
            alone = ray_marching(rays, grid, **own)
            for ray in torch.nonzero(scenes == scene)[:, 0].tolist():
                one = mixed.t_starts[mixed.offsets[ray] : mixed.offsets[ray + 1]]
                assert torch.equal(one, alone.t_starts[alone.offsets[ray] : alone.offsets[ray + 1]])
        assert (mixed.ray_indices.diff() >= 0).all()
    out = volume_rendering(lambda s, e, i: (torch.ones(len(s), 5), sigma_fn(s, e, i)), mixed)
    assert out.rgb.shape == (40, 5) and (out.opacity > 0).any()
    assert ray_marching(rays[:0], grids, scene_indices=scenes[:0]).capacity == 0
    fixed = {"scene_indices": scenes, "capacity": 8}
    for wrong in ({}, {"scene_indices": scenes + 1}, {"scene_indices": scenes[1:]}, fixed):
        with pytest.raises(InputError):
            ray_marching(rays, grids, **wrong)


@pytest.mark.parametrize("norm", ["euclidean", "max"])
def test_contraction_is_bounded_continuous_and_has_an_inverse(norm):
    torch.manual_seed(0)
    points = torch.randn(300, 3, dtype=torch.float64) * torch.logspace(-2, 3, 300, dtype=torch.float64)[:, None]
    inside = contract(points, norm=norm)
    size = inside.norm(dim=-1) if norm == "euclidean" else inside.abs().amax(-1)
    assert (size < 2.0).all()
    torch.testing.assert_close(uncontract(inside, norm=norm), points, rtol=1e-6, atol=1e-9)
    edge = points / (points.norm(dim=-1, keepdim=True) if norm == "euclidean" else points.abs().amax(-1, keepdim=True))
    torch.testing.assert_close(contract(edge * (1 + 1e-9), norm=norm), contract(edge * (1 - 1e-9), norm=norm))
    some = points[[3, 150, 250]].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: contract(x, norm=norm), some)
    zero = torch.zeros(1, 3, requires_grad=True)
    contract(zero, norm=norm).sum().backward()
    assert zero.grad is not None and torch.equal(zero.grad, torch.ones(1, 3))
    with pytest.raises(InputError, match="norm"):
        contract(points, norm="taxicab")  # type: ignore[arg-type]


def test_distortion_is_the_double_sum_and_is_least_for_one_place():
    torch.manual_seed(0)
    counts = torch.tensor([4, 0, 6])
    edges = torch.cat([torch.sort(torch.rand(8)).values, torch.sort(torch.rand(12)).values]).double()
    samples = PackedSamples.from_counts(counts, edges[0::2].contiguous(), edges[1::2].contiguous())
    weights = torch.rand(10, dtype=torch.float64).requires_grad_()
    loss = distortion_loss(weights, samples)
    middle, length = samples.midpoints(), samples.t_ends - samples.t_starts
    same = samples.ray_indices[:, None] == samples.ray_indices[None]
    pairs = torch.where(same, weights[:, None] * weights[None] * (middle[:, None] - middle[None]).abs(), 0.0).sum(1)
    expected = torch.zeros(3, dtype=torch.float64).index_add(
        0, samples.ray_indices.long(), pairs + weights**2 * length / 3
    )
    torch.testing.assert_close(loss, expected)
    assert torch.autograd.gradcheck(lambda w: distortion_loss(w, samples), weights)


def test_points_fall_into_their_cells_of_every_level_of_a_box_off_the_origin():
    aabb, resolution, levels = Aabb((1.0, 2.0, 3.0), (3.0, 3.0, 7.0)), 4, 2
    points = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) * 8.0 - torch.tensor([1.0, 1.0, 0.0])
    expected = torch.zeros(levels, resolution, resolution, resolution, dtype=torch.bool)
    for point in points.tolist():
        for level in range(levels):
            cell = []
            for x, low, high in zip(point, aabb.low, aabb.high, strict=True):
                side = (high - low) * 2**level
                cell.append(math.floor((x - (low + high - side) / 2) / side * resolution))
            if all(0 <= index < resolution for index in cell):
                expected[level, cell[0], cell[1], cell[2]] = True
    found = cells_with_points(points, aabb, resolution, levels)
    assert torch.equal(found, expected) and 0 < int(found[0].sum()) < int(found[1].sum()) < resolution**3


def test_even_samples_look_at_nothing_before():
    one, eight = (UniformEstimator(n, RaySpan(near=0.0, far=1.0, unit=0.25)) for n in (1, 8))
    assert [sampler.max_rays(20) for sampler in (one, eight)] == [20, 2]
    assert eight.evaluations_per_ray == 0 and eight.bytes_per_ray(10, 1000) == 80


def test_jitter_moves_inner_edges_inside_their_stratum_and_no_others():
    jitter, edges = torch.rand(5, 1, generator=torch.Generator().manual_seed(0)), 0.25 * torch.arange(5)
    even, moved = (even_edges(5, 4, shift, torch.device("cpu")) for shift in (None, jitter))
    torch.testing.assert_close(even, edges.expand(5, 5))
    torch.testing.assert_close(moved[:, 1:-1], edges[1:-1] + 0.25 * (jitter - 0.5))
    assert (moved[:, 0] == 0.0).all() and (moved[:, -1] == 1.0).all()
