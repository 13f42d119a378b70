"""The picture pool: sizes, alpha, downscaling, orientation, and files that do not decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.data.images import ImagePool, composite_over, decode_image, load_images, save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.errors import InputError


def random_image(height: int, width: int, channels: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, channels), generator=generator).to(torch.uint8)


def test_pictures_of_different_sizes_share_a_pool(tmp_path: Path) -> None:
    images = [random_image(7, 5, 3, 1), random_image(4, 9, 3, 2), random_image(1, 1, 3, 3)]
    for index, image in enumerate(images):
        save_image(tmp_path / f"{index}.png", image)
    pool = load_images([tmp_path / f"{index}.png" for index in range(3)])
    assert pool.sizes.tolist() == [[5, 7], [9, 4], [1, 1]] and pool.offsets.tolist() == [0, 35, 71, 72]
    for index, image in enumerate(images):
        assert torch.equal(pool.image_bytes(index), image)
        assert torch.equal(pool.image(index), image.float() / 255.0)
    assert pool.image_bytes(1).data_ptr() == pool.pixels[35:].data_ptr()  # a view, no copy
    chosen = pool.select([2, 0])
    assert torch.equal(chosen.image_bytes(1), images[0]) and chosen.n_pixels == 36


def test_one_picture_with_alpha_gives_all_four_channels(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", random_image(3, 3, 3))
    save_image(tmp_path / "b.png", random_image(3, 3, 4))
    pool = load_images([tmp_path / "a.png", tmp_path / "b.png"])
    assert pool.channels == 4 and (pool.image_bytes(0)[..., 3] == 255).all()


def test_downscaling_takes_the_mean(tmp_path: Path) -> None:
    image = random_image(12, 8, 3)
    save_image(tmp_path / "a.png", image)
    expected = image.float().reshape(3, 4, 2, 4, 3).mean((1, 3))
    small = decode_image(tmp_path / "a.png", 4)
    assert small.shape == (3, 2, 3) and (small.float() - expected).abs().max() <= 0.51
    assert torch.equal(load_images([tmp_path / "a.png"], LoadOptions(4)).image_bytes(0), small)


def test_downscaling_ignores_the_colour_of_what_is_invisible(tmp_path: Path) -> None:
    image = torch.zeros(2, 2, 4, dtype=torch.uint8)
    image[0, 0] = torch.tensor([200, 100, 50, 255], dtype=torch.uint8)
    image[1, 1] = torch.tensor([0, 255, 0, 0], dtype=torch.uint8)  # invisible green
    save_image(tmp_path / "a.png", image)
    red, green, blue, alpha = decode_image(tmp_path / "a.png", 2)[0, 0].tolist()
    assert alpha in (63, 64) and abs(red - 200) <= 4 and abs(green - 100) <= 4 and abs(blue - 50) <= 4


@pytest.mark.parametrize("size", [(603, 41), (1, 1), (7, 5)])
def test_downscaled_cameras_and_pictures_agree_on_odd_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    from nerfturbo.data.cameras import Cameras

    save_image(tmp_path / "a.png", random_image(size[1], size[0], 3))
    camera = Cameras.pinhole(torch.eye(4)[None, :3], width=size[0], height=size[1], field_of_view_x=1.0)
    for divisor in (2, 3, 6, 10):
        pool = load_images([tmp_path / "a.png"], LoadOptions(divisor))
        assert torch.equal(camera.scaled(1.0 / divisor).size, pool.sizes)


def test_orientation_tag_is_obeyed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to view
    array = np.zeros((20, 30, 3), np.uint8)
    array[:, :5] = 255  # a white stripe on the left of the file is on top of the picture
    Image.fromarray(array).save(tmp_path / "a.jpg", exif=exif, quality=95)
    pool = load_images([tmp_path / "a.jpg"])
    assert pool.sizes.tolist() == [[20, 30]]
    assert pool.image(0)[:4].mean() > 0.9 and pool.image(0)[8:].mean() < 0.1


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "I;16", "CMYK"])
def test_every_mode_becomes_colour(tmp_path: Path, mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    if mode == "I;16":
        Image.fromarray(np.full((4, 6), 128 << 8, np.uint16)).save(tmp_path / "a.png")
    elif mode == "P":
        Image.new("RGB", (6, 4), (128, 128, 128)).quantize(4).save(tmp_path / "a.png")
    else:
        Image.new("RGB", (6, 4), (128, 128, 128)).convert(mode).save(tmp_path / f"a.{suffix}")
    image = decode_image(tmp_path / f"a.{suffix}")
    assert image.shape == (4, 6, 4 if mode == "LA" else 3)
    if mode != "1":
        assert (image[..., :3].float() - 128).abs().max() <= 3


def test_compositing_law() -> None:
    rgba = torch.rand(5, 4)
    assert torch.allclose(composite_over(torch.cat([rgba[:, :3], torch.ones(5, 1)], -1), 0.3), rgba[:, :3])
    assert torch.allclose(composite_over(torch.cat([rgba[:, :3], torch.zeros(5, 1)], -1), 0.3), torch.tensor(0.3))
    background = torch.rand(5, 3)
    expected = rgba[:, :3] * rgba[:, 3:] + background * (1 - rgba[:, 3:])
    assert torch.allclose(composite_over(rgba, background), expected)
    assert composite_over(background, 0.5) is background  # nothing to composite
    with pytest.raises(InputError, match="rgba"):
        composite_over(torch.rand(5, 2), 1.0)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_an_image_that_does_not_decode_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    for read in (lambda: decode_image(path), lambda: load_images([path])):
        with pytest.raises(InputError, match=r"broken\.png: expected an image that decodes"):
            read()


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    save_image(tmp_path / "whole.png", random_image(64, 64, 3))
    content = (tmp_path / "whole.png").read_bytes()
    for length in (30, 60, len(content) // 2, len(content) - 30):
        (tmp_path / "cut.png").write_bytes(content[:length])
        with pytest.raises(InputError, match=r"cut\.png"):
            load_images([tmp_path / "cut.png"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_pixels_that_are_not_finite_are_refused_by_the_name_of_their_image(tmp_path: Path, bad: float) -> None:
    good, path = torch.full((3, 4, 3), 0.5), tmp_path / "depth.tif"
    assert ImagePool.from_images([good, random_image(2, 2, 3)]).image_bytes(0).unique().tolist() == [128]
    assert ImagePool.from_images(good[None]).n_pixels == 12
    broken = good.clone()
    broken[1, 2, 0] = bad
    for images in ([good, broken], torch.stack([good, broken])):
        with pytest.raises(InputError, match=r"images\[1\]: expected pixels that are finite, got NaN or infinity"):
            ImagePool.from_images(images)
    Image.fromarray(broken[..., 0].numpy()).save(path)
    for read in (lambda: decode_image(path), lambda: load_images([path])):
        with pytest.raises(InputError, match=r"depth\.tif: expected pixels that are finite, got NaN or infinity"):
            read()
    for name in ("a.npy", "a.exr"):
        np.save(tmp_path / "a.npy", broken.numpy())
        (tmp_path / "a.exr").write_bytes(b"\x76\x2f\x31\x01" + b"\0" * 60)
        with pytest.raises(InputError, match=rf"{name}: expected an image that decodes"):
            load_images([tmp_path / name])


def test_floats_of_a_tiff_are_shares_of_white_or_bytes(tmp_path: Path) -> None:
    ramp = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
    for values in (ramp, ramp * 255.0):
        Image.fromarray(values).save(tmp_path / "grey.tif")
        seen = decode_image(tmp_path / "grey.tif")[..., 0].float() / 255.0
        assert (seen - torch.from_numpy(ramp)).abs().max() <= 1.0 / 255.0


def test_missing_files_and_bad_arguments() -> None:
    with pytest.raises(InputError, match="no such file"):
        decode_image("nowhere.png")
    with pytest.raises(InputError, match="paths"):
        load_images([])
    with pytest.raises(InputError, match="downscale"):
        load_images([Path("a.png")], LoadOptions(0))
    with pytest.raises(InputError, match="pixels"):
        ImagePool(torch.zeros(4, 3), torch.tensor([0, 4]), torch.tensor([[2, 2]]))
    with pytest.raises(InputError, match="sizes"):
        ImagePool(torch.zeros(4, 3, dtype=torch.uint8), torch.tensor([0]), torch.tensor([[2, 2]]))
    pool = ImagePool.from_images(torch.zeros(2, 3, 3, 3, dtype=torch.uint8))
    with pytest.raises(IndexError):
        pool.image(2)
