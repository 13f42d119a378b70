"""Directions looked up are directions computed, for every lens, picture and pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nerfturbo.data.batches import PixelSampler, drawable_mask
from nerfturbo.data.cameras import CameraModel, Cameras, look_at
from nerfturbo.data.images import ImagePool
from nerfturbo.data.lenses import all_valid, make_lens_table, picture_directions, pixel_centers, valid_pixels
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


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do, and the longest tensor that it sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.sorted = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if "unique" in str(func) or str(func).startswith(("aten.sort", "aten.argsort")):
            self.sorted = max(self.sorted, args[0].shape[0])
        return func(*args, **(kwargs or {}))


def wide_scene(n: int, k1: Sequence[float], size: tuple[int, int] = (64, 48)) -> Scene:
    """n pictures, with k1 one after the other, through lenses that see more than 90 degrees."""
    eyes = torch.tensor([[3.0, 0.1 * index, 1.0] for index in range(n)])
    distortion = torch.zeros(n, 8)
    distortion[:, 0] = torch.tensor([k1[index % len(k1)] for index in range(n)])
    sizes = torch.tensor([size] * n)
    cameras = Cameras(
        look_at(eyes, torch.zeros(3)),
        torch.full((n, 2), size[0] * 0.3125),
        sizes.float() / 2,
        sizes,
        model="opencv",
        distortion=distortion,
    )
    images = ImagePool.from_images(torch.zeros(n, size[1], size[0], 3, dtype=torch.uint8))
    return Scene("s", cameras, images, Aabb.cube(1.0), 0.0, 10.0, "train", False, "here")


def test_valid_pixels_are_those_of_the_cameras_and_remembered() -> None:
    scene = wide_scene(4, [-0.25, 0.1])
    host = torch.device("cpu")
    found = [valid_pixels(scene.cameras, index, host) for index in range(4)]
    assert found[1] is None and found[3] is None  # a lens that never folds over
    assert found[0] is not None and found[0] is found[2] and 0.05 < float(found[0].float().mean()) < 0.95
    image, x, y = pixel_centers(scene.images.offsets, scene.images.sizes[:, 0], torch.arange(64 * 48))
    assert torch.equal(found[0].view(-1), scene.cameras.is_valid(image, x, y))
    assert torch.equal(scene.used_pixels(0), found[0]) and scene.used_pixels(1) is None  # type: ignore[arg-type]
    assert valid_pixels(scene_of("pinhole").cameras, 0, host) is None


def test_which_pixels_have_a_ray_is_seen_at_the_edges_without_looking_at_every_pixel() -> None:
    scene = wide_scene(3, [0.07, 0.11, 0.13], (960, 540))
    with Operations() as asked:
        assert scene.used_pixels(1) is None and all_valid(scene.cameras)
    assert asked.sorted <= len(scene)  # lenses, never pixels
    mixed = wide_scene(3, [0.07, -0.25, 0.13])
    assert not all_valid(mixed.cameras)
    drawable = drawable_mask(mixed)
    assert drawable is not None and 64 * 48 * 2 < drawable.n_drawable < 64 * 48 * 3


def test_a_table_of_many_lenses_is_made_by_as_few_operations_as_of_one() -> None:
    counts = []
    for lenses in (1, 24):
        scene = wide_scene(24, [0.24 - 0.01 * index for index in range(lenses)])
        with Operations() as asked:
            table = make_lens_table(scene.cameras, scene.images.offsets)
        assert table is not None and table.directions.shape[0] == lenses * 64 * 48
        image, x, y = pixel_centers(scene.images.offsets, scene.images.sizes[:, 0], torch.arange(24 * 64 * 48))
        looked_up = table.look_up(image, torch.arange(24 * 64 * 48))
        assert torch.allclose(looked_up, scene.cameras.local_directions(image, x, y), rtol=0.0, atol=2e-6)
        counts.append(asked.count)
    assert counts[1] < 1.1 * counts[0]
