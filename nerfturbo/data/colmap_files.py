"""The files of a COLMAP reconstruction, binary and text. Counts are held against the size of the file before use."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .documents import shown

# Number in binary files -> name and how many parameters.
MODELS: dict[int, tuple[str, int]] = {
    0: ("SIMPLE_PINHOLE", 3),
    1: ("PINHOLE", 4),
    2: ("SIMPLE_RADIAL", 4),
    3: ("RADIAL", 5),
    4: ("OPENCV", 8),
    5: ("OPENCV_FISHEYE", 8),
    6: ("FULL_OPENCV", 12),
    7: ("FOV", 5),
    8: ("SIMPLE_RADIAL_FISHEYE", 4),
    9: ("RADIAL_FISHEYE", 5),
    10: ("THIN_PRISM_FISHEYE", 12),
    11: ("RAD_TAN_THIN_PRISM_FISHEYE", 16),
    12: ("SIMPLE_DIVISION", 4),
    13: ("DIVISION", 5),
    14: ("SIMPLE_FISHEYE", 3),
    15: ("FISHEYE", 4),
    16: ("EUCM", 6),
    17: ("EQUIRECTANGULAR", 2),
}
_PARAMETERS = dict(MODELS.values())
_CAMERA, _IMAGE, _POINT = struct.Struct("<iiQQ"), struct.Struct("<i7di"), struct.Struct("<Q3d3Bd")
_COUNT = struct.Struct("<Q")
_FEATURE = np.dtype([("x", "<f8"), ("y", "<f8"), ("point", "<i8")])
_POINT_2D, _TRACK = 24, 8  # bytes
_MAX_NAME = 4096


@dataclass(frozen=True)
class ColmapCamera:
    """Intrinsics as COLMAP writes them."""

    model: str
    width: int
    height: int
    parameters: tuple[float, ...]


@dataclass(frozen=True)
class ColmapImage:
    """One registered picture: world to camera, OpenCV axes."""

    number: int
    name: str
    camera: int
    quaternion: tuple[float, ...]  # w x y z
    translation: tuple[float, ...]


@dataclass(frozen=True)
class ColmapPoints:
    """Points on surfaces: where, their colour, and how far from their pictures' features they fall."""

    positions: Tensor  # (n, 3) float64, finite
    colors: Tensor  # (n, 3) uint8
    errors: Tensor  # (n,) float64, pixels; -1 or less where unknown
    numbers: Tensor  # (n,) int64, COLMAP's own


@dataclass(frozen=True)
class ColmapFeatures:
    """The features of one picture that show points of the reconstruction."""

    image: int  # COLMAP's number
    pixels: Tensor  # (n, 2) float64, x and y
    points: Tensor  # (n,) int64, COLMAP's numbers


def read_cameras(file: Path) -> dict[int, ColmapCamera]:
    """By camera id; `file` is cameras.bin or cameras.txt."""
    return dict(_binary_cameras(_Bytes(file)) if file.suffix == ".bin" else _text_cameras(file))


def read_images(file: Path) -> list[ColmapImage]:
    """The registered images; `file` is images.bin or images.txt."""
    return list(_binary_images(_Bytes(file)) if file.suffix == ".bin" else _text_images(file))


def read_points(file: Path) -> Tensor:
    """(n, 3) float64, finite; `file` is points3D.bin or points3D.txt."""
    return read_cloud(file).positions


def read_cloud(file: Path) -> ColmapPoints:
    """As `read_points`, with what else is known about each point."""
    rows = list(_binary_points(_Bytes(file)) if file.suffix == ".bin" else _text_points(file))
    values = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(-1, 8))
    values = values[(values[:, 1:4].abs() < 1e12).all(-1)]
    colors = values[:, 4:7].clamp(0.0, 255.0).to(torch.uint8)
    return ColmapPoints(values[:, 1:4].contiguous(), colors, values[:, 7], values[:, 0].long())


def read_features(file: Path) -> list[ColmapFeatures]:
    """Where the pictures show the points; `file` is images.bin or images.txt."""
    found = _binary_features(_Bytes(file)) if file.suffix == ".bin" else _text_features(file)
    result = []
    for image, rows in found:
        kept = torch.from_numpy(rows[(rows[:, 2] >= 0.0) & np.isfinite(rows).all(-1)])
        result.append(ColmapFeatures(image, kept[:, :2].contiguous(), kept[:, 2].long()))
    return result


class _Bytes:
    """A binary file read from its beginning; every read is checked against its end."""

    def __init__(self, file: Path) -> None:
        self.file, self.position = file, 0
        try:
            self.content = file.read_bytes()
        except OSError as error:
            raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None

    def take(self, layout: struct.Struct) -> tuple:
        self._need(layout.size)
        values = layout.unpack_from(self.content, self.position)
        self.position += layout.size
        return values

    def skip(self, count: int, size: int, what: str) -> None:
        self._need(count * size, f"{count} {what}")
        self.position += count * size

    def rows(self, count: int, layout: np.dtype, what: str) -> np.ndarray:
        """So many records of one layout."""
        self._need(count * layout.itemsize, f"{count} {what}")
        values = np.frombuffer(self.content, layout, count, self.position)
        self.position += count * layout.itemsize
        return values

    def count(self, smallest: int, what: str) -> int:
        """The number of records that follow, which the rest of the file must be able to hold."""
        (count,) = self.take(_COUNT)
        self._need(count * smallest, f"{count} {what}")
        return count

    def text(self) -> str:
        end = self.content.find(b"\0", self.position, self.position + _MAX_NAME)
        if end < 0:
            raise self.error("the name of an image, ended by a zero byte", "none")
        raw, self.position = self.content[self.position : end], end + 1
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("the name of an image in UTF-8", shown(raw)) from None

    def finish(self) -> None:
        if self.position != len(self.content):
            raise self.error("the end of the file", f"{len(self.content) - self.position} more bytes")

    def error(self, expected: str, got: str) -> InputError:
        return InputError(f"{self.file}: byte {self.position}", expected, got, "the file is damaged")

    def _need(self, size: int, what: str = "") -> None:
        left = len(self.content) - self.position
        if size > left:
            raise self.error(what or f"{size} bytes", f"a file that ends after {left} bytes")


def _binary_cameras(source: _Bytes) -> Iterator[tuple[int, ColmapCamera]]:
    for _ in range(source.count(_CAMERA.size + 16, "cameras")):
        number, model, width, height = source.take(_CAMERA)
        if model not in MODELS:
            raise source.error(f"a camera model from 0 to {max(MODELS)}", str(model))
        name, n_parameters = MODELS[model]
        yield number, ColmapCamera(name, width, height, source.take(struct.Struct(f"<{n_parameters}d")))
    source.finish()


def _binary_images(source: _Bytes) -> Iterator[ColmapImage]:
    for _ in range(source.count(_IMAGE.size + 9, "images")):
        number, *pose, camera = source.take(_IMAGE)
        name = source.text()
        (n_points,) = source.take(_COUNT)
        source.skip(n_points, _POINT_2D, f"points of image {number}")
        yield ColmapImage(number, name, camera, tuple(pose[:4]), tuple(pose[4:]))
    source.finish()


def _binary_features(source: _Bytes) -> Iterator[tuple[int, np.ndarray]]:
    """(image, rows of x, y, point); the point is -1 where a feature belongs to none."""
    for _ in range(source.count(_IMAGE.size + 9, "images")):
        number, *_ = source.take(_IMAGE)
        source.text()
        (n_points,) = source.take(_COUNT)
        rows = source.rows(n_points, _FEATURE, f"points of image {number}")
        yield number, np.stack([rows["x"], rows["y"], rows["point"].astype(np.float64)], axis=-1)
    source.finish()


def _binary_points(source: _Bytes) -> Iterator[Sequence[float]]:
    for _ in range(source.count(_POINT.size + 8, "points")):
        values = source.take(_POINT)
        (n_track,) = source.take(_COUNT)
        source.skip(n_track, _TRACK, "track entries")
        yield values
    source.finish()


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, line) of all that is not a comment."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for index, line in enumerate(lines, 1):
                if not line.startswith("#"):
                    yield f"{file}: line {index}", line.strip()
    except OSError as error:
        raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputError(str(file), "text in UTF-8", str(error), "the file is damaged") from None


def _values(words: list[str], kind: Callable[[str], float], where: str) -> list:
    try:
        return [kind(word) for word in words]
    except (ValueError, OverflowError):
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(where, expected, shown(" ".join(words)), "the file is damaged") from None


def _text_cameras(file: Path) -> Iterator[tuple[int, ColmapCamera]]:
    for where, line in _lines(file):
        words = line.split()
        if not words:
            continue
        if len(words) < 4 or words[1] not in _PARAMETERS:
            expected = "CAMERA_ID MODEL WIDTH HEIGHT PARAMS, with one of COLMAP's models"
            raise InputError(where, expected, shown(line))
        parameters = _values(words[4:], float, where)
        if len(parameters) != _PARAMETERS[words[1]]:
            raise InputError(where, f"{_PARAMETERS[words[1]]} parameters of {words[1]}", str(len(parameters)))
        number, width, height = _values([words[0], *words[2:4]], int, where)
        yield number, ColmapCamera(words[1], width, height, tuple(parameters))


def _text_images(file: Path) -> Iterator[ColmapImage]:
    """Two lines each: the image, then its points, which may be an empty line. One that is cut short is an error: COLMAP
    states the number of images before them, and the last one's points end with it."""
    lines, count, pointed = _lines(file), 0, False
    last, points = "", None
    for where, line in lines:
        if not line:
            continue
        words = line.split(None, 9)
        if len(words) != 10:
            expected = "IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"
            raise InputError(where, expected, shown(line))
        pose = _values(words[1:8], float, where)
        number, camera = _values([words[0], words[8]], int, where)
        last, points = where, next(lines, (where, None))[1]
        count, pointed = count + 1, pointed or bool(points)
        yield ColmapImage(number, words[9], camera, tuple(pose[:4]), tuple(pose[4:]))
    hint = "the file is cut short: copy or export it again"
    stated = _stated_images(file)
    if stated is not None and count < stated:
        hint += "; if you took images out of it yourself, correct that number"
        raise InputError(str(file), f"{stated} images, as its header says", str(count), hint)
    if points is None and pointed:  # a file without any points may have lost the last empty line in an editor
        raise InputError(last, "a line of points after the image, as after the others", "the end of the file", hint)
    if points is not None and len(points.split()) % 3:
        got = f"{len(points.split())} numbers"
        raise InputError(last, "X Y POINT3D_ID of every feature of the image in the next line", got, hint)


def _stated_images(file: Path) -> int | None:
    """How many images the comments at the beginning of images.txt speak of; None where they do not."""
    with file.open(encoding="utf-8-sig") as lines:
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines):
            if found := re.match(r"# *Number of images: *(\d{1,9})\b", line):
                return int(found[1])
    return None


def _text_points(file: Path) -> Iterator[Sequence[float]]:
    for where, line in _lines(file):
        words = line.split(None, 8)
        if not words:
            continue
        if len(words) < 8:
            raise InputError(where, "POINT3D_ID X Y Z R G B ERROR TRACK", shown(line))
        yield _values(words[:8], float, where)


def _text_features(file: Path) -> Iterator[tuple[int, np.ndarray]]:
    lines = _lines(file)
    for where, line in lines:
        if not line:
            continue
        (number,) = _values(line.split(None, 1)[:1], int, where)
        where, line = next(lines, (where, ""))
        values = np.array(_values(line.split(), float, where), np.float64)
        if values.size % 3:
            raise InputError(where, "X Y POINT3D_ID of every feature", f"{values.size} numbers")
        yield number, values.reshape(-1, 3)
