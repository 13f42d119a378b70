"""nerfacc's boxes, grids and resampling against brute force."""

from __future__ import annotations

import pytest
import torch

import nerfturbo.compat.nerfacc as nerfacc
from nerfturbo.compat.nerfacc.grid import Grids, _enlarge_aabb, _query, values_at
from nerfturbo.compat.nerfacc.pdf import _sample_from_weighted
from nerfturbo.compat.nerfacc.volrend import accumulate_along_rays_
from nerfturbo.errors import InputError


def rays(n: int, seed: int = 0, spread: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    origins = torch.randn(n, 3, generator=generator) * spread
    return origins, torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)


def nested(levels: int, resolution: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.tensor([-1.0, -0.5, -1.0, 1.0, 1.5, 1.0])
    boxes = torch.stack([_enlarge_aabb(base, 2.0**level) for level in range(levels)])
    return torch.rand(levels, resolution, resolution, resolution, generator=generator) > 0.6, boxes


def samples_of(intervals, samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return intervals.vals[intervals.is_left], intervals.vals[intervals.is_right], samples.ray_indices


def test_box_hits_are_where_points_of_the_ray_are_inside():
    origins, directions = rays(40, spread=1.0)
    directions[:6, 0] = 0.0  # along a face
    origins[:2, 0] = 0.0  # and on it
    low = torch.rand(7, 3) - 0.5
    boxes = torch.cat([low.clamp(max=0.0), low.clamp(max=0.0) + 0.5], -1)
    t_min, t_max, hit = nerfacc.ray_aabb_intersect(origins, directions, boxes, miss_value=-7.0)
    t = torch.linspace(0.0, 8.0, 4001)[:, None, None]
    points = origins[None] + t * directions[None]
    for box in range(7):
        inside = ((points >= boxes[box, :3]) & (points <= boxes[box, 3:])).all(-1)  # (steps, rays)
        found = inside.any(0)
        assert (hit[:, box] | ~found).all()
        length = inside.float().sum(0) * 0.002
        got = (t_max - t_min.clamp_min(0.0))[:, box].clamp(0.0)
        torch.testing.assert_close(torch.where(hit[:, box], got, torch.zeros(())), length, atol=6e-3, rtol=0.0)
    assert (t_min[~hit] == -7.0).all() and (t_max[~hit] == -7.0).all()


@pytest.mark.parametrize(("levels", "resolution", "cone"), [(1, 8, 0.0), (3, 4, 0.0), (2, 6, 0.0), (2, 8, 0.05)])
def test_samples_are_the_steps_in_occupied_cells(levels: int, resolution: int, cone: float):
    binaries, boxes = nested(levels, resolution)
    origins, directions = rays(12)
    step = 0.07
    starts, ends, indices = samples_of(*nerfacc.traverse_grids(
        origins, directions, binaries, boxes, step_size=step, cone_angle=cone
    )[:2])  # fmt: skip
    middle = (starts + ends) / 2
    occupied, inside = _query(origins[indices] + directions[indices] * middle[:, None], binaries, boxes[0])
    assert occupied.float().mean() > 0.99 and inside.all()
    torch.testing.assert_close(ends - starts, (cone * starts).clamp_min(step), rtol=cone + 1e-3, atol=1e-5)
    t = (torch.arange(4000) + 0.5) * 0.005
    for ray in range(12):  # nothing occupied is missed: the samples' length is the length in occupied cells
        points = origins[ray] + directions[ray] * t[:, None]
        full, within = _query(points, binaries, boxes[0])
        length = (full & within).sum().item() * 0.005
        assert abs((ends - starts)[indices == ray].sum().item() - length) < 0.15 * length + 8 * step


def test_kernel_and_plain_walk_agree():
    binaries, boxes = nested(2, 8)
    origins, directions = rays(30)
    near = torch.rand(30)
    kernel = nerfacc.traverse_grids(origins, directions, binaries, boxes, near_planes=near, step_size=0.05)
    wide = torch.cat([binaries, torch.zeros(1, 8, 8, 8, dtype=torch.bool)])  # a third box that does not double
    loose = torch.cat([boxes, boxes[1:] * 1.5])
    plain = nerfacc.traverse_grids(origins, directions, wide, loose, near_planes=near, step_size=0.05)
    for one, other in zip(samples_of(*kernel[:2]), samples_of(*plain[:2]), strict=True):
        assert abs(one.shape[0] - other.shape[0]) <= 2  # a midpoint on a cell's face may fall to either side
    counts = [result[1].packed_info[:, 1] for result in (kernel, plain)]
    assert (counts[0] - counts[1]).abs().max() <= 1


def test_boxes_of_any_shape_and_the_first_one_counts():
    binaries = torch.zeros(2, 3, 5, 2, dtype=torch.bool)
    binaries[1] = True
    boxes = torch.tensor([[-0.5, -0.5, -0.5, 0.5, 0.5, 0.5], [-1.0, -1.0, -2.0, 2.0, 1.0, 1.0]])
    origins, directions = torch.tensor([[-3.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    starts, ends, _ = samples_of(*nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.01)[:2])
    middle = (starts + ends) / 2
    assert middle.min() > 1.99 and middle.max() < 5.01 and not ((middle > 2.51) & (middle < 3.49)).any()
    torch.testing.assert_close((ends - starts).sum(), torch.tensor(2.0), atol=0.03, rtol=0.0)
    points = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    inside = values_at(Grids(binaries, boxes), points)[0]
    assert inside.tolist() == [False, True, False]


def test_without_a_step_size_samples_are_cells():
    binaries, boxes = nested(2, 5)
    origins, directions = rays(9)
    intervals, samples, _ = nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.0)
    starts, ends, indices = samples_of(intervals, samples)
    fine = nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.002)
    fine_starts, fine_ends, fine_indices = samples_of(*fine[:2])
    for ray in range(9):
        whole, parts = (ends - starts)[indices == ray].sum(), (fine_ends - fine_starts)[fine_indices == ray].sum()
        torch.testing.assert_close(whole, parts, atol=0.08, rtol=0.02)
    points = origins[indices] + directions[indices] * samples.vals[:, None]
    assert _query(points, binaries, boxes[0])[0].float().mean() > 0.99


def test_edges_are_shared_by_touching_samples():
    binaries = torch.tensor([1, 1, 0, 1], dtype=torch.bool)[None, :, None, None].expand(1, 4, 4, 4).contiguous()
    boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0, 4.0]])
    origins, directions = torch.tensor([[0.0, 2.1, 2.2], [0.0, 9.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]] * 2)
    intervals, samples, ends = nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.5)
    assert intervals.vals.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 3.5, 4.0]
    assert intervals.is_left.tolist() == [True] * 4 + [False] + [True] * 2 + [False]
    assert intervals.is_right.tolist() == [False] + [True] * 4 + [False] + [True] * 2
    assert intervals.packed_info.tolist() == [[0, 8], [8, 0]] and samples.packed_info.tolist() == [[0, 6], [6, 0]]
    assert samples.vals.tolist() == [0.25, 0.75, 1.25, 1.75, 3.25, 3.75] and samples.is_valid.all()
    assert ends.tolist() == [4.0, 0.0]


def test_a_limited_walk_goes_on_where_it_stopped():
    binaries, boxes = nested(2, 8)
    origins, directions = rays(15)
    whole = nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.05)[1]
    planes, mask, middles = None, None, []
    for _ in range(40):
        _, part, planes = nerfacc.traverse_grids(
            origins, directions, binaries, boxes, near_planes=planes, step_size=0.05,
            traverse_steps_limit=5, over_allocate=True, rays_mask=mask,
        )  # fmt: skip
        assert part.packed_info[:, 1].max() <= 5
        middles.append(nerfacc.accumulate_along_rays(part.vals, None, part.ray_indices, 15))
        mask = part.packed_info[:, 1] == 5
    assert not mask.any()
    expected = nerfacc.accumulate_along_rays(whole.vals, None, whole.ray_indices, 15)
    torch.testing.assert_close(torch.stack(middles).sum(0), expected)


def test_rendering_in_stops_gives_the_pixels_of_rendering_at_once():
    """As renderers for test time do it: a few samples more at a time, of rays through which light still comes."""
    binaries, boxes = nested(1, 8)
    origins, directions = rays(40)
    behind, n, eps = torch.tensor([1.0, 0.5, 0.2]), 40, 1e-4

    def field(starts: torch.Tensor, ends: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = origins[indices] + directions[indices] * ((starts + ends) * 0.5)[:, None]
        return torch.sigmoid(3.0 * x), 40.0 * (x.norm(dim=-1) < 0.8)

    whole = samples_of(*nerfacc.traverse_grids(origins, directions, binaries, boxes, step_size=0.02)[:2])
    expected, covered, *_ = nerfacc.rendering(*whole, n, field, render_bkgd=behind)

    rgb, opacity, total, stop = torch.zeros(n, 3), torch.zeros(n, 1), 0, 0
    planes, far, alive = torch.zeros(n), torch.full((n,), 1e10), torch.ones(n, dtype=torch.bool)
    while alive.any():
        limit = 1 + stop % 3
        intervals, part, planes = nerfacc.traverse_grids(
            origins, directions, binaries, boxes, planes, far, 0.02, 0.0, limit, True, alive
        )
        starts, ends, indices = samples_of(intervals, part)
        colours, sigmas = field(starts, ends, indices)
        weights, *_ = nerfacc.render_weight_from_density(
            starts, ends, sigmas, ray_indices=indices, n_rays=n, prefix_trans=1.0 - opacity[indices, 0]
        )
        accumulate_along_rays_(weights, colours, indices, rgb)
        accumulate_along_rays_(weights, None, indices, opacity)
        alive = (opacity[:, 0] <= 1.0 - eps) & (part.packed_info[:, 1] == limit)
        total, stop = total + starts.shape[0], stop + 1
    assert stop > 3 and 0 < total < whole[0].shape[0]  # some rays ended early
    torch.testing.assert_close(opacity, covered, rtol=0.0, atol=2 * eps)
    torch.testing.assert_close(rgb + behind * (1.0 - opacity), expected, rtol=0.0, atol=2 * eps)


def test_a_walk_does_not_go_on_through_another_grid():
    binaries, boxes = nested(1, 8)
    origins, directions = rays(15)
    how = {"step_size": 0.05, "traverse_steps_limit": 3}
    _, first, planes = nerfacc.traverse_grids(origins, directions, binaries, boxes, **how)
    assert first.vals.numel() > 0
    binaries[:] = False  # written to in place: what was remembered of it does not hold
    _, rest, _ = nerfacc.traverse_grids(origins, directions, binaries, boxes, near_planes=planes, **how)
    assert rest.vals.numel() == 0


def test_no_rays_give_no_samples():
    binaries, boxes = nested(1, 4)
    intervals, samples, ends = nerfacc.traverse_grids(torch.zeros(0, 3), torch.zeros(0, 3), binaries, boxes)
    assert intervals.vals.shape == samples.vals.shape == ends.shape == (0,) and samples.packed_info.shape == (0, 2)
    with pytest.raises(InputError, match="binaries"):
        nerfacc.traverse_grids(torch.zeros(1, 3), torch.zeros(1, 3), binaries[0], boxes)


def flat(intervals: nerfacc.RayIntervals) -> nerfacc.RayIntervals:
    n, k = intervals.vals.shape
    info = torch.stack([torch.arange(n) * k, torch.full((n,), k)], -1)
    return nerfacc.RayIntervals(intervals.vals.reshape(-1), info)


def test_searching_finds_the_neighbours_on_the_own_ray():
    key = nerfacc.RayIntervals(torch.sort(torch.rand(6, 9), -1).values)
    query = nerfacc.RayIntervals(torch.sort(torch.rand(6, 5) * 1.4 - 0.2, -1).values)
    left, right = nerfacc.searchsorted(key, query)
    clipped = torch.minimum(torch.maximum(query.vals, key.vals[:, :1]), key.vals[:, -1:])
    assert (key.vals.gather(-1, left) <= clipped).all() and (clipped <= key.vals.gather(-1, right)).all()
    assert (right == left + 1).all()
    flat_left, flat_right = nerfacc.searchsorted(flat(key), flat(query))
    base = (torch.arange(6) * 9)[:, None]
    assert (flat_left.view(6, 5) == left + base).all() and (flat_right.view(6, 5) == right + base).all()


def test_resampling_an_even_distribution_is_even():
    edges = nerfacc.RayIntervals(torch.tensor([[0.0, 1.0, 3.0, 4.0], [2.0, 2.5, 3.0, 6.0]]))
    cdfs = (edges.vals - edges.vals[:, :1]) / (edges.vals[:, -1:] - edges.vals[:, :1])
    new, centres = nerfacc.importance_sampling(edges, cdfs, 8)
    torch.testing.assert_close(new.vals, torch.stack([torch.linspace(0, 4, 9), torch.linspace(2, 6, 9)]))
    torch.testing.assert_close(centres.vals, (new.vals[:, 1:] + new.vals[:, :-1]) / 2)
    one = nerfacc.importance_sampling(edges, cdfs, 1)[0]
    torch.testing.assert_close(one.vals, torch.tensor([[0.0, 4.0], [2.0, 6.0]]))


def test_resampling_follows_the_weights_and_its_forms_agree():
    torch.manual_seed(3)
    edges = nerfacc.RayIntervals(torch.sort(torch.rand(5, 12), -1).values)
    cdfs = torch.sort(torch.rand(5, 12), -1).values
    new, centres = nerfacc.importance_sampling(edges, cdfs, 10)
    expected, middle = _sample_from_weighted(
        edges.vals, cdfs.diff(dim=-1), 10, False, edges.vals[:, :1], edges.vals[:, -1:]
    )
    torch.testing.assert_close(new.vals, expected, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(centres.vals, middle, atol=1e-4, rtol=0.0)
    from_flat, _ = nerfacc.importance_sampling(flat(edges), cdfs.reshape(-1), 10)
    torch.testing.assert_close(from_flat.vals, new.vals)
    ragged, points = nerfacc.importance_sampling(edges, cdfs, torch.tensor([10, 0, 1, 10, 3]))
    assert ragged.packed_info[:, 1].tolist() == [11, 0, 2, 11, 4] and points.packed_info[:, 1].tolist() == [
        10,
        0,
        1,
        10,
        3,
    ]
    torch.testing.assert_close(ragged.vals[:11], new.vals[0])
    torch.testing.assert_close(ragged.vals[13:24], new.vals[3])
    torch.testing.assert_close(points.vals[11:21], centres.vals[3])
    assert ragged.is_left.sum() == ragged.is_right.sum() == points.vals.shape[0]
    assert ragged.ray_indices.tolist() == [0] * 11 + [2] * 2 + [3] * 11 + [4] * 4


def test_stratified_resampling_moves_each_ray_and_keeps_order():
    torch.manual_seed(0)
    edges = nerfacc.RayIntervals(torch.linspace(0, 1, 5).expand(64, 5).contiguous())
    draws = torch.stack([nerfacc.importance_sampling(edges, edges.vals, 4, True)[1].vals for _ in range(50)])
    assert (draws.diff(dim=-1) > 0.0).all() and draws.std(0).min() > 0.02
    torch.testing.assert_close(draws.mean((0, 1)), torch.tensor([0.125, 0.375, 0.625, 0.875]), atol=0.01, rtol=0.0)
