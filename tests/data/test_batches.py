"""Random pixels: the right colours, uniformly, the same for every way to draw them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.images import ImagePool
from nerfturbo.data.scene import Scene

from .test_scene import make_scene


def mixed_scene() -> Scene:
    """Pictures of three sizes; each pixel's colour says where it is: (picture, column, row)."""
    sizes = [(5, 3), (8, 8), (2, 9)]
    pictures = []
    for index, (width, height) in enumerate(sizes):
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        pictures.append(torch.stack([torch.full_like(x, index), x, y], -1).to(torch.uint8))
    images = ImagePool.from_images(pictures)
    scene = make_scene(3, channels=3)
    cameras = scene.cameras.resized(images.sizes)
    return replace(scene, cameras=cameras, images=images)


def test_rays_belong_to_the_colours() -> None:
    scene = mixed_scene()
    batch = PixelSampler(scene, "cpu", 3).draw(7, 1000)
    assert batch.rgba.dtype == torch.float32 and len(batch.rays) == 1000
    picture, column, row = (batch.rgba * 255.0).round().long().unbind(-1)
    assert torch.equal(batch.rays.camera_indices, picture)
    expected = scene.cameras.rays(picture, column + 0.5, row + 0.5)
    assert torch.allclose(batch.rays.directions, expected.directions, atol=1e-6)
    assert torch.equal(batch.rays.origins, expected.origins)


def test_every_pixel_is_equally_likely() -> None:
    scene = mixed_scene()
    draws = 200_000
    batch = PixelSampler(scene, "cpu", 0).draw(0, draws)
    picture, column, row = (batch.rgba * 255.0).round().long().unbind(-1)
    pixel = scene.images.offsets[picture] + row * scene.images.sizes[picture, 0] + column
    counts = torch.bincount(pixel, minlength=scene.images.n_pixels).double()
    expected = draws / scene.images.n_pixels
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = scene.images.n_pixels - 1
    assert abs(chi_squared - freedom) < 5.0 * (2.0 * freedom) ** 0.5


def test_draws_depend_on_seed_step_and_index_alone() -> None:
    scene = make_scene()
    sampler = PixelSampler(scene, "cpu", 1)
    whole = sampler.draw(5, 100)
    again = PixelSampler(scene, "cpu", 1).draw(torch.tensor(5), 100)
    assert torch.equal(whole.rays.directions, again.rays.directions)
    parts = [sampler.draw(5, 40), sampler.draw(5, 60, first=40)]
    assert torch.equal(torch.cat([part.rays.directions for part in parts]), whole.rays.directions)
    for other in (sampler.draw(6, 100), PixelSampler(scene, "cpu", 2).draw(5, 100)):
        assert not torch.equal(other.rays.directions, whole.rays.directions)


def test_zero_rays() -> None:
    batch = PixelSampler(make_scene(), "cpu", 0).draw(0, 0)
    assert len(batch.rays) == 0 and batch.rgba.shape == (0, 4)


def test_times_travel() -> None:
    scene = make_scene()
    scene = replace(scene, cameras=replace(scene.cameras, times=torch.linspace(0, 1, len(scene))))
    rays = PixelSampler(scene, "cpu", 0).draw(0, 10).rays
    assert rays.times is not None and rays.camera_indices is not None
    assert torch.allclose(rays.times, rays.camera_indices / 6.0)


@pytest.mark.gpu
def test_draws_inside_a_cuda_graph() -> None:
    """Nothing waits for the device, and a step on the device draws anew at each replay."""
    scene = mixed_scene()
    sampler = PixelSampler(scene, "cuda", 3)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    sampler.draw(step, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = sampler.draw(step, 64)
    for value in (4, 9):
        step.fill_(value)
        graph.replay()
        expected = PixelSampler(scene, "cpu", 3).draw(value, 64)
        assert torch.equal(batch.rgba.cpu(), expected.rgba)
        assert torch.allclose(batch.rays.directions.cpu(), expected.rays.directions, atol=1e-6)
