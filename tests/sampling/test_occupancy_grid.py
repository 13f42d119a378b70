"""The occupancy grid: starts full, learns where the field is, survives bad values, forgets nothing it must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.config import GridConfig
from nerfturbo.errors import InputError
from nerfturbo.ops.march import StepRule, unpack_bits
from nerfturbo.ops.march.reference import is_occupied
from nerfturbo.sampling import GridSampler, MarchSettings, Pruning
from nerfturbo.sampling.grid import Frusta, OccupancyGrid, seen_by_any
from nerfturbo.types import Aabb, Rays

BOX = Aabb((-1.0, -2.0, -1.0), (1.0, 2.0, 1.5))


def ball(positions: Tensor) -> Tensor:
    """Dense inside a ball of radius 0.6, empty outside."""
    return torch.where(positions.norm(dim=-1) < 0.6, 100.0, 0.0)


def make_grid(**changes: object) -> OccupancyGrid:
    grid = OccupancyGrid(BOX, GridConfig(**{"resolution": 16, **changes}), step_size=0.01)
    grid.warmup_steps = 64
    return grid


def test_starts_full_and_learns_the_ball():
    grid = make_grid()
    assert grid.occupied_fraction() == 1.0
    grid.update(0, ball)
    centres = grid.cell_positions(torch.arange(grid.n_cells))
    occupied = unpack_bits(grid.bits)
    assert occupied[centres.norm(dim=-1) < 0.4].all()
    assert not occupied[centres.norm(dim=-1) > 0.9].any()


def test_cell_positions_agree_with_lookup():
    """A grid with one occupied cell is found exactly at that cell's points, on every level."""
    grid = make_grid(levels=3)
    assert grid.outer_aabb == BOX.scaled(4.0)
    for cell in (5, 16**3 + 7, 2 * 16**3 + 4095):
        occupied = torch.zeros(grid.n_cells, dtype=torch.bool)
        occupied[cell] = True
        grid.set_occupied(occupied)
        for fraction in (0.05, 0.5, 0.95):
            point = grid.cell_positions(torch.tensor([cell]), fraction)
            level = cell // 16**3
            inside_finer = level > 0 and bool(is_inside(BOX.scaled(2.0 ** (level - 1)), point))
            assert bool(is_occupied(grid.occupancy, point)) != inside_finer


def is_inside(box: Aabb, point: Tensor) -> bool:
    low, high = box.tensor()
    return bool(((point >= low) & (point <= high)).all())


def test_density_that_leaves_a_cell_fades():
    grid = make_grid(decay=0.5)
    grid.update(0, ball)
    before = grid.occupied_fraction().item()
    for step in range(16, 16 * 20, 16):
        grid.update(step, lambda p: torch.where(p[:, 0] > 5.0, 1.0, 0.0) + 1e-3)
    assert before > grid.occupied_fraction().item() or before < 1.0
    assert grid.thickness.max() < 0.1


def test_sampled_update_keeps_finding_what_is_occupied():
    grid = make_grid()
    grid.update(0, ball)
    before = unpack_bits(grid.bits)
    for step in range(100, 100 + 16 * 30, 16):
        grid.update(step, ball)
    after = unpack_bits(grid.bits)
    centres = grid.cell_positions(torch.arange(grid.n_cells))
    sure = centres.norm(dim=-1) < 0.4
    assert before[sure].all() and after[sure].all()
    assert after.float().mean() < 0.3


def test_non_finite_density_is_not_learned():
    grid = make_grid()
    grid.update(0, ball)
    grid.update(16, lambda p: torch.full((p.shape[0],), float("nan")))
    grid.update(32, lambda p: torch.full((p.shape[0],), float("inf")))
    assert torch.isfinite(grid.thickness).all() and torch.isfinite(grid.mean)


def test_collapse_while_young_keeps_the_grid_full():
    grid = make_grid()
    grid.update(0, lambda p: torch.zeros(p.shape[0]))
    assert grid.occupied_fraction() == 1.0


def test_cells_no_camera_sees_stay_empty():
    grid = make_grid()
    # A camera at z = 4 looking down -z with a narrow view sees the axis, not the sides.
    pose = torch.eye(4)[None, :3].clone()
    pose[0, 2, 3] = 4.0
    frusta = Frusta(pose, torch.tensor([[100.0, 100.0]]), torch.tensor([[8.0, 8.0]]), torch.tensor([[16, 16]]))
    share = grid.mark_invisible(frusta, 0.1)
    assert 0.5 < share < 1.0
    grid.update(0, lambda p: torch.full((p.shape[0],), 100.0))
    centres = grid.cell_positions(torch.arange(grid.n_cells))
    occupied = unpack_bits(grid.bits)
    assert occupied[(centres[:, :2].norm(dim=-1) < 0.2)].all()
    assert not occupied[(centres[:, 1].abs() > 1.5)].any()
    before = torch.tensor([[0.0, 0.0, 3.95]]).expand(2, 3)  # the near plane, by 0.05
    assert seen_by_any(before, torch.tensor([0.06, 0.04]), frusta, 0.1).tolist() == [True, False]


def test_spheres_hold_their_cells_and_little_more():
    grid = OccupancyGrid(Aabb.cube(1.0), GridConfig(resolution=4, levels=3), step_size=0.1)
    cells = torch.arange(grid.n_cells)
    center, radius = grid._spheres(cells)
    half = 0.25 * 3.0**0.5 * 2.0 ** (cells // 4**3).float()  # of a cell's diagonal
    assert torch.equal(center, grid.cell_positions(cells))
    assert bool((radius >= half).all()) and bool((radius < 1.01 * half).all())


def test_same_draws_for_same_seed_and_step():
    grids = [make_grid() for _ in range(2)]
    for grid in grids:
        grid.update(0, ball)
        grid.update(128, ball)
    assert torch.equal(grids[0].thickness, grids[1].thickness)


def test_step_may_be_a_tensor():
    first, second = make_grid(), make_grid()
    for grid, step in ((first, 160), (second, torch.tensor(160))):
        grid.update(step, ball, all_cells=False)
    assert torch.equal(first.thickness, second.thickness)


def test_a_refined_sampler_takes_shorter_steps_through_the_same_grid():
    settings, pruning = MarchSettings(near_plane=0.5, cone_angle=0.004, alpha_thre=0.06), Pruning(1e-3, 1e-2)
    sampler = GridSampler(make_grid(), settings, pruning=pruning)
    finer = sampler.refined(2)
    assert sampler.refined(1) is sampler and finer.grid is sampler.grid and finer.pruning is pruning
    assert finer.rule == StepRule(0.005, 0.5, cone_angle=0.002) and finer.settings.alpha_thre == 0.03
    rays = Rays(torch.tensor([[0.0, 0.0, -2.0]]), torch.tensor([[0.0, 0.0, 1.0]]))
    assert abs(finer.sample(rays).capacity - 2 * sampler.sample(rays).capacity) <= 2


@pytest.mark.parametrize(("name", "value"), [("resolution", 6), ("resolution", 0), ("levels", 0), ("levels", 17)])
def test_bad_settings_are_named(name: str, value: int):
    with pytest.raises(InputError, match=name):
        make_grid(**{name: value})


def test_a_grid_of_points_holds_them_and_their_neighbours() -> None:
    points = torch.tensor([[0.1, -0.2, 0.3], [0.9, 0.9, -0.9]])
    grid = OccupancyGrid.from_points(points, Aabb.cube(1.0), GridConfig(resolution=8), margin=1)
    assert bool(is_occupied(grid.occupancy, points).all())
    assert round(float(grid.occupied_fraction()) * grid.n_cells) == 27 + 8  # the second lies in a corner of the box
    assert grid.step_size == pytest.approx(Aabb.cube(1.0).diagonal / 1024.0)
    with pytest.raises(InputError, match="points: expected"):
        OccupancyGrid.from_points(points[0], Aabb.cube(1.0), GridConfig(resolution=8))
