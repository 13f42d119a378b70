"""Crops: exact at the box's faces, nothing lost inside, and a refused box says where the scene is."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.config import GridConfig
from nerfturbo.errors import InputError
from nerfturbo.ops.march import pack_bits
from nerfturbo.ops.march.reference import is_occupied
from nerfturbo.sampling.grid import OccupancyGrid, as_sampler, cropped, occupied_box
from nerfturbo.sampling.histograms import RaySpan
from nerfturbo.sampling.uniform import UniformEstimator
from nerfturbo.types import Aabb, PackedSamples, Rays


def make_grid(levels: int = 1, resolution: int = 8) -> OccupancyGrid:
    """Cells 2..4 x 1..2 x 5 of level 0 are occupied, and one far cell of the last level."""
    grid = OccupancyGrid(Aabb.cube(1.0), GridConfig(resolution=resolution, levels=levels), step_size=0.05)
    occupied = torch.zeros(levels, resolution, resolution, resolution, dtype=torch.bool)
    occupied[0, 2:5, 1:3, 5] = True
    if levels > 1:
        occupied[-1, 7, 7, 7] = True
    grid.bits.copy_(pack_bits(occupied.reshape(-1)))
    return grid


def test_the_occupied_box_is_that_of_whole_cells() -> None:
    box = occupied_box(make_grid())
    assert box is not None
    assert box.low == pytest.approx((-0.5, -0.75, 0.25)) and box.high == pytest.approx((0.25, -0.25, 0.5))
    far = occupied_box(make_grid(levels=3))
    assert far is not None and far.high == pytest.approx((4.0, 4.0, 4.0)) and far.low == pytest.approx(box.low)
    empty = make_grid()
    empty.bits.zero_()
    assert occupied_box(empty) is None


@pytest.mark.parametrize("levels", [1, 3])
def test_a_crop_keeps_what_is_occupied_inside_and_ends_at_its_faces(levels: int) -> None:
    grid = make_grid(levels)
    box = Aabb((-0.4, -0.9, 0.0), (0.13, -0.3, 0.9))
    crop = grid.cropped(box)
    points = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    low, high = box.tensor()
    inside = ((points > low) & (points < high)).all(-1)
    before, after = is_occupied(grid.occupancy, points), is_occupied(crop.occupancy, points)
    assert int((before & inside).sum()) > 20
    assert bool(after[before & inside].all())  # nothing is lost
    assert float(after[inside].float().mean()) < 0.5  # and empty space stays empty
    from nerfturbo.rendering.render import ray_marching

    rays = Rays(torch.tensor([[-3.0, -0.5, 0.4]]), torch.tensor([[1.0, 0.0, 0.0]]))
    samples = ray_marching(rays, crop)
    x = samples.midpoints() - 3.0
    assert float(x.min()) >= -0.4 and float(x.max()) <= 0.13 and float(x.max() - x.min()) > 0.4


@pytest.mark.parametrize("resolution", [8, 20])  # borders that fall together, but for rounding where it is 20
def test_the_whole_box_is_the_same_grid(resolution: int) -> None:
    grid = make_grid(resolution=resolution)
    grid.set_occupied(torch.rand(1, *[resolution] * 3, generator=torch.Generator().manual_seed(0)) < 0.3)
    assert torch.equal(grid.cropped(grid.aabb).bits, grid.bits)


@pytest.mark.parametrize("box", [Aabb((5.0, 5.0, 5.0), (6.0, 6.0, 6.0)), Aabb((0.5, 0.5, -0.9), (0.9, 0.9, -0.5))])
def test_an_empty_crop_names_the_occupied_box(box: Aabb) -> None:
    with pytest.raises(InputError, match=r"--crop: .*occupied lies in \(-0.5, -0.75, 0.25\) to \(0.25, -0.25, 0.5\)"):
        make_grid().cropped(box, what="--crop")
    with pytest.raises(InputError, match="--crop: "):
        cropped(as_sampler(make_grid()), box, what="--crop")


def test_boxes_that_only_touch_share_nothing() -> None:
    assert Aabb.cube(1.0).intersection(Aabb.cube(1.0, (2.0, 0.0, 0.0))) is None
    shared = Aabb.cube(1.0).intersection(Aabb.cube(1.0, (1.0, 0.0, 0.0)))
    assert shared is not None and shared.low[0] == 0.0


def test_any_sampler_can_be_cropped_and_keeps_what_it_says_of_itself() -> None:
    class Even(torch.nn.Module):
        samples_per_ray = 8

        def sample(self, rays: Rays, *, draw: object = None) -> PackedSamples:
            return UniformEstimator(8, RaySpan(aabb=Aabb.cube(2.0))).sample(rays)

    box = Aabb((-0.3, -1.0, -1.0), (0.9, 1.0, 1.0))
    inside = cropped(Even(), box)
    samples = inside.sample(Rays(torch.tensor([[-3.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])))
    lengths = samples.t_ends - samples.t_starts
    assert inside.samples_per_ray == 8 and samples.t_starts[lengths > 0].min() == pytest.approx(2.7)
    assert float(lengths.sum()) == pytest.approx(1.2) and bool((lengths >= 0.0).all())
