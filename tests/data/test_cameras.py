"""Cameras: rays through pixels, and what bad numbers are told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nerfturbo.data.cameras import Cameras, look_at, rotations, turn_between
from nerfturbo.errors import InputError

IDENTITY = torch.eye(4)[None, :3]


def make(n: int = 5, width: int = 60, height: int = 40) -> Cameras:
    generator = torch.Generator().manual_seed(n)
    poses = look_at(torch.randn(n, 3, generator=generator) * 4.0, torch.zeros(3))
    cameras = Cameras.pinhole(poses, width=width, height=height, field_of_view_x=0.7)
    return replace(cameras, focal=cameras.focal * torch.tensor([1.0, 1.3]), center=cameras.center + torch.rand(n, 2))


def test_the_centre_looks_along_minus_z() -> None:
    camera = Cameras.pinhole(IDENTITY, width=8, height=6, field_of_view_x=1.0)
    rays = camera.rays(torch.zeros(1, dtype=torch.int64), torch.tensor([4.0]), torch.tensor([3.0]))
    assert torch.equal(rays.directions, torch.tensor([[0.0, 0.0, -1.0]]))
    assert torch.equal(rays.origins, torch.zeros(1, 3))


def test_x_goes_right_and_y_goes_down() -> None:
    camera = Cameras.pinhole(IDENTITY, width=8, height=6, field_of_view_x=1.0)
    rays = camera.rays(torch.zeros(2, dtype=torch.int64), torch.tensor([8.0, 4.0]), torch.tensor([3.0, 6.0]))
    assert rays.directions[0, 0] > 0 and rays.directions[0, 1] == 0  # right edge: +x
    assert rays.directions[1, 1] < 0 and rays.directions[1, 0] == 0  # bottom edge: -y, since +y is up
    assert math.isclose(math.atan2(rays.directions[0, 0], -rays.directions[0, 2]), 0.5, rel_tol=1e-5)  # half the angle


def test_rays_project_back_to_their_pixels() -> None:
    cameras = make()
    index = torch.randint(0, 5, (500,))
    x, y = torch.rand(500) * 60, torch.rand(500) * 40
    rays = cameras.rays(index, x, y)
    assert torch.allclose(rays.directions.norm(dim=-1), torch.ones(500), atol=1e-6)
    assert torch.equal(rays.origins, cameras.positions[index])
    pixels, depths = cameras.project(index, rays.origins + 2.5 * rays.directions)
    assert (depths > 0).all()
    assert torch.allclose(pixels, torch.stack([x, y], -1), atol=1e-3)


def test_image_rays_go_row_by_row_through_pixel_centres() -> None:
    cameras = make()
    rays = cameras.image_rays(3)
    assert len(rays) == 60 * 40 and (rays.camera_indices == 3).all()
    pixels, _ = cameras.project(torch.full((2400,), 3), rays.origins + rays.directions)
    expected = torch.cartesian_prod(torch.arange(40) + 0.5, torch.arange(60) + 0.5).flip(-1)
    assert torch.allclose(pixels, expected, atol=1e-3)


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.1])
def test_scaling_keeps_the_field_of_view(factor: float) -> None:
    cameras = make()
    scaled = cameras.scaled(factor)
    assert scaled.size.tolist() == [[round(60 * factor), round(40 * factor)]] * 5
    index = torch.arange(5)
    u, v = torch.rand(5), torch.rand(5)  # the same place of the picture in both
    one = cameras.rays(index, u * 60, v * 40)
    two = scaled.rays(index, u * scaled.size[:, 0], v * scaled.size[:, 1])
    assert torch.allclose(one.directions, two.directions, atol=1e-6)
    assert torch.allclose(one.pixel_radii / factor, two.pixel_radii, rtol=1e-4)


def test_pixel_cones_of_a_picture_cover_its_solid_angle() -> None:
    camera = Cameras.pinhole(IDENTITY, width=64, height=64, field_of_view_x=0.5)
    rays = camera.image_rays(0)
    # A pixel of side w at distance 1 has variance w^2 / 12 per axis, a disc of radius r has r^2 / 4: r^2 = w^2 / 3.
    cosines = -rays.directions[:, 2]
    area = (3.0 * rays.pixel_radii**2 * cosines).sum()  # foreshortened
    tangent = math.tan(0.25)
    exact = 4.0 * math.asin(math.sin(math.atan(tangent)) ** 2)
    assert math.isclose(float(area), exact, rel_tol=1e-3)


def test_a_shift_looks_past_the_pixel_that_is_asked_for() -> None:
    cameras, index = make(), torch.tensor([0, 3])
    x, y = torch.tensor([1.5, 4.0]), torch.tensor([2.5, 0.5])
    shifted = cameras.looking_past((0.25, -1.5)).rays(index, x, y)
    torch.testing.assert_close(shifted.directions, cameras.rays(index, x + 0.25, y - 1.5).directions)


def test_times_and_indices_travel_with_rays() -> None:
    cameras = replace(make(), times=torch.linspace(0, 1, 5))
    rays = cameras.rays(torch.tensor([4, 2]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert rays.times.tolist() == [1.0, 0.5] and rays.camera_indices.tolist() == [4, 2]


def test_rays_are_differentiable_to_poses() -> None:
    cameras = make(2)
    poses = cameras.camera_to_world.clone().requires_grad_()
    rays = replace(cameras, camera_to_world=poses).rays(torch.tensor([0, 1]), torch.rand(2), torch.rand(2))
    (rays.directions.sum() + rays.origins.sum()).backward()
    assert torch.isfinite(poses.grad).all() and (poses.grad != 0).any()


def test_zero_rays_are_an_ordinary_value() -> None:
    empty = torch.zeros(0)
    assert len(make().rays(empty.long(), empty, empty)) == 0


def test_indexing_gives_cameras_and_iteration_ends() -> None:
    cameras = replace(make(), times=torch.linspace(0, 1, 5))
    assert [len(part) for part in (cameras[1], cameras[1:3], cameras[torch.tensor([0, 4, 4])])] == [1, 2, 3]
    assert torch.equal(cameras[-1].camera_to_world, cameras.camera_to_world[4:])
    assert len(list(cameras)) == 5
    for read in (lambda: cameras[5], lambda: cameras.image_rays(5), lambda: cameras.image_rays(-1)):
        with pytest.raises(IndexError):
            read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"camera_to_world": torch.full((5, 3, 4), float("nan"))}, "camera_to_world: expected finite"),
        ({"camera_to_world": torch.zeros(5, 3, 4)}, "rotation"),
        ({"camera_to_world": torch.zeros(5, 4, 4)}, r"camera_to_world: expected shape \(5, 3, 4\)"),
        ({"focal": torch.zeros(5, 2)}, "focal: expected finite numbers > 0"),
        ({"focal": -torch.ones(5, 2)}, "focal"),
        ({"focal": torch.ones(5)}, r"focal: expected shape \(5, 2\), got \(5,\)"),
        ({"center": torch.full((5, 2), float("inf"))}, "center"),
        ({"size": torch.zeros(5, 2, dtype=torch.int64)}, "size: expected at least one pixel"),
        ({"size": torch.ones(5, 2)}, "size: expected integers"),
        ({"times": torch.zeros(4)}, "times"),
        ({"times": torch.full((5,), float("nan"))}, "times"),
        ({"model": "orthographic"}, "model: expected one of pinhole"),
        ({"model": "fisheye"}, "distortion: expected None for pinhole"),
        ({"model": "opencv", "distortion": torch.full((5, 8), float("nan"))}, "distortion: expected finite"),
        ({"distortion": torch.zeros(5, 4)}, "distortion"),
    ],
)
def test_bad_cameras_are_named(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(make(), **change)


def test_the_one_camera_without_a_pose_is_named() -> None:
    poses = make().camera_to_world.clone()
    poses[3, 1, 2] = float("inf")
    with pytest.raises(InputError, match="NaN or infinity in the pose of camera 3"):
        replace(make(), camera_to_world=poses)


@pytest.mark.parametrize("angle", [0.0, -1.0, math.pi, float("nan")])
def test_bad_field_of_view(angle: float) -> None:
    with pytest.raises(InputError, match="field_of_view_x"):
        Cameras.pinhole(IDENTITY, width=8, height=8, field_of_view_x=angle)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale(factor: float) -> None:
    with pytest.raises(InputError, match="factor"):
        make().scaled(factor)


@pytest.mark.gpu
def test_rays_inside_a_cuda_graph() -> None:
    """Nothing in `rays` waits for the device or copies to it."""
    cameras = make()
    on_device = cameras.to("cuda")
    index, x, y = torch.randint(0, 5, (64,)), torch.rand(64) * 60, torch.rand(64) * 40
    inputs = [value.cuda() for value in (index, x, y)]
    on_device.rays(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rays = on_device.rays(*inputs)
    inputs[0].copy_(index.flip(0))
    graph.replay()
    expected = cameras.rays(index.flip(0), x, y)
    assert torch.allclose(rays.directions.cpu(), expected.directions, atol=1e-6)
    assert torch.allclose(rays.pixel_radii.cpu(), expected.pixel_radii, rtol=1e-5)


@pytest.mark.gpu
def test_cameras_on_a_gpu_are_built_without_waiting() -> None:
    cameras = make().to("cuda")
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            cameras.scaled(0.5)
            cameras[1:3]
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_rotations_of_quaternions_and_between_vectors() -> None:
    draw = torch.Generator().manual_seed(0)
    quaternion = torch.nn.functional.normalize(torch.randn(9, 4, generator=draw, dtype=torch.float64), dim=-1)
    found = rotations(quaternion)
    torch.testing.assert_close(found @ found.transpose(1, 2), torch.eye(3, dtype=torch.float64).expand(9, 3, 3))
    torch.testing.assert_close(torch.linalg.det(found), torch.ones(9, dtype=torch.float64))
    # Rodrigues: a turn by 2 acos(w) about the vector part
    w, axis = quaternion[:, :1], torch.nn.functional.normalize(quaternion[:, 1:], dim=-1)
    vector = torch.randn(9, 3, generator=draw, dtype=torch.float64)
    angle, along = 2.0 * w.acos(), (axis * vector).sum(-1, keepdim=True)
    turned = vector * angle.cos() + torch.linalg.cross(axis, vector) * angle.sin() + axis * along * (1.0 - angle.cos())
    torch.testing.assert_close((found @ vector[:, :, None])[:, :, 0], turned)
    for source, target in zip(axis, axis.roll(1, 0), strict=True):
        turn = turn_between(source, target)
        torch.testing.assert_close(turn @ source, target)
        torch.testing.assert_close(turn @ turn.T, torch.eye(3, dtype=torch.float64))
    for source in (axis[0], *torch.eye(3, dtype=torch.float64), *-torch.eye(3, dtype=torch.float64)):
        half = turn_between(source, -source)
        torch.testing.assert_close(half @ source, -source)
        torch.testing.assert_close(half @ half, torch.eye(3, dtype=torch.float64))
        assert float(torch.linalg.det(half)) == pytest.approx(1.0)
