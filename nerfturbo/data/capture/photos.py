"""Plain photographs, before they have poses: which files they are, and upright copies that COLMAP reads.

COLMAP's program does not turn pictures by their EXIF tag and does not read every format, so what is turned or unusual
is written again; all other files are linked as they are, and keep the focal length that their camera wrote.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, refuse
from ..images import CONVERT_RAW, HEIF_ENDINGS, RAW_ENDINGS, decode_image, image_size, open_image
from ..json_checks import natural

PHOTO_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".avif", *HEIF_ENDINGS)
VIDEO_ENDINGS = (".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".3gp", ".mts", ".m2ts")
_SUBFOLDERS = ("images", "input", "photos", "rgb")
# What every build of COLMAP reads as we do; MPO is a JPEG file with more behind it, as phones write.
_KEPT_FORMATS = {"JPEG": ("RGB", "L"), "MPO": ("RGB", "L"), "PNG": ("RGB", "RGBA", "L")}
_LOSSY_FORMATS = ("JPEG", "MPO", "HEIF", "AVIF")  # whose copies are JPEG files too: PNG would be many times as large
_ORIENTATION, _MAKE, _MODEL, _EXIF, _FOCAL, _FOCAL_35 = 0x0112, 0x010F, 0x0110, 0x8769, 0x920A, 0xA405


@dataclass(frozen=True)
class Photo:
    """One picture of a scene folder in the making: its name there, its upright size, and the camera that EXIF names."""

    name: str
    size: tuple[int, int]
    camera: str  # make, model and focal length; empty where the file does not say


def is_video(path: Path) -> bool:
    """Whether this is a file whose name says that it holds a video."""
    return path.suffix.lower() in VIDEO_ENDINGS and path.is_file()


def find_photos(folder: Path) -> list[Path]:
    """The photographs of a folder, or of its subfolder `images`, in the order of names; none is an empty list."""
    for place in (folder, *(folder / name for name in _SUBFOLDERS)):
        with contextlib.suppress(OSError):
            files = (path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
            if found := sorted((path for path in files if path.suffix.lower() in PHOTO_ENDINGS), key=natural):
                return found
    return []


def photo_sizes(photos: Sequence[Path]) -> list[tuple[int, int]]:
    """Widths and heights, from the headers; damaged files are left out."""
    sizes = []
    for photo in photos:
        with contextlib.suppress(InputError):
            sizes.append(image_size(photo))
    return sizes


def require_photos(folder: Path) -> list[Path]:
    """As `find_photos`, but a folder without any is an error that says what it holds instead."""
    refuse(not folder.exists(), str(folder), "a folder of photos or a video file", "no such file or folder")
    expected = "a folder of photos, or a video ending in " + ", ".join(VIDEO_ENDINGS)
    refuse(not folder.is_dir(), str(folder), expected, f"a file ending in {folder.suffix or 'nothing'!r}")
    if not (photos := find_photos(folder)):
        raise InputError(str(folder), "photos ending in " + ", ".join(PHOTO_ENDINGS), *what_else(folder))
    return photos


def copy_photos(
    paths: Sequence[Path], folder: Path, warn: Callable[[str], None], advance: Callable[[float], None]
) -> list[Photo]:
    """Bring photos into a new folder, upright and readable by COLMAP. Damaged ones are left out with a warning."""
    folder.mkdir(parents=True)
    taken: list[Photo] = []
    reason = ""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        for index, result in enumerate(threads.map(lambda path: _copy_or_refuse(path, folder), paths)):
            if isinstance(result, Photo):
                taken.append(result)
            else:
                reason = reason or f"{paths[index].name}: {result}"
                warn(f"warning: left out {paths[index].name}: {result}")
            advance((index + 1) / len(paths))
    refuse(not taken, str(paths[0].parent), "photos that decode", f"{len(paths)} files that do not", reason)
    return taken


def what_else(folder: Path) -> tuple[str, str]:
    """(what was found, hint) of a folder without photos."""
    endings = sorted({path.suffix.lower() for path in folder.iterdir() if path.is_file()} - {""})
    places = [place for place in (folder, *(folder / name for name in _SUBFOLDERS)) if place.is_dir()]
    files = (path for place in places for path in place.iterdir() if not path.name.startswith("."))
    if raw := sorted({path.suffix.lower() for path in files}.intersection(RAW_ENDINGS)):
        return f"{', '.join(raw)} files", CONVERT_RAW
    if videos := sorted(path.name for path in folder.iterdir() if is_video(path)):
        return f"the video {videos[0]}", f"name the file itself: {folder / videos[0]}"
    if inside := sorted(path.name for path in folder.iterdir() if path.is_dir() and find_photos(path)):
        return f"photos only in {', '.join(inside[:4])}", f"name that folder: {folder / inside[0]}"
    return f"only {', '.join(endings[:8])} files" if endings else "none", ""


def _copy_or_refuse(path: Path, folder: Path) -> Photo | str:
    """The photo as it is in the folder now, or the reason why it is not."""
    from PIL import Image

    try:
        with open_image(path) as image:
            image.load()  # the whole file: a damaged one must not be found out after hours of matching
            exif = image.getexif()
            inner = exif.get_ifd(_EXIF)
            named = (exif.get(_MAKE), exif.get(_MODEL), inner.get(_FOCAL), inner.get(_FOCAL_35))
            is_jpeg = image.format in _LOSSY_FORMATS and image.mode in _KEPT_FORMATS["JPEG"]
            kept = exif.get(_ORIENTATION, 1) in (0, 1) and image.mode in _KEPT_FORMATS.get(image.format or "", ())
            camera, size = " ".join(str(value).strip() for value in named if value), image.size
        turned = None if kept else Image.fromarray(decode_image(path).numpy())
    except InputError as error:
        return f"{error.got}; {error.hint}" if error.hint else error.got
    except Exception as error:  # Pillow's decoders fail in as many ways as there are damaged files
        return " ".join(str(error).split())[:120] or type(error).__name__
    name = path.name.encode(errors="surrogateescape").decode(errors="backslashreplace").replace("\\", "_")
    if turned is None:
        try:  # a second name for the same file where the file system allows it
            os.link(path.resolve(), folder / name)
        except OSError:
            shutil.copyfile(path, folder / name)
        return Photo(name, size, camera)
    if not is_jpeg or path.suffix.lower() not in (".jpg", ".jpeg"):
        name += ".jpg" if is_jpeg else ".png"
    exif.pop(_ORIENTATION, None)  # done already; the rest goes along, for the focal length in it
    options = {"quality": 97, "subsampling": 0} if is_jpeg else {"compress_level": 3}
    turned.save(folder / name, "JPEG" if is_jpeg else "PNG", exif=exif, **options)
    return Photo(name, turned.size, camera)
