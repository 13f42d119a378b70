"""Where scenes are put: upright, centred, scaled, with bounds that hold them, and back again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import Config, GridConfig, GridSamplerConfig, LossConfig, VanillaConfig
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.placement import _sample, levels_for, place, place_in_ndc, placed_poses
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.presets import preset

from .test_scene import make_scene


def ring(n: int = 12, radius: float = 3.0) -> torch.Tensor:
    angle = torch.arange(n, dtype=torch.float64) * (6.28 / n)
    eyes = torch.stack([radius * angle.cos(), radius * angle.sin(), torch.full_like(angle, 1.0)], -1)
    return look_at(eyes, torch.zeros(3, dtype=torch.float64))


def moved(poses: torch.Tensor, scale: float = 7.0) -> torch.Tensor:
    """Any rotation, scale and origin: what structure from motion gives."""
    draw = torch.Generator().manual_seed(4)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=draw, dtype=torch.float64))
    rotation = rotation * torch.linalg.det(rotation)
    shift = torch.tensor([10.0, -5.0, 3.0], dtype=torch.float64)
    position = (poses[:, :, 3] @ rotation.T) * scale + shift
    return torch.cat([rotation @ poses[:, :, :3], position[:, :, None]], -1)


def cameras_at(poses: torch.Tensor) -> Cameras:
    return Cameras.pinhole(poses.float(), width=40, height=30, field_of_view_x=0.9)


def test_any_origin_unit_and_up_gives_the_same_place() -> None:
    poses = moved(ring())
    placement = place(cameras_at(poses), poses)
    placed = placed_poses(poses, placement)
    assert torch.allclose(placed[:, :, 3].norm(dim=-1), torch.ones(12), atol=1e-5)  # about what they look at
    assert placed[:, 2, 1].min() > 0.9 and torch.allclose(placed[:, 2, 3], torch.full((12,), 0.316), atol=2e-3)
    rotation = placed[:, :, :3]
    assert torch.allclose(rotation.transpose(1, 2) @ rotation, torch.eye(3).expand(12, 3, 3), atol=1e-5)
    back = placed[:, :, 3].double() @ placement.to_original[:3, :3].T + placement.to_original[:3, 3]
    assert torch.allclose(back, poses[:, :, 3], atol=1e-4)
    assert placement.extent.grid_levels == 5 and 0.0 < placement.extent.near < 0.1


@pytest.mark.parametrize(("spread", "levels"), [(0.8, 2), (2.0, 2), (5.0, 2), (20.0, 4)])
def test_points_decide_how_far_the_boxes_reach(spread: float, levels: int) -> None:
    poses = ring()
    points = (torch.rand(2000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5) * 2.0 * spread
    points = points[(points[:, :2].norm(dim=-1) < 2.0) | (points[:, :2].norm(dim=-1) > 4.0)]
    placement = place(cameras_at(poses), poses, points)
    assert placement.extent.grid_levels == levels
    assert placement.extent.far > 2.0 ** (levels - 1)


@pytest.mark.parametrize(("field_of_view", "doubt"), [(0.9, True), (1.4, False)])
def test_pictures_that_show_only_ground_between_the_cameras_leave_a_doubt(field_of_view: float, doubt: bool) -> None:
    poses = look_at(ring()[:, :, 3] + torch.tensor([0.0, 0.0, 5.0]), torch.zeros(3, dtype=torch.float64))
    cameras = Cameras.pinhole(poses.float(), width=40, height=30, field_of_view_x=field_of_view)
    ground = torch.rand(2000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    placement = place(cameras, poses, ground * torch.tensor([2.0, 2.0, 0.02]))
    assert (placement.other is not None) == doubt and placement.extent.kind == "unbounded"


def test_cameras_side_by_side_look_at_a_box_ahead() -> None:
    eyes = torch.tensor([[x, 0.0, z] for x in (-0.5, 0.0, 0.5) for z in (-0.3, 0.0, 0.3)], dtype=torch.float64)
    poses = look_at(eyes, eyes + torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(500, 3, dtype=torch.float64, generator=draw) * torch.tensor([4.0, 8.0, 3.0]).double()
    points = points + torch.tensor([-2.0, 4.0, -1.5])
    placement = place(cameras_at(poses), poses, points)
    placed = placed_poses(poses, placement)
    assert placed[:, 1, 3].max() < -0.9  # they stand at one side of the box and look along +y into it
    assert (-placed[:, 1, 2] > 0.99).all() and placement.extent.grid_levels <= 2
    assert 0.1 < placement.extent.near < 0.5


def test_the_box_of_bent_rays_holds_whichever_corner_of_the_pictures_is_farthest_aside() -> None:
    eyes = torch.tensor([[-0.1, 0.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    poses = look_at(eyes, eyes + torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    roll = torch.tensor([[0.96, -0.28, 0.0], [0.28, 0.96, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    poses[:, :, :3] = poses[:, :, :3] @ torch.stack([roll, roll.T])  # about the mean camera: no two corners are level
    across = torch.linspace(-1.0, 1.0, 15, dtype=torch.float64)
    points = torch.cartesian_prod(across, torch.tensor([3.0], dtype=torch.float64), across)
    cameras, sides = cameras_at(poses), []
    for shift in ((8.0, 6.0), (8.0, -6.0), (-8.0, 6.0), (-8.0, -6.0)):
        moved_center = replace(cameras, center=cameras.center + torch.tensor(shift))
        sides.append(place_in_ndc(moved_center, poses, points).extent.aabb.high[0])
    assert sides == [pytest.approx(1.001 * (0.96 * 21.0 + 0.28 * 28.0) / 15.0)] * 4  # upwards, in half heights


def test_the_farthest_camera_is_the_unit_whoever_stands_in_the_middle() -> None:
    around = ring()
    center = place(cameras_at(around), around).to_original[:3, 3]
    inside = look_at(center[None], center + torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    poses = torch.cat([around, inside])
    placement = place(cameras_at(poses), poses)
    torch.testing.assert_close(placement.to_original[:3, 3], center, atol=0.05, rtol=0.0)
    found = placed_poses(poses, placement)[:, :, 3].norm(dim=-1)
    assert float(found.max()) == pytest.approx(1.0) and float(found.min()) < 0.05


def test_what_one_camera_sees_gives_the_unit() -> None:
    poses = ring(1)
    points = poses[0, :, 3] + 7.0 * torch.nn.functional.normalize(torch.randn(100, 3, dtype=torch.float64), dim=-1)
    placement = place(cameras_at(poses), poses, points)
    assert float(placement.to_original[:3, :3].norm(dim=0).mean()) == pytest.approx(
        float((points - placement.to_original[:3, 3]).norm(dim=-1).median())
    )


def test_one_camera_and_cameras_without_a_common_up() -> None:
    for few in (ring(1), ring(4)[:2]):  # two lines of sight nearly always meet
        placement = place(cameras_at(few), few)
        assert placement.extent.far > 0.0 and "no common point" in placement.notes[1]
    poses = ring(4)
    poses[::2, :, :2] *= -1.0  # half of them upside down
    placement = place(cameras_at(poses), poses)
    assert "stand in a plane" in placement.notes[0] and float(placement.to_original[2, 2]) > 0.0
    eyes = torch.tensor([[0.1 * index, 0.0, 0.0] for index in range(4)], dtype=torch.float64)
    poses = look_at(eyes, eyes + torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    poses[::2, :, :2] *= -1.0
    assert "turned all ways: down" in place(cameras_at(poses), poses).notes[0]  # as a drone in lanes
    aside = torch.tensor([[0.7, 1.0, 0.0], [0.7, 1.0, 0.0], [-0.7, 1.0, 0.0], [-0.7, 1.0, 0.0]], dtype=torch.float64)
    poses = look_at(eyes, eyes + aside)
    poses[::2, :, :2] *= -1.0
    assert "no common up" in place(cameras_at(poses), poses).notes[0]


def test_levels_double_the_box() -> None:
    assert [levels_for(reach) for reach in (0.0, 1.0, 1.5, 2.0, 2.1, 1e30)] == [1, 1, 2, 2, 3, 6]


def test_unbounded_scenes_adjust_plain_configs_only() -> None:
    bounded = make_scene()
    scene = replace(bounded, grid_levels=4)
    assert fitted_config(Config(), bounded) == (Config(), ())
    config, notes = fitted_config(Config(), scene)
    assert (config.grid.levels, config.sampler.cone_angle, config.sampler.alpha_thre) == (4, 1.0 / 256.0, 1e-2)
    assert config.field.max_resolution == 2048 * 8 and "grid.levels 4" in notes[0]
    assert config.loss.near_gradient == 1.0 and "loss.near_gradient 1" in notes[0]
    near = Config(loss=LossConfig(near_gradient=0.5))
    assert fitted_config(near, scene)[0].loss == near.loss
    assert fitted_config(config, scene) == (config, ())
    chosen = Config(grid=GridConfig(levels=2), sampler=GridSamplerConfig(cone_angle=0.1))
    assert fitted_config(chosen, scene)[0] == chosen
    half = Config(sampler=GridSamplerConfig(cone_angle=0.1), field=VanillaConfig())
    assert fitted_config(half, scene)[0].sampler.cone_angle == 0.1
    cpu, _ = fitted_config(preset("ngp-cpu"), scene)
    assert cpu.render.steps_per_diagonal == 256 and cpu.grid.resolution == 32


def test_bounds_that_are_asked_for_are_not_in_doubt_and_rays_end_behind_the_last_box() -> None:
    poses = ring()
    for bounds in ("bounded", "unbounded"):
        placement = place(cameras_at(poses), poses, options=LoadOptions(bounds=bounds))
        assert placement.other is None and placement.extent.kind == bounds
        box, levels = placement.extent.aabb, placement.extent.grid_levels
        eyes = placed_poses(poses, placement)[:, :, 3].abs()
        corner = torch.tensor(box.size) * 0.5 * 2.0 ** (levels - 1)
        assert placement.extent.far == pytest.approx(float((eyes + corner).norm(dim=-1).max()), rel=1e-4)


def test_of_many_points_an_even_part_is_looked_at() -> None:
    points = torch.arange(40_000.0)[:, None].expand(-1, 3)
    assert _sample(points)[:, 0].tolist() == list(range(0, 40_000, 2)) and len(_sample(points[1:])) == 39_999
