"""Pixel draws: the same pixels on every backend, uniform over the pool, seen through the right camera."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import PixelPool, draw_pixels, read_pixels

from .cases import Target, assert_close, generator, require

SIZES = [(7, 5), (3, 4), (6, 6)]  # width, height


def make_pool(device: str, channels: int = 4) -> PixelPool:
    draw = generator(0)
    offsets = torch.tensor([0, *[w * h for w, h in SIZES]]).cumsum(0)
    poses = torch.randn(3, 3, 4, generator=draw)
    intrinsics = torch.tensor([[5.0, 6.0, 3.0, 2.0], [4.0, 4.0, 1.0, 2.0], [7.0, 7.0, 3.0, 3.0]])
    pixels = torch.randint(0, 256, (int(offsets[-1]), channels), generator=draw, dtype=torch.uint8)
    widths = torch.tensor([w for w, _ in SIZES])
    return PixelPool(*(t.to(device) for t in (pixels, offsets, widths, poses, intrinsics)))


@pytest.mark.parametrize("channels", [0, 3, 4])
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_matches_reference(sized: tuple[Target, int], channels: int, on_device: bool, poisoned_empty: None):
    target, n = sized
    require(target)
    pool = make_pool(target.device, channels)
    step = torch.tensor(9, device=target.device) if on_device else 9
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(draw_pixels(pool, n, seed=(5 << 33) + 1, step=step, first=11))
    for name in ("origins", "directions", "rgba", "image_indices"):
        assert_close(name, getattr(results[0], name), getattr(results[1], name))


def test_chosen_pixels_are_looked_up(sized: tuple[Target, int], poisoned_empty: None):
    target, n = sized
    require(target)
    pool = make_pool(target.device)
    indices = torch.randint(0, pool.pixels.shape[0], (n,), generator=generator(4)).to(target.device)
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(draw_pixels(pool, n, seed=0, step=0, indices=indices))
    for name in ("origins", "directions", "rgba", "image_indices"):
        assert_close(name, getattr(results[0], name), getattr(results[1], name))
    torch.testing.assert_close(results[0].rgba, pool.pixels[indices].float() / 255.0, rtol=2.0**-23, atol=0.0)  # 1 ulp


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("n", [0, 1, 131, 5000])  # 5000: more than one pass of every program
def test_pixels_are_read(target: Target, n: int, channels: int, poisoned_empty: None):
    require(target)
    pool = make_pool(target.device, channels)
    indices = torch.randint(0, pool.pixels.shape[0], (n,), generator=generator(4)).to(target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        found = read_pixels(pool.pixels, indices)
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu(), pool.pixels[indices].cpu().float() / 255.0)


def test_uniform_over_pixels_of_all_pictures():
    pool = make_pool("cpu")
    n = 60_000
    images = draw_pixels(pool, n, seed=0, step=0).image_indices
    share = torch.bincount(images, minlength=3) / n
    wanted = torch.tensor([w * h for w, h in SIZES]) / 83.0
    assert (share - wanted).abs().max() < 0.01


def test_ranks_draw_slices_of_one_batch():
    pool = make_pool("cpu")
    whole = draw_pixels(pool, 10, seed=3, step=4)
    parts = [draw_pixels(pool, 5, seed=3, step=4, first=first) for first in (0, 5)]
    assert torch.equal(whole.rgba, torch.cat([part.rgba for part in parts]))
    assert not torch.equal(whole.rgba, draw_pixels(pool, 10, seed=3, step=5).rgba)


def test_directions_are_unit_and_origins_the_cameras():
    pool = make_pool("cpu")
    drawn = draw_pixels(pool, 100, seed=0, step=0)
    assert_close("norm", drawn.directions.norm(dim=-1), torch.ones(100), 1e-6)
    assert torch.equal(drawn.origins, pool.poses[drawn.image_indices, :, 3])


def test_centre_pixel_looks_forward():
    pixels = torch.zeros(1, 3, dtype=torch.uint8)
    pose = torch.eye(4)[None, :3]
    pool = PixelPool(pixels, torch.tensor([0, 1]), torch.tensor([1]), pose, torch.tensor([[1.0, 1.0, 0.5, 0.5]]))
    assert draw_pixels(pool, 1, seed=0, step=0).directions.tolist() == [[0.0, 0.0, -1.0]]


def test_zero_rays(target: Target):
    require(target)
    with use_backend(target.backend):  # type: ignore[arg-type]
        assert draw_pixels(make_pool(target.device), 0, seed=0, step=0).rgba.shape == (0, 4)


def test_bad_pool_is_named():
    with pytest.raises(InputError, match=r"pixels: expected torch\.uint8"):
        PixelPool(torch.zeros(4, 3), torch.tensor([0, 4]), torch.tensor([2]), torch.zeros(1, 3, 4), torch.ones(1, 4))


@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
def test_rays_further_on_match_reference(sized: tuple[Target, int], chosen: bool, poisoned_empty: None):
    target, n = sized
    require(target)
    pool = make_pool(target.device)
    indices = torch.randint(0, pool.pixels.shape[0], (n,), generator=generator(4)).to(target.device) if chosen else None
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(draw_pixels(pool, n, seed=5, step=9, first=3, indices=indices))
    for name in ("origins", "directions", "rgba", "image_indices"):
        assert_close(name, getattr(results[0], name), getattr(results[1], name))
