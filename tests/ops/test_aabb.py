"""Ray-box intersection: the returned stretch lies inside the box, and nothing outside it does."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import ray_aabb, use_backend
from nerfturbo.types import Aabb

from .cases import Target, assert_close, make_rays, require

BOX = Aabb((-1.0, -0.8, -1.2), (1.0, 1.1, 0.9))


@pytest.mark.parametrize(("near", "far"), [(0.0, float("inf")), (0.2, 3.1)])
def test_matches_reference(sized: tuple[Target, int], near: float, far: float, poisoned_empty: None):
    target, n = sized
    require(target)
    origins, directions = (t.to(target.device) for t in make_rays(n))
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            results.append(ray_aabb(origins, directions, BOX, near=near, far=far))
    for name, got, want in zip(("t_min", "t_max"), *results, strict=True):
        assert_close(name, got, want, 1e-6)


def test_zero_rays(target: Target):
    require(target)
    with use_backend(target.backend):
        t_min, t_max = ray_aabb(*[torch.zeros(0, 3, device=target.device)] * 2, BOX)
    assert t_min.shape == t_max.shape == (0,)


def test_special_rays(target: Target):
    """Along a face's plane outside it, from inside, away from the box, on a face, rays that are not numbers, and from a
    face into the box by the smallest of numbers."""
    require(target)
    nan, inf = float("nan"), float("inf")
    origins = torch.tensor(
        [[5.0, 0, -3], [0, 0, 0], [0, 0, 3], [1.0, 0, -3], [nan, 0, 0], [0, 0, 0], [inf, 0, 0], [1.0, 0, 0]],
        device=target.device,
    )
    tiny = torch.finfo(torch.float32).tiny
    directions = torch.tensor(
        [[0, 0, 1.0], [0, 0, 1.0], [0, 0, 1.0], [0, 0, 1.0], [0, 0, 1.0], [nan, 0, 1.0], [1.0, 0, 0], [-tiny, 0, 1.0]],
        device=target.device,
    )
    box = Aabb.cube(1.0)
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            t_min, t_max = (t.cpu().tolist() for t in ray_aabb(origins, directions, box, near=0.5))
        assert (t_min[0], t_max[0]) == (0.5, 0.5)  # parallel, outside: a miss
        assert (t_min[1], t_max[1]) == (0.5, 1.0)  # from inside, from near on
        assert (t_min[2], t_max[2]) == (0.5, 0.5)  # behind
        assert t_min[4] == t_max[4] == t_min[5] == t_max[5] == t_min[6] == t_max[6] == 0.5  # nonsense misses
        assert (t_min[7], t_max[7]) == (0.5, 1.0)
        with use_backend(backend):  # the box begins past what is looked at: a miss as well
            beyond = ray_aabb(
                torch.zeros_like(origins[:1]) - 3.0 * directions[:1], directions[:1], box, near=0.5, far=1.5
            )
        assert [value.tolist() for value in beyond] == [[0.5], [0.5]]


def test_points_inside_and_outside():
    origins, directions = make_rays(500)
    t_min, t_max = ray_aabb(origins, directions, BOX)
    hit = t_max > t_min
    assert 50 < int(hit.sum()) < 500
    low, high = BOX.tensor()
    for share in (0.001, 0.5, 0.999):
        points = origins + directions * (t_min + share * (t_max - t_min))[:, None]
        inside = ((points >= low - 1e-5) & (points <= high + 1e-5)).all(-1)
        assert bool(inside[hit].all())
    for t in (t_min - 1e-3, t_max + 1e-3):
        points = origins + directions * t[:, None]
        assert not bool(((points > low) & (points < high)).all(-1)[hit].any())


def test_errors_name_the_argument():
    with pytest.raises(InputError, match="origins: expected shape"):
        ray_aabb(torch.zeros(3), torch.zeros(3), BOX)
    with pytest.raises(InputError, match="directions: expected shape"):
        ray_aabb(torch.zeros(4, 3), torch.zeros(5, 3), BOX)
    with pytest.raises(InputError, match="aabb: expected low < high"):
        Aabb((0.0, 0.0, 0.0), (1.0, 0.0, 1.0))
