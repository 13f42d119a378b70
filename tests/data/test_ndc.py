"""Normalised device coordinates: the published map, straight rays, a box that holds them, and one choice everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.errors import InputError

from . import folders


def write_facing(folder: Path) -> Path:
    """An LLFF folder whose cameras stand in a row and look the same way, a little turned."""
    folders.write_llff(folder)
    rows = np.load(folder / "poses_bounds.npy")
    for index, row in enumerate(rows):
        angle = 0.02 * (index - 8)
        right, up = np.array([np.cos(angle), 0.0, np.sin(angle)]), np.array([0.0, 1.0, 0.0])
        matrix = row[:15].reshape(3, 5)
        matrix[:, :3] = np.stack([-up, right, np.cross(right, up)], 1)
        matrix[:, 3] = [0.1 * index - 0.8, 0.05 * (index % 3), 0.02 * (index % 4)]
        row[15:] = 2.0, 50.0
    np.save(folder / "poses_bounds.npy", rows)
    return folder


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return load_scene(write_facing(tmp_path / "facing"), options=LoadOptions(bounds="ndc"))


def test_points_go_into_the_box_and_back(scene: Scene) -> None:
    ndc = scene.cameras.ndc
    assert ndc is not None and scene.grid_levels == 1 and scene.near == 0.0
    rotation, draw = ndc.to_mean[:, :3], torch.Generator().manual_seed(0)
    local = torch.rand(200, 3, generator=draw) * torch.tensor([2.0, 2.0, -40.0]) + torch.tensor([-1.0, -1.0, -1.1])
    unit = rotation.square().sum() / 3.0
    points = (local - ndc.to_mean[:, 3]) @ rotation / unit  # of the mean camera, to the scene's coordinates
    bent = ndc.bend(points)
    x, y, z = local.unbind(-1)
    a, b = ndc.scale.tolist()
    published = torch.stack([-a * x / z, -b * y / z, 1.0 + 2.0 / z], -1)  # the near plane is 1 ahead
    assert torch.allclose(bent, published, atol=1e-5)
    assert torch.allclose(ndc.unbend(bent), points, rtol=1e-3, atol=1e-3)
    assert a == pytest.approx(2.0 * folders.FOCAL / folders.WIDTH)
    assert b == pytest.approx(2.0 * folders.FOCAL / folders.HEIGHT)


def test_rays_stay_straight_and_inside(scene: Scene) -> None:
    """A point along a plain ray lies on the bent one; the box and `far` hold all of it."""
    ndc, low, high = scene.cameras.ndc, *scene.aabb.tensor()
    assert ndc is not None
    for index in range(len(scene)):
        plain = replace(scene.cameras, ndc=None).image_rays(index)
        bent = scene.cameras.image_rays(index)
        assert torch.allclose(bent.directions.norm(dim=-1), torch.ones(1)) and bool((bent.origins[:, 2] == -1.0).all())
        for t in (20.0, 80.0):
            there = ndc.bend(plain.origins + plain.directions * t)
            way = there - bent.origins
            along = (way * bent.directions).sum(-1)
            assert bool((along > 0.0).all()) and float(along.max()) < scene.far
            assert torch.allclose(bent.origins + along[:, None] * bent.directions, there, atol=1e-4)
            assert bool(((there > low) & (there < high)).all())
    pixels, depths = scene.cameras.project(torch.zeros(1, dtype=torch.int64), bent_point(scene))
    assert torch.allclose(pixels, torch.tensor([[7.5, 3.5]]), atol=1e-2) and float(depths) > 0.0


def bent_point(scene: Scene) -> torch.Tensor:
    """(1, 3): a point of the box that pixel (7, 3) of the first picture shows."""
    ray = scene.cameras.rays(torch.tensor([0]), torch.tensor([7.5]), torch.tensor([3.5]))
    return ray.origins + 0.7 * ray.directions


@pytest.mark.parametrize("place", ["device", "host"])
def test_drawn_rays_are_the_pictures_rays(scene: Scene, place: str) -> None:
    batch = PixelSampler(scene, "cpu", 5, pixels=place).draw(0, 64)  # type: ignore[arg-type]
    assert batch.rays.camera_indices is not None
    for ray in range(0, 64, 9):
        rays = scene.cameras.image_rays(int(batch.rays.camera_indices[ray]))
        apart = (rays.directions - batch.rays.directions[ray]).abs().amax(-1)
        apart += (rays.origins - batch.rays.origins[ray]).abs().amax(-1)
        assert float(apart.min()) < 1e-5


def test_splits_share_the_box_and_plain_scenes_have_none(tmp_path: Path) -> None:
    folder = write_facing(tmp_path / "facing")
    train, test, plain = (load_scene(folder, split, options=LoadOptions(bounds=bounds)) for split, bounds in _CASES)
    assert train.cameras.ndc is not None and test.cameras.ndc is not None and plain.cameras.ndc is None
    assert torch.equal(train.cameras.ndc.to_mean, test.cameras.ndc.to_mean) and train.aabb == test.aabb
    assert torch.equal(train.to_original, plain.to_original)  # type: ignore[arg-type]
    assert any(note.startswith("NDC: the near plane is") for note in train.notes)


_CASES: tuple[tuple, ...] = (("train", "ndc"), ("test", "ndc"), ("train", "auto"))


def test_scenes_that_cannot_be_bent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ndc: expected cameras that look one way"):
        load_scene(folders.write_llff(tmp_path / "ring"), options=LoadOptions(bounds="ndc"))
    with pytest.raises(InputError, match="ndc: expected depths"):
        load_scene(folders.write_transforms(tmp_path / "plain"), options=LoadOptions(bounds="ndc"))
    with pytest.raises(InputError, match="ndc: expected depths"):
        load_scene(folders.write_blender_json(tmp_path / "blender"), options=LoadOptions(bounds="ndc"))
    with pytest.raises(InputError, match=r"ndc: expected a capture .* got a built-in scene"):
        load_scene("toybox", options=LoadOptions(bounds="ndc"))


def test_the_fern(scene_dir: Callable[[str], Path]) -> None:
    scene = load_scene(scene_dir("llff/fern"), downscale=8, options=LoadOptions(bounds="ndc"))
    assert scene.cameras.ndc is not None and 2.0 <= scene.aabb.high[0] - scene.aabb.low[0] < 4.0
