"""Opening picture files: what Pillow reads, HEIC through pillow-heif where it is installed, and large photographs.

Pillow refuses pictures of more than 179 million pixels, because a small damaged or hostile file can claim any size.
Cameras write such pictures, though: here a picture may be as large as its file makes believable.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from PIL import Image

HEIF_ENDINGS = (".heic", ".heif", ".hif")
# What cameras write before they make a picture of it: most are TIFF files, of which Pillow would show the thumbnail.
RAW_ENDINGS = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".gpr", ".iiq", ".kdc", ".mos", ".mrw", ".nef"),
    *(".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)
CONVERT_RAW = "convert them to JPEG, in the highest quality, at full size"
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_LARGE = 178_956_970  # pixels: Pillow's limit
_LARGEST = 1 << 30  # of any picture: 3 GiB of colours
_PIXELS_PER_BYTE = 32  # at most, of a file above Pillow's limit: photographs have 2 to 20
_lock = threading.Lock()  # Pillow's limit and its list of formats belong to the whole process


def open_picture(path: Path) -> Image.Image:
    """A picture with its header read; it is decoded when it is used. Where that fails, the error says why."""
    from PIL import UnidentifiedImageError

    if path.suffix.lower() in RAW_ENDINGS and path.is_file():
        raise InputError(str(path), "a picture that can be read here", "a camera's raw file", CONVERT_RAW)
    if path.suffix.lower() in HEIF_ENDINGS or _kind(path) == "HEIC":  # phones also name them .jpg
        _register_heif()
    try:
        image = _open_any_size(path)
    except FileNotFoundError:
        raise InputError(str(path), "an image file", "no such file") from None
    except UnidentifiedImageError as error:
        raise _unreadable(path, error) from None
    except Exception as error:  # decoders fail in as many ways as there are damaged files
        raise undecodable(path, error) from None
    pixels = image.width * image.height
    if pixels > _LARGE and pixels > min(_LARGEST, _PIXELS_PER_BYTE * path.stat().st_size):
        size = f"{image.width} x {image.height} pixels"
        image.close()
        hint = "the file is damaged, or not a photograph: shrink it by another program first"
        raise InputError(str(path), "a picture whose file is as large as its size asks for", size, hint)
    return image


def undecodable(path: Path, error: Exception) -> InputError:
    """What is said of a file that Pillow fails on."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(str(path), "an image that decodes", reason, "the file is damaged or not an image")


def _open_any_size(path: Path) -> Image.Image:
    from PIL import Image

    with _lock:  # only the header is read inside
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(path)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _register_heif() -> bool:
    """Teach Pillow HEIC, where the package for it is installed; whether it knows it now."""
    if importlib.util.find_spec("pillow_heif") is None:
        return False
    import pillow_heif  # type: ignore[import-not-found,unused-ignore]

    with _lock:
        pillow_heif.register_heif_opener()
    return True


def _kind(path: Path) -> str | None:
    """HEIC or AVIF by the first bytes of a file, whatever its name; None for others."""
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError:
        return None
    brands = (start[8:12], start[16:20], start[20:24], start[24:28])
    if start[4:8] != b"ftyp":
        return None
    if any(brand in _AVIF_BRANDS for brand in brands):
        return "AVIF"
    return "HEIC" if any(brand in _HEIF_BRANDS for brand in brands) else None


def _unreadable(path: Path, error: Exception) -> InputError:
    kind = _kind(path)
    if kind == "HEIC":
        installed = importlib.util.find_spec("pillow_heif") is not None
        hint = "the file is damaged" if installed else "pip install pillow-heif, or convert the photos to JPEG"
        return InputError(str(path), "a picture that can be read here", "a HEIC file", hint)
    if kind == "AVIF":
        hint = "pip install --upgrade pillow (11.3 or newer reads it), or convert the photos to JPEG"
        return InputError(str(path), "a picture that can be read here", "an AVIF file", hint)
    return undecodable(path, error)
