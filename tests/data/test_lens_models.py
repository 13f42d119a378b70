"""Lenses that COLMAP has and OpenCV has not, against their published formulas in float64, corners included."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.cameras import CameraModel, Cameras, look_at

from .test_distortion import marked_scene, one_camera, pixel_grid

WIDTH, HEIGHT = 1280, 960

# Focal length, and a coefficient vector: mild to so strong that the corners see almost sideways.
LENSES: dict[str, tuple[CameraModel, float, list[float]]] = {
    "fov mild": ("fov", 900.0, [0.4, 0, 0, 0, 0, 0, 0, 0]),
    "fov strong": ("fov", 620.0, [1.1, 0, 0, 0, 0, 0, 0, 0]),
    "fov flat": ("fov", 900.0, [1e-6, 0, 0, 0, 0, 0, 0, 0]),
    "prism mild": ("thin_prism", 700.0, [0.02, -0.01, 1e-3, -2e-3, 0.004, -1e-3, 3e-3, -2e-3]),
    "prism strong": ("thin_prism", 520.0, [-0.06, 0.01, 4e-3, 6e-3, -2e-3, 1e-4, -8e-3, 9e-3]),
    "rad tan mild": ("rad_tan_prism", 800.0, [0.02, -0.01, 5e-3, -1e-3, 0, 0, 1e-3, -2e-3, 3e-3, -1e-3, 2e-3, 1e-3]),
    "rad tan strong": (  # about what the glasses of a research project have: 75 degrees to the corner
        "rad_tan_prism",
        610.0,
        [-0.025, 0.096, -0.065, 0.0087, 0.0022, -0.0005, 9e-4, 8e-4, -1e-3, -2e-4, 8e-4, 1e-4],
    ),
    "division barrel": ("division", 700.0, [-0.3, 0, 0, 0, 0, 0, 0, 0]),
    "division pincushion": ("division", 900.0, [0.25, 0, 0, 0, 0, 0, 0, 0]),
    "eucm mild": ("eucm", 800.0, [0.2, 1.1, 0, 0, 0, 0, 0, 0]),
    "eucm strong": ("eucm", 620.0, [0.65, 1.05, 0, 0, 0, 0, 0, 0]),
    "eucm behind": ("eucm", 420.0, [0.57, 1.0, 0, 0, 0, 0, 0, 0]),  # the corners look backwards
    "sphere": ("equirectangular", 330.0, [0.0] * 8),
}


def formula(model: str, directions: torch.Tensor, c: list[float]) -> torch.Tensor:
    """The published projection, float64, one plain line after the other."""
    x, y, z = directions.double().unbind(-1)
    if model == "fov":
        u, v = x / z, y / z
        r = torch.sqrt(u * u + v * v)
        scale = torch.atan(2.0 * r * math.tan(c[0] / 2.0)) / (r * c[0])
        return torch.stack([u * scale, v * scale], -1)
    r = torch.sqrt(x * x + y * y)
    if model == "division":  # the distorted point q has q / (1 + k |q|^2) = (x, y) / z
        root = torch.sqrt(z * z - 4.0 * c[0] * r * r)
        return torch.stack([2.0 * x / (z + root), 2.0 * y / (z + root)], -1)
    if model == "eucm":
        below = c[0] * torch.sqrt(c[1] * r * r + z * z) + (1.0 - c[0]) * z
        return torch.stack([x / below, y / below], -1)
    if model == "equirectangular":
        return torch.stack([torch.atan2(x, z), torch.asin(y / torch.sqrt(r * r + z * z))], -1)
    t = torch.atan2(r, z)
    a, b = x / r * t, y / r * t
    if model == "rad_tan_prism":
        u, v = (side * (1.0 + sum(c[i] * t ** (2 * i + 2) for i in range(6))) for side in (a, b))
        p0, p1, s0, s1, s2, s3 = c[6:]
        q = u * u + v * v
        u_d = u + 2 * p1 * u * v + p0 * (q + 2 * u * u) + s0 * q + s1 * q * q
        v_d = v + 2 * p0 * u * v + p1 * (q + 2 * v * v) + s2 * q + s3 * q * q
        return torch.stack([u_d, v_d], -1)
    k1, k2, p1, p2, k3, k4, s1, s2 = c
    radial = k1 * t**2 + k2 * t**4 + k3 * t**6 + k4 * t**8
    u = a + a * radial + 2 * p1 * a * b + p2 * (t**2 + 2 * a * a) + s1 * t**2
    v = b + b * radial + 2 * p2 * a * b + p1 * (t**2 + 2 * b * b) + s2 * t**2
    return torch.stack([u, v], -1)


def pixels() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every 40th pixel and the very corners."""
    x, y = (torch.linspace(0.0, side, 33).double() for side in (WIDTH, HEIGHT))
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    return torch.zeros(33 * 33, dtype=torch.int64), grid_x.reshape(-1).float(), grid_y.reshape(-1).float()


@pytest.mark.parametrize("name", LENSES)
def test_directions_lead_back_to_their_pixels(name: str) -> None:
    model, focal, coefficients = LENSES[name]
    cameras = one_camera(model, focal, coefficients, WIDTH, HEIGHT)
    index, x, y = pixels()
    valid = cameras.is_valid(index, x, y)
    assert bool(valid.all())
    directions = cameras.rays(index, x, y).directions * torch.tensor([1.0, -1.0, -1.0])  # to OpenCV's axes
    again = formula(model, directions, coefficients) * cameras.focal.double() + cameras.center.double()
    centre = (torch.stack([x, y], -1) - cameras.center).norm(dim=-1) < 1e-3  # the formula divides by zero there
    error = (again - torch.stack([x, y], -1).double()).abs().amax(-1)[~centre]
    assert float(error.max()) < 1e-3
    back, _ = cameras.project(index, cameras.rays(index, x, y).directions)
    assert float((back - torch.stack([x, y], -1)).abs().max()) < 1e-2  # fp32


@pytest.mark.parametrize(
    "name", ["fov strong", "prism strong", "rad tan strong", "division barrel", "eucm strong", "sphere"]
)
def test_gradients_and_the_axis(name: str) -> None:
    model, focal, coefficients = LENSES[name]
    cameras = one_camera(model, focal, coefficients, WIDTH, HEIGHT)
    x, y = (value.clone() for value in cameras.center[0])
    x.requires_grad_()
    rays = cameras.rays(torch.tensor([0]), x[None], y[None])
    assert torch.allclose(rays.directions, torch.tensor([[0.0, 0.0, -1.0]]), atol=1e-6)
    rays.directions.sum().backward()
    assert x.grad is not None and math.isfinite(float(x.grad)) and float(x.grad) != 0.0


@pytest.mark.parametrize(
    ("model", "coefficients", "peak"),
    [
        ("fov", [1.5, 0, 0, 0, 0, 0, 0, 0], 0.5 * math.pi / 1.5),  # sideways
        ("thin_prism", [-0.25, 0, 0, 0, 0, 0, 0, 0], (4.0 / 3.0) ** 0.5 * (2.0 / 3.0)),  # where t (1 + k1 t^2) peaks
        ("rad_tan_prism", [-0.25] + [0] * 11, (4.0 / 3.0) ** 0.5 * (2.0 / 3.0)),
        ("division", [-0.8, 0, 0, 0, 0, 0, 0, 0], 0.8**-0.5),  # sideways
        ("division", [0.9, 0, 0, 0, 0, 0, 0, 0], 0.9**-0.5),  # where r / (1 + k r^2) peaks
        ("eucm", [0.9, 1.2, 0, 0, 0, 0, 0, 0], (0.8 * 1.2) ** -0.5),
    ],
)
def test_pixels_that_no_ray_leads_to_are_never_drawn(
    model: CameraModel, coefficients: list[float], peak: float
) -> None:
    cameras = one_camera(model, 20.0, coefficients, 64, 48)
    x, y = (value.reshape(-1) for value in pixel_grid(64, 48))
    index = torch.zeros(48 * 64, dtype=torch.int64)
    radius = ((torch.stack([x, y], -1) - cameras.center) / cameras.focal).norm(dim=-1)
    valid = cameras.is_valid(index, x, y)
    clear = (radius - peak).abs() > 0.01
    assert torch.equal(valid[clear], (radius < peak)[clear]) and 0.05 < valid.float().mean() < 0.95
    assert bool(torch.isfinite(cameras.rays(index, x, y).directions).all())
    scene = marked_scene(cameras, valid)
    assert bool((PixelSampler(scene, "cpu", 0).draw(0, 2000).rgba == 1.0).all())
    used = scene.used_pixels(0)
    assert used is not None and torch.equal(used.reshape(-1), valid)


def test_a_batch_of_lenses_is_each_of_them() -> None:
    rows = [coefficients for model, _, coefficients in LENSES.values() if model == "thin_prism"]
    one = [one_camera("thin_prism", 600.0, row, WIDTH, HEIGHT) for row in rows]
    both = Cameras(
        torch.cat([camera.camera_to_world for camera in one]),
        torch.cat([camera.focal for camera in one]),
        torch.cat([camera.center for camera in one]),
        torch.cat([camera.size for camera in one]),
        model="thin_prism",
        distortion=torch.tensor(rows),
    )
    index, x, y = pixels()
    for number, camera in enumerate(one):
        assert torch.allclose(both.rays(index + number, x, y).directions, camera.rays(index, x, y).directions)


def test_a_sphere_shows_everything_once() -> None:
    """The middle of the picture is ahead, a quarter of its width further is right, its top is up."""
    width, height = 64, 32
    focal = torch.tensor([[width / (2.0 * math.pi), height / math.pi]])
    cameras = Cameras(
        torch.eye(4)[None, :3],
        focal,
        torch.tensor([[32.0, 16.0]]),
        torch.tensor([[width, height]]),
        model="equirectangular",
        distortion=torch.zeros(1, 8),
    )
    x, y = torch.tensor([32.0, 48.0, 16.0, 64.0, 32.0, 32.0]), torch.tensor([16.0, 16.0, 16.0, 16.0, 0.0, 32.0])
    directions = cameras.rays(torch.zeros(6, dtype=torch.int64), x, y).directions
    expected = [[0, 0, -1], [1, 0, 0], [-1, 0, 0], [0, 0, 1], [0, 1, 0], [0, -1, 0]]
    assert torch.allclose(directions, torch.tensor(expected, dtype=torch.float32), atol=1e-5)
    rays = cameras.image_rays(0)
    area = torch.cos((torch.arange(height) + 0.5) / height * math.pi - 0.5 * math.pi).repeat_interleave(width)
    assert float((rays.directions * area[:, None]).mean(0).abs().max()) < 1e-6  # no side is seen more than another
    smaller = cameras.scaled(0.5)
    assert torch.allclose(smaller.focal, focal / 2) and cameras.enclosing_pinholes() is None


@pytest.mark.parametrize("name", sorted(LENSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_camera_for_all_points_is_that_camera_for_each(name: str, dtype: torch.dtype) -> None:
    model, focal, coefficients = LENSES[name]
    turned = look_at(torch.tensor([[2.0, 1.0, 0.5]]), torch.zeros(3))
    camera = replace(one_camera(model, focal, coefficients), camera_to_world=turned)
    points = torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) - 0.5
    for one, each in zip(
        camera.project(torch.zeros(1, dtype=torch.int64), points.to(dtype)),
        camera.project(torch.zeros(200, dtype=torch.int64), points.to(dtype)),
        strict=True,
    ):
        assert one.shape == each.shape and one.dtype == each.dtype and float((one - each).abs().max()) < 1e-2
