"""The grid of a scene that moves holds the maximum over time: what passes through a cell is not skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import GridConfig
from nerfturbo.errors import InputError
from nerfturbo.ops.march import unpack_bits
from nerfturbo.rendering.render import ray_marching
from nerfturbo.sampling.grid import OccupancyGrid
from nerfturbo.types import Aabb, Rays

BOX = Aabb.cube(1.0)
CONFIG = GridConfig(resolution=16, moments=2, decay=0.98)


def ball_on_its_way(positions: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """A solid ball that crosses the box along x."""
    center = torch.stack([1.4 * times - 0.7, torch.zeros_like(times), torch.zeros_like(times)], dim=-1)
    return 100.0 * ((positions - center).norm(dim=-1) < 0.25).float()


def learned(config: GridConfig, n_steps: int, seed: int = 0) -> OccupancyGrid:
    grid = OccupancyGrid(BOX, config, step_size=0.05, seed=seed)
    for step in range(0, n_steps, config.update_every):
        grid.update(step, ball_on_its_way)
    return grid


def test_a_moving_object_is_never_skipped() -> None:
    """After the warm-up, and long after it, every ray at every time finds samples inside the ball."""
    for n_steps in (256, 2048):
        grid = learned(CONFIG, n_steps)
        times = torch.linspace(0.0, 1.0, 41)
        origins = torch.stack([1.4 * times - 0.7, torch.full_like(times, -3.0), torch.full_like(times, 0.1)], dim=-1)
        rays = Rays(origins, torch.tensor([[0.0, 1.0, 0.0]]).repeat(41, 1), times)
        samples = ray_marching(rays, grid)
        index = samples.ray_indices.long()
        inside = ball_on_its_way(samples.positions(rays), times[index]) > 0.0
        met = torch.zeros(41, dtype=torch.int64).index_add_(0, index, inside.long())
        assert met.min() >= 7, f"a chord of 0.46 has 9 steps, {met.tolist()}"
        assert 0.03 < grid.occupied_fraction() < 0.25, "the ball's way and nothing else"


def test_one_moment_alone_would_not_do() -> None:
    """The same updates at one fixed time learn only that moment's place."""
    still = OccupancyGrid(BOX, replace(CONFIG, moments=0), step_size=0.05)
    for step in range(0, 256, 16):
        still.update(step, lambda positions: ball_on_its_way(positions, torch.full((len(positions),), 0.5)))
    moving = unpack_bits(learned(CONFIG, 256).bits)
    assert unpack_bits(still.bits).sum() < 0.5 * moving.sum()


def test_draws_belong_to_step_cell_and_seed() -> None:
    """In parts or at once, and wherever training begins again: the same moments."""
    first, again, other = learned(CONFIG, 64), learned(CONFIG, 64), learned(CONFIG, 64, seed=1)
    assert torch.equal(first.thickness, again.thickness) and not torch.equal(first.thickness, other.thickness)
    grid = OccupancyGrid(BOX, CONFIG, step_size=0.05)
    cells = grid.cells_to_refresh(3, all_cells=True)
    parts = [grid.fresh_part(3, ball_on_its_way, cells, rank=rank, world=3) for rank in range(3)]
    whole = grid.fresh_part(3, ball_on_its_way, cells, rank=0, world=1)
    assert torch.equal(torch.stack(parts).amax(0), whole)
    assert torch.equal(grid.fresh_part(torch.tensor(3), ball_on_its_way, cells, rank=0, world=1), whole)


def test_moments_are_stratified_and_bounded() -> None:
    grid = OccupancyGrid(BOX, replace(CONFIG, moments=4), step_size=0.05)
    times: list[torch.Tensor] = []
    grid.update(0, lambda positions, when: times.append(when) or torch.ones_like(when))
    drawn = torch.stack(times)
    assert ((drawn * 4).floor() == torch.arange(4.0)[:, None]).all()
    for moments in (-1, 5):
        with pytest.raises(InputError, match="moments"):
            OccupancyGrid(BOX, replace(CONFIG, moments=moments), step_size=0.05)
