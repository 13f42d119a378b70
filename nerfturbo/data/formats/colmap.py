"""COLMAP reconstructions: sparse/0 (or sparse/), binary or text, beside the images.

World-to-camera poses with OpenCV axes become camera-to-world ones with OpenGL axes; pixel coordinates are ours already
(the corner of the image is 0, 0). Counts in files are held against the size of the file before use.
"""

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

from ...errors import InputError
from ..cameras import CameraModel, opencv_to_opengl, world_to_camera
from ..json_checks import find_image, shown
from ..lenses import LENS_MODELS
from ..options import DEFAULTS, LoadOptions
from ..scene import Scene, SceneFormat, Split
from .posed import Lens, View, held_out, posed_scene

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


def read_cloud(file: Path) -> ColmapPoints:
    """The points; `file` is points3D.bin or points3D.txt."""
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


_ENDINGS = (".bin", ".txt")
_FOLDERS = ("sparse/0", "sparse", "colmap/sparse/0", "")
_IMAGE_FOLDERS = ("images", "", "images_2", "images_4", "images_8")

# Of each model: ours, and where fx fy cx cy and the coefficients in our order stand among its parameters (-1: zero).
_LENSES: dict[str, tuple[CameraModel, tuple[int, int, int, int], tuple[int, ...]]] = {
    "SIMPLE_PINHOLE": ("pinhole", (0, 0, 1, 2), ()),
    "PINHOLE": ("pinhole", (0, 1, 2, 3), ()),
    "SIMPLE_RADIAL": ("opencv", (0, 0, 1, 2), (3,)),
    "RADIAL": ("opencv", (0, 0, 1, 2), (3, 4)),
    "OPENCV": ("opencv", (0, 1, 2, 3), (4, 5, 6, 7)),
    "FULL_OPENCV": ("opencv", (0, 1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11)),
    "OPENCV_FISHEYE": ("fisheye", (0, 1, 2, 3), (4, 5, 6, 7)),
    "SIMPLE_RADIAL_FISHEYE": ("fisheye", (0, 0, 1, 2), (3,)),
    "RADIAL_FISHEYE": ("fisheye", (0, 0, 1, 2), (3, 4)),
    "SIMPLE_FISHEYE": ("fisheye", (0, 0, 1, 2), ()),
    "FISHEYE": ("fisheye", (0, 1, 2, 3), ()),
    "FOV": ("fov", (0, 1, 2, 3), (4,)),
    "THIN_PRISM_FISHEYE": ("thin_prism", (0, 1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11)),
    "RAD_TAN_THIN_PRISM_FISHEYE": ("rad_tan_prism", (0, 1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
    "SIMPLE_DIVISION": ("division", (0, 0, 1, 2), (3,)),
    "DIVISION": ("division", (0, 1, 2, 3), (4,)),
    "EUCM": ("eucm", (0, 1, 2, 3), (4, 5)),
}


def find_model(folder: Path) -> Path | None:
    """The folder with a reconstruction's cameras and images, binary or text."""
    places = (folder / name for name in _FOLDERS)
    return next((place for place in places if any(_are_there(place, ending) for ending in _ENDINGS)), None)


def _are_there(place: Path, ending: str) -> bool:
    return all((place / f"{file}{ending}").is_file() for file in ("cameras", "images"))


def model_files(model: Path) -> tuple[Path, Path]:
    """Its cameras and images: binary where both are there, else text."""
    ending = next((ending for ending in _ENDINGS if _are_there(model, ending)), ".txt")
    return model / f"cameras{ending}", model / f"images{ending}"


def points_file(model: Path) -> Path | None:
    return next((file for ending in _ENDINGS if (file := model / f"points3D{ending}").is_file()), None)


def check_whole(folder: Path) -> None:
    """Refuse a reconstruction of which one of the two files is missing: its pictures would pass for mere photos."""
    for name in _FOLDERS:
        for ending in (".bin", ".txt"):
            files = [folder / name / f"{file}{ending}" for file in ("cameras", "images")]
            there = [file for file in files if file.is_file()]
            if len(there) != 1 or (not name and not _is_colmap_file(there[0])):
                continue
            (missing,) = set(files) - set(there)
            hint = "copy it from where the scene was reconstructed, or remove the other to have the photos' poses found"
            raise InputError(str(missing), f"a file beside {there[0].name}, which needs it", "no such file", hint)


def _is_colmap_file(file: Path) -> bool:
    """Among photos themselves a file of such a name may be anyone's list."""
    try:
        return bool(read_cameras(file) if file.stem == "cameras" else read_images(file))
    except InputError:
        return False


def load_colmap(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of a reconstruction; `held_out` chooses the test views, in the order of names."""
    model = find_model(folder)
    if model is None:
        check_whole(folder)
        raise InputError(str(folder), "a COLMAP reconstruction in sparse/0", "none")
    cameras_file, images_file = model_files(model)
    cameras, images = read_cameras(cameras_file), sorted(read_images(images_file), key=lambda image: image.name)
    if not images:
        raise InputError(str(images_file), "at least one registered image", "none", "reconstruct the scene again")
    lenses = {number: lens_of(camera, f"{cameras_file}: camera {number}") for number, camera in cameras.items()}
    place, paths = _find_images(folder, images, images_file, options.allow_outside)
    views = []
    for image, path in zip(images, paths, strict=True):
        where = f"{images_file}: image {image.number}"
        if image.camera not in lenses:
            hint = "the two files do not belong together, or one is damaged"
            raise InputError(where, f"a camera of {cameras_file.name}", f"camera {image.camera}", hint)
        if path is not None:
            views.append(View(path, pose_of(image, where), lenses[image.camera]))
    views, split_note = held_out(views)
    found = points_file(model)
    points = None if found is None else read_cloud(found).positions
    names = ", ".join(sorted({camera.model for camera in cameras.values()}))
    where = f"{model.relative_to(folder)}/*{images_file.suffix}"
    notes = (f"{len(images)} images by {len(cameras)} cameras ({names}) in {where}", split_note)
    if len(views) < len(images):
        missing = len(images) - len(views)
        notes += (f"warning: {missing} images left out, because their pictures are not in {place}",)
    return posed_scene(folder, views, split, options, points=points, notes=notes)


def image_files(folder: Path, images_file: Path) -> dict[str, ColmapImage]:
    """The registered images by the files of their pictures, as `Scene.files` names them."""
    images = read_images(images_file)
    if not images:
        return {}
    _, paths = _find_images(folder, images, images_file, allow_outside=True)  # whoever loaded the scene has decided
    return {str(path): image for path, image in zip(paths, images, strict=True) if path is not None}


def load_points(source: Path) -> ColmapPoints | None:
    """The points of a scene's reconstruction, in its own coordinates; None where it has none."""
    model = find_model(source) if source.is_dir() else None
    file = None if model is None else points_file(model)
    return None if file is None else read_cloud(file)


def lens_of(camera: ColmapCamera, what: str) -> Lens:
    """A COLMAP camera as a lens; a model that is not known here is named."""
    if camera.model == "EQUIRECTANGULAR":  # its two parameters are the size again
        return Lens.sphere(camera.width, camera.height).checked(what)
    if camera.model not in _LENSES:
        hint = "undistort the images with `colmap image_undistorter`"
        raise InputError(what, "a model among " + ", ".join(_LENSES), camera.model, hint)
    model, intrinsics, coefficients = _LENSES[camera.model]
    fx, fy, cx, cy = (camera.parameters[index] for index in intrinsics)
    distortion = [camera.parameters[index] for index in coefficients]
    return Lens(
        width=camera.width,
        height=camera.height,
        focal=(fx, fy),
        center=(cx, cy),
        model=model,
        distortion=tuple(distortion + [0.0] * (LENS_MODELS[model].n_coefficients - len(distortion))),
    ).checked(what)


def pose_of(image: ColmapImage, what: str) -> Tensor:
    """(3, 4) float64, camera to world, OpenGL axes; errors name `what`."""
    quaternion = torch.tensor(image.quaternion, dtype=torch.float64)
    translation = torch.tensor(image.translation, dtype=torch.float64)
    length = float(quaternion.norm())
    if not 0.5 < length < 2.0 or not bool((translation.abs() < 1e12).all()):
        raise InputError(
            what, "a unit quaternion and a finite translation", shown((*image.quaternion, *image.translation))
        )
    w, x, y, z = (quaternion / length).tolist()
    rotation = torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ],
        dtype=torch.float64,
    )
    return opencv_to_opengl(world_to_camera(torch.cat([rotation, translation[:, None]], dim=1)))


def _find_images(
    folder: Path, images: list[ColmapImage], file: Path, allow_outside: bool
) -> tuple[Path, list[Path | None]]:
    """Where the images are, and the file of each: all of them, or more than anywhere else, for some may have been
    sorted out."""
    best, most = folder, [None] * len(images)
    for place in (folder / name for name in _IMAGE_FOLDERS if (folder / name).is_dir()):
        paths = [
            find_image(place, image.name, f"{file}: image {image.number}", allow_outside=allow_outside, shorten=False)
            for image in images
        ]
        if paths.count(None) < most.count(None):
            best, most = place, paths
        if None not in paths:
            break
    if not any(most):
        expected = f"the pictures it names in {folder / 'images'}"
        raise InputError(str(file), expected, f"no such file {shown(images[0].name)}")
    return best, most


FORMAT = SceneFormat(
    name="COLMAP",
    looked_for="sparse/0/cameras.bin or .txt",
    recognise=lambda folder: find_model(folder) is not None,
    load=load_colmap,
)
