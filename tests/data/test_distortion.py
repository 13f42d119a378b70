"""Lens distortion against OpenCV, corners under strong distortion included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nerfturbo.data import lenses
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.cameras import Cameras
from nerfturbo.data.images import ImagePool
from nerfturbo.data.lenses import LENS_MODELS
from nerfturbo.data.scene import Scene
from nerfturbo.types import Aabb

cv2 = pytest.importorskip("cv2", reason="OpenCV is the oracle for lens distortion")

WIDTH, HEIGHT = 1080, 1920
OPENCV_LENSES = {
    "fox": (1375.0, [0.0578421, -0.0805099, -0.000980296, 0.00015575, 0, 0, 0, 0]),
    "barrel": (1000.0, [-0.25, 0.05, 0.001, -0.002, -0.004, 0, 0, 0]),
    "pincushion": (900.0, [0.4, 0.1, 0.0, 0.0, 0.05, 0, 0, 0]),
    "tangential": (1100.0, [-0.0024, -0.0212, 0.011, 0.0096, 0, 0, 0, 0]),
    "rational": (700.0, [0.8, 0.3, 0.0005, -0.0003, 0.02, 1.1, 0.5, 0.05]),
}
FISHEYE_LENSES = {
    "mild": (600.0, [-0.02, 0.004, -0.002, 0.0003, 0, 0, 0, 0]),
    "wide": (750.0, [0.1, -0.03, 0.01, -0.001, 0, 0, 0, 0]),
}


def one_camera(
    model: str, focal: float, coefficients: list[float], width: int = WIDTH, height: int = HEIGHT
) -> Cameras:
    return Cameras(
        camera_to_world=torch.eye(4)[None, :3],
        focal=torch.tensor([[focal, focal * 1.02]]),
        center=torch.tensor([[width * 0.5 + 3.3, height * 0.5 - 7.1]]),
        size=torch.tensor([[width, height]]),
        model=model,  # type: ignore[arg-type]
        distortion=torch.tensor([coefficients]),
    )


def grid_of_pixels(width: int = WIDTH, height: int = HEIGHT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Corners and edges included."""
    y, x = torch.meshgrid(torch.linspace(0, height, 33), torch.linspace(0, width, 31), indexing="ij")
    return torch.zeros(x.numel(), dtype=torch.int64), x.reshape(-1), y.reshape(-1)


def matrix_of(cameras: Cameras) -> np.ndarray:
    (fx, fy), (cx, cy) = cameras.focal[0].double().tolist(), cameras.center[0].double().tolist()
    return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])


@pytest.mark.parametrize("name", OPENCV_LENSES)
def test_rays_land_on_their_pixel_by_opencv(name: str) -> None:
    cameras = one_camera("opencv", *OPENCV_LENSES[name])
    index, x, y = grid_of_pixels()
    assert cameras.is_valid(index, x, y).all()
    rays = cameras.rays(index, x, y)
    points = (rays.directions * torch.tensor([1.0, -1.0, -1.0])).double().numpy()
    found, _ = cv2.projectPoints(points, np.zeros(3), np.zeros(3), matrix_of(cameras), np.array(OPENCV_LENSES[name][1]))
    assert np.abs(found[:, 0] - torch.stack([x, y], -1).numpy()).max() < 1e-3
    own, depths = cameras.project(index, 3.0 * rays.directions)
    assert (depths > 0).all() and (own - torch.stack([x, y], -1)).abs().max() < 1e-3


@pytest.mark.parametrize("name", FISHEYE_LENSES)
def test_fisheye_rays_land_on_their_pixel_by_opencv(name: str) -> None:
    focal, coefficients = FISHEYE_LENSES[name]
    cameras = one_camera("fisheye", focal, coefficients, 1200, 1000)
    index, x, y = grid_of_pixels(1200, 1000)
    assert cameras.is_valid(index, x, y).all()
    rays = cameras.rays(index, x, y)
    points = (rays.directions * torch.tensor([1.0, -1.0, -1.0])).double().numpy()
    found, _ = cv2.fisheye.projectPoints(
        points[:, None], np.zeros(3), np.zeros(3), matrix_of(cameras), np.array(coefficients[:4])
    )
    assert np.abs(found[:, 0] - torch.stack([x, y], -1).numpy()).max() < 1e-3
    assert (cameras.project(index, 3.0 * rays.directions)[0] - torch.stack([x, y], -1)).abs().max() < 1e-3


def test_a_fisheye_may_look_behind() -> None:
    cameras = one_camera("fisheye", 300.0, [0.0] * 8, 1200, 1200)
    index, x, y = torch.tensor([0]), torch.tensor([603.3 + 300.0 * 2.0]), torch.tensor([592.9])
    rays = cameras.rays(index, x, y)
    expected = torch.tensor([[math.sin(2.0), 0.0, -math.cos(2.0)]])
    assert torch.allclose(rays.directions, expected, atol=1e-6)  # 115 degrees off the axis: +z is behind
    assert torch.allclose(cameras.project(index, rays.directions)[0], torch.stack([x, y], -1), atol=1e-3)
    assert cameras.enclosing_pinholes() is None


def test_the_centre_is_the_axis_and_has_gradients() -> None:
    for model in ("opencv", "fisheye"):
        cameras = one_camera(model, 500.0, [-0.1, 0.01, 0, 0, 0, 0, 0, 0])
        x, y = (value.clone().requires_grad_() for value in cameras.center[0])
        rays = cameras.rays(torch.tensor([0]), x[None], y[None])
        assert torch.allclose(rays.directions, torch.tensor([[0.0, 0.0, -1.0]]), atol=1e-7)
        rays.directions.sum().backward()
        assert math.isfinite(float(x.grad)) and float(x.grad) != 0.0


def test_both_ways_agree_in_float64() -> None:
    points = (torch.rand(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5) * 1.2
    directions, lens = torch.cat([points, torch.ones_like(points[:, :1])], dim=-1), LENS_MODELS["opencv"]
    for _, coefficients in OPENCV_LENSES.values():
        rows = torch.tensor(coefficients, dtype=torch.float64).expand(500, 8)
        found = lens.unproject(lens.project(directions, rows), rows)
        assert torch.allclose(found, directions, atol=1e-10)


def test_the_limit_is_where_the_radius_stops_growing() -> None:
    rows = torch.zeros(3, 8)
    rows[1, 0], rows[2, 0] = -0.25, 0.2
    limits = LENS_MODELS["opencv"].limit(rows)  # r (1 + k1 r^2) peaks at r^2 = -1 / (3 k1)
    assert limits.tolist() == pytest.approx([16.0, (4.0 / 3.0) ** 0.5, 16.0], abs=5e-3)
    limits = LENS_MODELS["fisheye"].limit(rows)
    assert limits.tolist() == pytest.approx([math.pi, (4.0 / 3.0) ** 0.5, math.pi], abs=1e-3)
    assert float(limits[0]) == pytest.approx(math.pi, abs=1e-6)


@pytest.mark.parametrize("model", ["opencv", "fisheye"])
def test_pixels_past_the_fold_are_flagged_and_never_drawn(model: str) -> None:
    coefficients = [-0.25, 0, 0, 0, 0, 0, 0, 0]
    cameras = one_camera(model, 20.0, coefficients, 64, 48)
    index, x, y = (value.reshape(-1) for value in (torch.zeros(48 * 64).long(), *pixel_grid(64, 48)))
    peak = (4.0 / 3.0) ** 0.5 * (2.0 / 3.0)  # of the distorted radius
    radius = (((torch.stack([x, y], -1) - cameras.center) / cameras.focal) ** 2).sum(-1).sqrt()
    valid = cameras.is_valid(index, x, y)
    clear = (radius - peak).abs() > 0.01
    assert torch.equal(valid[clear], (radius < peak)[clear]) and 0.05 < valid.float().mean() < 0.95
    assert torch.isfinite(cameras.rays(index, x, y).directions).all()
    batch = PixelSampler(marked_scene(cameras, valid), "cpu", 0).draw(0, 2000)
    assert (batch.rgba == 1.0).all()


def test_drawn_pixels_of_a_distorted_scene_match_their_rays() -> None:
    cameras = one_camera("opencv", 60.0, OPENCV_LENSES["barrel"][1], 64, 48)
    y, x = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
    picture = torch.stack([x, y, torch.zeros_like(x)], -1).to(torch.uint8)
    scene = scene_of(cameras, picture)
    batch = PixelSampler(scene, "cpu", 5).draw(3, 500)
    column, row, _ = (batch.rgba * 255.0).round().unbind(-1)
    expected = cameras.rays(batch.rays.camera_indices, column + 0.5, row + 0.5)
    assert torch.allclose(batch.rays.directions, expected.directions, atol=1e-6)
    part = PixelSampler(scene, "cpu", 5).draw(torch.tensor(3), 100, first=400)
    assert torch.equal(part.rgba, batch.rgba[400:])


def test_enclosing_pinholes_see_all_that_the_lens_sees() -> None:
    for name in OPENCV_LENSES:
        cameras = one_camera("opencv", *OPENCV_LENSES[name])
        frusta = cameras.enclosing_pinholes()
        assert frusta is not None and frusta.model == "pinhole"
        index, x, y = grid_of_pixels()
        pixels, depths = frusta.project(index, cameras.rays(index, x, y).directions)
        assert (depths > 0).all() and (pixels > -1.0).all() and (pixels < frusta.size[0] + 1.0).all()


def test_there_are_no_pinholes_around_a_lens_that_sees_sideways_at_its_corners() -> None:
    edges = [f.enclosing_pinholes() is None for f in (one_camera("fisheye", 40.0, [0.0] * 8, w, 48) for w in (64, 100))]
    assert edges == [False, True]  # half of the width is 0.8 and 1.25 radians off the axis, and the corners more


def pixel_grid(width: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return x, y


def marked_scene(cameras: Cameras, valid: torch.Tensor) -> Scene:
    """White where pixels are valid, black elsewhere."""
    width, height = cameras.size[0].tolist()
    return scene_of(cameras, (valid.view(height, width, 1) * 255).expand(-1, -1, 3).to(torch.uint8))


def scene_of(cameras: Cameras, picture: torch.Tensor) -> Scene:
    return Scene(
        name="lens",
        cameras=cameras,
        images=ImagePool.from_images([picture]),
        aabb=Aabb.cube(1.0),
        near=0.0,
        far=5.0,
        split="train",
        source="memory",
    )


@pytest.mark.gpu
def test_a_distorted_draw_fits_into_a_cuda_graph() -> None:
    cameras = one_camera("opencv", 60.0, OPENCV_LENSES["barrel"][1], 64, 48)
    scene = scene_of(cameras, torch.randint(0, 256, (48, 64, 3), dtype=torch.uint8))
    sampler, step = PixelSampler(scene, "cuda", 1), torch.zeros((), dtype=torch.int64, device="cuda")
    sampler.draw(step, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = sampler.draw(step, 64)
    step.fill_(9)
    graph.replay()
    expected = PixelSampler(scene, "cpu", 1).draw(9, 64)
    assert torch.allclose(batch.rgba.cpu(), expected.rgba)
    assert torch.allclose(batch.rays.directions.cpu(), expected.rays.directions, atol=1e-5)


@pytest.mark.parametrize("points", [lenses.opencv_points, lenses._fisheye, lenses._thin_prism, lenses._rad_tan_prism])
def test_newton_steps_along_the_derivatives_of_the_lens(points: Callable[..., Any]) -> None:
    draw = torch.Generator().manual_seed(3)
    places = torch.rand(7, 2, dtype=torch.float64, generator=draw) - 0.5
    n = 12 if points is lenses._rad_tan_prism else 8
    bends = 0.2 * torch.randn(7, n, dtype=torch.float64, generator=draw)
    bent, (xx, xy, yx, yy) = points(places.requires_grad_(), bends)
    rows = [torch.autograd.grad(bent[:, axis].sum(), places, retain_graph=True)[0] for axis in (0, 1)]
    found = torch.stack([torch.stack([xx, xy], -1), torch.stack([yx, yy], -1)])
    torch.testing.assert_close(found, torch.stack(rows))
