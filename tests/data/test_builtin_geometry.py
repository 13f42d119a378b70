"""The renderer's kernels against plain torch and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from nerfturbo.data.builtin.scenes import Material, Solid, along, box, capsule, frustum, pack, sphere, torus
from scene_distance import _solid_distance

geometry = pytest.importorskip("nerfturbo.data.builtin.render", reason="numba is not installed")

LOOK = Material("#808080")
SOLIDS = [
    sphere((0.1, -0.2, 0.3), 0.5, LOOK),
    capsule((-0.4, 0.2, -0.3), (0.5, -0.1, 0.6), 0.12, LOOK),
    box((0.1, 0.0, -0.1), (0.5, 0.3, 0.2), LOOK, rounding=0.05, rotation=along((0.3, 0.5, 0.8))),
    frustum((0.0, 0.1, 0.0), (0.5, 0.2), 0.4, LOOK, rounding=0.04, rotation=along((-0.3, 0.2, 0.9))),
    frustum((0.0, 0.0, 0.2), (0.6, 0.6), 0.05, LOOK, rounding=0.02),
    torus((0.0, 0.1, 0.1), 0.5, 0.1, LOOK, axis=(0.2, 0.9, 0.4)),
    torus((0.0, 0.0, 0.0), 0.6, 0.012, LOOK, axis=(0.5, 0.1, 0.7)),
]
NAMES = ["sphere", "capsule", "box", "frustum", "cylinder", "torus", "thin torus"]


def table(solid: Solid) -> np.ndarray:
    return pack([solid])[0]


def local(solid: Solid, point: np.ndarray) -> tuple[float, float, float]:
    return tuple(np.asarray(solid.rotation).T @ (point - np.asarray(solid.center)))


@pytest.mark.parametrize("solid", SOLIDS, ids=NAMES)
def test_kernel_and_torch_distances_agree(solid: Solid) -> None:
    points = np.random.default_rng(0).uniform(-1.2, 1.2, (300, 3))
    expected = _solid_distance(solid, torch.from_numpy(points)).numpy()
    found = [geometry.distance(table(solid), 0, *local(solid, point)) for point in points]
    assert np.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("solid", SOLIDS, ids=NAMES)
def test_distance_is_a_distance(solid: Solid) -> None:
    """It grows by one per unit along its gradient (away from where gradients meet), and never faster anywhere."""
    points = (torch.rand(2000, 3, dtype=torch.float64) * 2.4 - 1.2).requires_grad_()
    distance = _solid_distance(solid, points)
    (gradient,) = torch.autograd.grad(distance.sum(), points)
    lengths = gradient.norm(dim=-1)
    assert (lengths < 1.0 + 1e-9).all() and ((lengths - 1.0).abs() < 1e-9).double().mean() > 0.95
    outside = distance.detach() > 0.02
    surface = (points - distance[:, None] * gradient).detach()[outside]
    assert _solid_distance(solid, surface).abs().max() < 1e-7  # following the gradient home ends on the surface
    inside = points.detach()[distance.detach() < 0] - torch.tensor(solid.center)
    assert (inside.norm(dim=-1) <= solid.bound).all()


@pytest.mark.parametrize("solid", SOLIDS, ids=NAMES)
def test_hits_are_the_first_crossing(solid: Solid) -> None:
    rng = np.random.default_rng(1)
    solids, active = table(solid), np.zeros(1, np.int64)
    hits = 0
    for _ in range(300):
        origin = rng.normal(size=3)
        origin *= 3.0 / np.linalg.norm(origin)
        target = np.asarray(solid.center) + rng.uniform(-0.6, 0.6, 3)
        direction = (target - origin) / np.linalg.norm(target - origin)
        t, which = geometry.first_hit(solids, active, (*origin, *direction))
        steps = torch.linspace(0.0, 6.0, 6001, dtype=torch.float64)[:, None]
        along_ray = _solid_distance(solid, torch.from_numpy(origin) + steps * torch.from_numpy(direction))
        if which == 0:
            hits += 1
            point = origin + t * direction
            assert abs(geometry.distance(solids, 0, *local(solid, point))) < 1e-6
            assert (along_ray[: int(t / 0.001)] > -1e-6).all()  # nothing before it
        else:
            assert (along_ray > -1e-6).all()
    assert hits > 10


@pytest.mark.parametrize("solid", SOLIDS, ids=NAMES)
def test_normals_are_gradients(solid: Solid) -> None:
    solids, active = table(solid), np.zeros(1, np.int64)
    rng = np.random.default_rng(2)
    checked = 0
    for _ in range(600):
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        target = np.asarray(solid.center) + 0.6 * rng.uniform(-1.0, 1.0, 3)
        origin = target - 3.0 * direction
        t, which = geometry.first_hit(solids, active, (*origin, *direction))
        if which < 0:
            continue
        point = torch.from_numpy(origin + t * direction)[None].requires_grad_()
        (gradient,) = torch.autograd.grad(_solid_distance(solid, point).sum(), point)
        normal = geometry.normal(solids, 0, *local(solid, point.detach().numpy()[0]))
        assert np.allclose(normal, gradient.numpy()[0], atol=1e-4)
        checked += 1
    assert checked > 5


def test_a_disc_light_sets_behind_an_edge() -> None:
    """Moving sideways past a large box, the light goes from all to nothing; half of it is seen at the edge."""
    wall = table(box((0.0, 0.0, 1.0), (0.4, 0.4, 0.1), LOOK, rounding=0.001))
    spread = 0.05

    def visible(x: float) -> float:
        return geometry.light_visibility(wall, -1, (x, 0.0, 0.0, 0.0, 0.0, 1.0), spread)

    values = [visible(0.4 + offset) for offset in np.linspace(-0.1, 0.1, 41)]
    assert values[0] == 0.0 and values[-1] == 1.0
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(values))
    assert abs(visible(0.4) - 0.5) < 0.02
    for offset in (-0.02, 0.01, 0.03):  # the part of a disc beyond a chord: the far or the near edge of the box
        s = offset / (1.1 if offset > 0 else 0.9) / spread
        exact = 0.5 + (s * math.sqrt(1 - s * s) + math.asin(s)) / math.pi
        assert abs(visible(0.4 + offset) - exact) < 0.02


def test_stacked_solids_do_not_leak_light() -> None:
    two = [box((0.0, 0.0, z), (0.3, 0.3, 0.1), LOOK, rounding=0.001) for z in (1.0, 1.2)]
    side_by_side = [box((x, 0.0, 1.0), (0.3, 0.3, 0.1), LOOK, rounding=0.0005) for x in (-0.3, 0.3)]
    for solids in (two, side_by_side):
        rows = pack(solids)[0]
        assert geometry.light_visibility(rows, -1, (0.0, 0.0, 0.0, 0.0, 0.0, 1.0), 0.05) < 0.02


def test_openness_falls_towards_a_wall() -> None:
    wall, free = table(box((0.5, 0.0, 0.0), (0.3, 1.0, 1.0), LOOK)), np.empty(8)
    values = [geometry.openness(wall, -1, (x, 0.0, 0.0), (0.0, 0.0, 1.0), free) for x in (-1.0, 0.0, 0.1, 0.19)]
    assert values[0] == 1.0 and values[0] > values[1] > values[2] > values[3] > 0.0
