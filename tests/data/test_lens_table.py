"""Directions looked up are directions computed, for every lens, picture and pixel."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.data.batches import PixelSampler, pixel_centers
from nerfturbo.data.cameras import CameraModel, Cameras
from nerfturbo.data.conventions import look_at
from nerfturbo.data.images import ImagePool
from nerfturbo.data.lens_table import make_lens_table, picture_directions
from nerfturbo.data.scene import Scene
from nerfturbo.types import Aabb

SIZES = [(24, 16), (30, 20), (24, 16), (24, 16)]


def scene_of(model: CameraModel) -> Scene:
    """Four pictures by three lenses: the first and the last share theirs."""
    eyes = torch.tensor([[3.0, 0.0, 1.0], [0.0, 3.0, 1.0], [-3.0, 0.0, 1.0], [0.0, -3.0, 1.0]])
    size = torch.tensor(SIZES)
    k1 = torch.tensor([0.05, 0.05, -0.05, 0.05])
    distortion = torch.zeros(4, 8)
    distortion[:, 0], distortion[:, 1] = k1, 1e-3
    cameras = Cameras(
        look_at(eyes, torch.zeros(3)),
        torch.full((4, 2), 30.0),
        size.float() / 2 + 0.3,
        size,
        model=model,
        distortion=None if model == "pinhole" else distortion,
    )
    draw = torch.Generator().manual_seed(0)
    pictures = [torch.randint(0, 255, (h, w, 3), dtype=torch.uint8, generator=draw) for w, h in SIZES]
    images = ImagePool.from_images(pictures)
    return Scene("s", cameras, images, Aabb.cube(1.0), 0.0, 10.0, "train", False, "here")


@pytest.mark.parametrize("model", ["opencv", "fisheye"])
def test_every_pixel_has_its_direction(model: CameraModel) -> None:
    scene = scene_of(model)
    table = make_lens_table(scene.cameras, scene.images.offsets)
    assert table is not None and table.directions.shape[0] == 24 * 16 * 2 + 30 * 20  # three lenses of four pictures
    pixel = torch.arange(scene.images.n_pixels)
    image, x, y = pixel_centers(scene.images.offsets, scene.images.sizes[:, 0].contiguous(), pixel)
    expected = scene.cameras.local_directions(image, x, y)
    assert torch.allclose(table.look_up(image, pixel), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("model", ["opencv", "fisheye"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_batches_are_the_same_with_and_without(model: CameraModel, place: str) -> None:
    scene = scene_of(model)
    with_table = PixelSampler(scene, "cpu", 3, pixels=place)  # type: ignore[arg-type]
    without = PixelSampler(scene, "cpu", 3, pixels=place)  # type: ignore[arg-type]
    assert with_table._table is not None
    without._table = None
    for step in (0, 7):
        a, b = with_table.draw(step, 500), without.draw(step, 500)
        assert torch.equal(a.rgba, b.rgba) and torch.equal(a.rays.origins, b.rays.origins)
        assert torch.allclose(a.rays.directions, b.rays.directions, rtol=0.0, atol=1e-6)
        assert torch.allclose(a.rays.pixel_radii, b.rays.pixel_radii)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["opencv", "fisheye"])
def test_pictures_through_one_lens_invert_it_once(model: CameraModel) -> None:
    cameras = scene_of(model).cameras
    found = [picture_directions(cameras, index, torch.device("cpu")) for index in range(4)]
    for index, directions in enumerate(found):
        want, rays = cameras.image_rays(index), torch.full((SIZES[index][0] * SIZES[index][1],), index)
        assert directions is not None
        got = cameras.rays_along(rays, directions)
        assert torch.allclose(got.directions, want.directions, rtol=0.0, atol=1e-6)
        assert torch.equal(got.origins, want.origins)
    assert found[0] is found[3] and found[0] is not found[2]
    assert picture_directions(cameras.scaled(100.0), 0, torch.device("cpu")) is None  # too large to keep
    assert picture_directions(scene_of("pinhole").cameras, 0, torch.device("cpu")) is None


def test_pinholes_and_large_pictures_have_none() -> None:
    assert make_lens_table(scene_of("pinhole").cameras, scene_of("pinhole").images.offsets) is None
    scene = scene_of("opencv")
    assert make_lens_table(scene.cameras, scene.images.offsets, limit=12 * 1000) is None
    assert make_lens_table(scene.cameras, scene.images.offsets, limit=12 * 1368) is not None


@pytest.mark.gpu
def test_on_a_gpu_the_same_directions() -> None:
    scene = scene_of("opencv")
    device, host = scene.to("cuda"), make_lens_table(scene.cameras, scene.images.offsets)
    table = make_lens_table(device.cameras, device.images.offsets)
    assert table is not None and host is not None and table.directions.is_cuda
    assert torch.allclose(table.directions.cpu(), host.directions, rtol=0.0, atol=1e-6)
    assert torch.equal(table.shifts.cpu(), host.shifts)
