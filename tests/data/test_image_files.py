"""Files as phones and cameras write them: HEIC, AVIF, very large, under wrong names; and what is said of others."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from nerfturbo.data import images
from nerfturbo.data.capture.photos import copy_photos, find_photos
from nerfturbo.data.images import decode_image, image_size, load_images
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError


def ramp(width: int = 64, height: int = 48) -> Image.Image:
    """Smooth, and different in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    values = np.stack([255 * x / width, 255 * y / height, 128 + 0 * x], -1)
    return Image.fromarray(values.astype(np.uint8))


@pytest.fixture
def heif() -> None:
    module = pytest.importorskip(
        "pillow_heif", reason="pillow-heif is not installed; it has no build for this platform"
    )
    Image.init()  # all other formats, before a test takes this one away again
    module.register_heif_opener()


@pytest.mark.parametrize("name", ["IMG_0001.HEIC", "a.heif", "b.jpg"])
def test_heic_of_phones(tmp_path: Path, heif: None, name: str) -> None:
    ramp().save(tmp_path / "x.heic", quality=95)
    path = (tmp_path / "x.heic").rename(tmp_path / name)  # some phones and web sites give it another name
    assert image_size(path) == (64, 48)
    assert float((decode_image(path).float() - torch.from_numpy(np.array(ramp())).float()).abs().mean()) < 4.0
    assert find_photos(tmp_path) == [path]
    photos = copy_photos([path], tmp_path / "out", lambda text: None, lambda share: None)
    assert photos[0].name == (name if name == "b.jpg" else f"{name}.jpg") and photos[0].size == (64, 48)
    with Image.open(tmp_path / "out" / photos[0].name) as copy:
        assert copy.format == "JPEG"  # what COLMAP reads


def test_heic_without_its_package_says_what_to_install(
    tmp_path: Path, heif: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ramp().save(tmp_path / "a.heic")
    ramp().save(tmp_path / "b.jpg")
    found: Callable = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pillow_heif" else found(name))
    monkeypatch.delitem(Image.OPEN, "HEIF")
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    with pytest.raises(InputError, match=r"a\.heic: .* got a HEIC file; pip install pillow-heif, or convert"):
        decode_image(tmp_path / "a.heic")
    said: list[str] = []
    assert len(copy_photos(find_photos(tmp_path), tmp_path / "out", said.append, lambda share: None)) == 1
    assert "left out a.heic: a HEIC file; pip install pillow-heif" in said[0]
    with pytest.raises(InputError, match=r"1 files that do not; a\.heic: a HEIC file; pip install pillow-heif"):
        copy_photos([tmp_path / "a.heic"], tmp_path / "again", said.append, lambda share: None)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif(tmp_path: Path) -> None:
    ramp().save(tmp_path / "a.avif", quality=90)
    pool = load_images([tmp_path / "a.avif"], LoadOptions(2))
    assert pool.sizes.tolist() == [[32, 24]] and find_photos(tmp_path)
    (tmp_path / "b.avif").write_bytes(b"\0\0\0\x20ftypavif" + bytes(40))
    with pytest.raises(InputError, match=r"b\.avif: expected"):
        decode_image(tmp_path / "b.avif")


def test_pictures_may_be_as_large_as_their_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own limits lie at 89 (a warning) and 179 (an error) million pixels; here at a thousand."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    monkeypatch.setattr(images, "_LARGE", 1000)
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.jpg", quality=90)
    Image.new("RGB", (640, 480)).save(tmp_path / "bomb.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(tmp_path / "photo.jpg").shape == (48, 64, 3)
        with pytest.raises(InputError, match=r"bomb\.png: .* got 640 x 480 pixels; the file is damaged, or not"):
            image_size(tmp_path / "bomb.png")
        with pytest.raises(InputError, match="640 x 480 pixels"):
            load_images([tmp_path / "photo.jpg", tmp_path / "bomb.png"])
    assert Image.MAX_IMAGE_PIXELS == 500  # as it was, for everybody else


def test_files_of_several_pictures_stay_as_they_are(tmp_path: Path) -> None:
    """MPO: phones put a second picture behind the first, and the file is a JPEG to everybody else."""
    ramp().save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[ramp()])
    photos = copy_photos([tmp_path / "a.jpg"], tmp_path / "out", lambda text: None, lambda share: None)
    assert photos[0].name == "a.jpg" and (tmp_path / "out" / "a.jpg").samefile(tmp_path / "a.jpg")
    assert decode_image(tmp_path / "a.jpg").shape == (48, 64, 3)


@pytest.mark.parametrize("name", ["IMG_1.CR2", "DSC_1.NEF", "a.dng"])
def test_raw_files_are_named_not_read_as_their_thumbnails(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    ramp(16, 12).save(folder / name, "TIFF")  # as such files begin
    with pytest.raises(InputError, match="a camera's raw file; convert them to JPEG"):
        decode_image(folder / name)
    ending = Path(name).suffix.lower()
    for source in (folder, tmp_path):
        with pytest.raises(InputError, match=rf"\{ending} files; convert them to JPEG"):
            load_scene(source)
    ramp().save(folder / "IMG_1.JPG")  # cameras write both: the picture is taken
    assert [path.name for path in find_photos(folder)] == ["IMG_1.JPG"]


@pytest.mark.parametrize("kind", ["EPS", "TGA", "PPM"])
def test_other_formats_under_the_name_of_a_picture_are_refused(tmp_path: Path, kind: str) -> None:
    """Pillow reads many, one of them (EPS) by handing it to Ghostscript."""
    ramp().save(tmp_path / "a", kind)
    (tmp_path / "a").rename(tmp_path / "a.png")
    with pytest.raises(InputError, match=rf"a\.png: expected a picture that can be read here, got a file of {kind}"):
        decode_image(tmp_path / "a.png")
