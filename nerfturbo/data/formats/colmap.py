"""COLMAP reconstructions: sparse/0 (or one of its other places), binary or text, beside the images.

World-to-camera poses with OpenCV axes become camera-to-world ones with OpenGL axes; pixel coordinates are ours already
(the corner of the image is 0, 0). Counts in files are held against the size of the file before use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.recfunctions import structured_to_unstructured
from torch import Tensor

from ...errors import InputError, counted, refuse
from ..cameras import CameraModel, opencv_to_opengl, rotations, world_to_camera
from ..json_checks import IMAGE_FOLDERS, find_image, leads_out, missing, natural, shown
from ..lenses import LENS_MODELS
from ..options import DEFAULTS, LoadOptions
from ..scene import Decision, Scene, SceneFormat, Split
from .posed import Lens, View, held_out, posed_scene, unposed_note

# In the order of their numbers in binary files. Of each: our model, how many focal lengths stand before the principal
# point, and how many coefficients, in our order, behind it.
MODELS: dict[str, tuple[CameraModel, int, int]] = {
    "SIMPLE_PINHOLE": ("pinhole", 1, 0),
    "PINHOLE": ("pinhole", 2, 0),
    "SIMPLE_RADIAL": ("opencv", 1, 1),
    "RADIAL": ("opencv", 1, 2),
    "OPENCV": ("opencv", 2, 4),
    "OPENCV_FISHEYE": ("fisheye", 2, 4),
    "FULL_OPENCV": ("opencv", 2, 8),
    "FOV": ("fov", 2, 1),
    "SIMPLE_RADIAL_FISHEYE": ("fisheye", 1, 1),
    "RADIAL_FISHEYE": ("fisheye", 1, 2),
    "THIN_PRISM_FISHEYE": ("thin_prism", 2, 8),
    "RAD_TAN_THIN_PRISM_FISHEYE": ("rad_tan_prism", 2, 12),
    "SIMPLE_DIVISION": ("division", 1, 1),
    "DIVISION": ("division", 2, 1),
    "SIMPLE_FISHEYE": ("fisheye", 1, 0),
    "FISHEYE": ("fisheye", 2, 0),
    "EUCM": ("eucm", 2, 2),
    "EQUIRECTANGULAR": ("equirectangular", 0, 0),  # its two parameters are the size again
}
N_PARAMETERS = {name: n_focal + 2 + n_coefficients for name, (_, n_focal, n_coefficients) in MODELS.items()}
_CAMERA, _IMAGE, _POINT = struct.Struct("<iiQQ"), struct.Struct("<i7di"), struct.Struct("<Q3d3Bd")
_COUNT = struct.Struct("<Q")
_FEATURE = np.dtype([("x", "<f8"), ("y", "<f8"), ("point", "<i8")])
_TRACK = np.dtype([("image", "<i4"), ("feature", "<i4")])
_Features = Callable[[], np.ndarray]  # rows of x, y, point; the point is -1 where a feature belongs to none
_MAX_NAME = 4096
_ENDINGS = (".bin", ".txt")
_UNDISTORTED = ("dense/0/sparse", "dense/sparse")  # of COLMAP's workspaces, with images of their own
_FOLDERS = ("sparse/0", "sparse", "colmap/sparse/0", "colmap_sparse/0", "colmap_sparse", *_UNDISTORTED)
_FOLDERS += ("distorted/sparse/0", "colmap/0", "colmap_text", "")
_PARENTS = ("sparse", "colmap/sparse", "colmap_sparse", "distorted/sparse", "colmap")  # of models by numbers
_IMAGE_FOLDERS = (*IMAGE_FOLDERS, "colmap/images")


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


def read_cameras(file: Path) -> dict[int, ColmapCamera]:
    """By camera id; `file` is cameras.bin or cameras.txt."""
    return dict(_binary_cameras(_Bytes(file)) if file.suffix == ".bin" else _text_cameras(file))


def read_images(file: Path) -> list[ColmapImage]:
    """The registered images; `file` is images.bin or images.txt."""
    return [image for image, _ in _images(file)]


def read_cloud(file: Path) -> ColmapPoints:
    """The points; `file` is points3D.bin or points3D.txt."""
    rows = list(_binary_points(_Bytes(file)) if file.suffix == ".bin" else _text_points(file))
    values = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(-1, 8))
    values = values[(values[:, 1:4].abs() < 1e12).all(-1)]
    colors = values[:, 4:7].clamp(0.0, 255.0).to(torch.uint8)
    return ColmapPoints(values[:, 1:4].contiguous(), colors, values[:, 7], values[:, 0].long())


def read_features(file: Path) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each image: its number, the pixels (n, 2) float64 that show points, and the points' numbers (n,) int64."""
    for image, features in _images(file):
        rows = features()
        kept = torch.from_numpy(rows[(rows[:, 2] >= 0.0) & np.isfinite(rows).all(-1)])
        yield image.number, kept[:, :2].contiguous(), kept[:, 2].long()


def _images(file: Path) -> Iterator[tuple[ColmapImage, _Features]]:
    return _binary_images(_Bytes(file)) if file.suffix == ".bin" else _text_images(file)


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

    def rows(self, layout: np.dtype, what: str) -> np.ndarray:
        """A number, and as many records of one layout."""
        count = self.count(layout.itemsize, what)
        values = np.frombuffer(self.content, layout, count, self.position)
        self.position += count * layout.itemsize
        return values

    def count(self, smallest: int, what: str) -> int:
        """The number of records that follow, which the rest of the file must be able to hold."""
        (count,) = self.take(_COUNT)
        self._need(count * smallest, f"{count} {what}")
        return count

    def text(self) -> str:
        if (end := self.content.find(b"\0", self.position, self.position + _MAX_NAME)) < 0:
            raise self.error("the name of an image, ended by a zero byte", "none")
        raw, self.position = self.content[self.position : end], end + 1
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("the name of an image in UTF-8", shown(raw)) from None

    def records(self, smallest: int, what: str) -> Iterator[int]:
        """As many numbers as the file says it has records; behind them it must end."""
        yield from range(self.count(smallest, what))
        if self.position != len(self.content):
            raise self.error("the end of the file", f"{len(self.content) - self.position} more bytes")

    def error(self, expected: str, got: str) -> InputError:
        return InputError(f"{self.file}: byte {self.position}", expected, got, "the file is damaged")

    def _need(self, size: int, what: str = "") -> None:
        if size > (left := len(self.content) - self.position):
            raise self.error(what or f"{size} bytes", f"a file that ends after {left} bytes")


def _binary_cameras(source: _Bytes) -> Iterator[tuple[int, ColmapCamera]]:
    for _ in source.records(_CAMERA.size + 16, "cameras"):
        number, model, width, height = source.take(_CAMERA)
        if not 0 <= model < len(MODELS):
            raise source.error(f"a camera model from 0 to {len(MODELS) - 1}", str(model))
        name = list(MODELS)[model]
        yield number, ColmapCamera(name, width, height, source.take(struct.Struct(f"<{N_PARAMETERS[name]}d")))


def _binary_images(source: _Bytes) -> Iterator[tuple[ColmapImage, _Features]]:
    for _ in source.records(_IMAGE.size + 9, "images"):
        number, *pose, camera = source.take(_IMAGE)
        name = source.text()
        rows = source.rows(_FEATURE, f"points of image {number}")
        features = functools.partial(structured_to_unstructured, rows, np.float64)
        yield ColmapImage(number, name, camera, tuple(pose[:4]), tuple(pose[4:])), features


def _binary_points(source: _Bytes) -> Iterator[Sequence[float]]:
    for _ in source.records(_POINT.size + 8, "points"):
        yield source.take(_POINT)
        source.rows(_TRACK, "track entries")


def text_lines(file: Path, *, empty: bool = False, mark: str = "#") -> Iterator[tuple[str, str]]:
    """(where it stands, line) of all that is not a comment, by its first `mark`; empty ones only if asked for."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for index, line in enumerate(lines, 1):
                if not line.startswith(mark) and (empty or line.strip()):
                    yield f"{file}: line {index}", line.strip()
    except OSError as error:
        raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputError(str(file), "text in UTF-8", str(error), "the file is damaged") from None


def text_values(words: list[str], kind: Callable[[str], float], where: str) -> list:
    try:
        return [kind(word) for word in words]
    except (ValueError, OverflowError):
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(where, expected, shown(" ".join(words)), "the file is damaged") from None


def _text_cameras(file: Path) -> Iterator[tuple[int, ColmapCamera]]:
    for where, line in text_lines(file):
        words = line.split()
        if len(words) < 4 or words[1] not in N_PARAMETERS:
            raise InputError(where, "CAMERA_ID MODEL WIDTH HEIGHT PARAMS, with one of COLMAP's models", shown(line))
        parameters = text_values(words[4:], float, where)
        if len(parameters) != N_PARAMETERS[words[1]]:
            raise InputError(where, f"{N_PARAMETERS[words[1]]} parameters of {words[1]}", str(len(parameters)))
        number, width, height = text_values([words[0], *words[2:4]], int, where)
        yield number, ColmapCamera(words[1], width, height, tuple(parameters))


def _text_images(file: Path) -> Iterator[tuple[ColmapImage, _Features]]:
    """Two lines each: the image, then its points, which may be an empty line. One that is cut short is an error: COLMAP
    states the number of images before them, and the last one's points end with it."""
    lines, count, pointed, last, points = text_lines(file, empty=True), 0, False, "", None
    for where, line in lines:
        if not line:
            continue
        words = line.split(None, 9)
        refuse(len(words) != 10, where, "IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME", shown(line))
        pose = text_values(words[1:8], float, where)
        number, camera = text_values([words[0], words[8]], int, where)
        last, (below, points) = where, next(lines, (where, None))
        count, pointed = count + 1, pointed or bool(points)
        features = functools.partial(_parse_features, points or "", below)
        yield ColmapImage(number, words[9], camera, tuple(pose[:4]), tuple(pose[4:])), features
    hint = "the file is cut short: copy or export it again"
    if (stated := _stated_images(file)) is not None and count < stated:
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
    for where, line in text_lines(file):
        words = line.split(None, 8)
        if len(words) < 8:
            raise InputError(where, "POINT3D_ID X Y Z R G B ERROR TRACK", shown(line))
        yield text_values(words[:8], float, where)


def _parse_features(line: str, where: str) -> np.ndarray:
    values = np.array(text_values(line.split(), float, where), np.float64)
    refuse(values.size % 3 != 0, where, "X Y POINT3D_ID of every feature", f"{values.size} numbers")
    return values.reshape(-1, 3)


def find_model(folder: Path) -> Path | None:
    """The folder with a reconstruction's cameras and images, binary or text; of several, that with the most images."""
    return next(iter(find_models(folder)), None)


def find_models(folder: Path) -> dict[Path, int]:
    """The reconstructions that lie side by side, as sparse/0, sparse/1, ..., or above, with their numbers of images,
    the largest first; where the only images are those that COLMAP undistorted, the model beside them."""
    own = [] if (folder / "images").is_dir() else [place for name in _UNDISTORTED if (place := folder / name).is_dir()]
    places = [place for place in own if place.with_name("images").is_dir()] + [folder / name for name in _FOLDERS]
    places += sorted(place for parent in _PARENTS for place in (folder / parent).glob("[0-9]*"))
    found = [place for place in dict.fromkeys(places) if _is_model(place)]
    top = found[0].parent if found and found[0].name.isdecimal() else next(iter(found), folder)
    beside = [place for place in found if place == top or (place.name.isdecimal() and place.parent == top)]
    counts = dict.fromkeys(beside, 0)
    for place in beside if len(beside) > 1 else ():
        file = model_files(place)[1]
        with contextlib.suppress(InputError):
            counts[place] = _Bytes(file).take(_COUNT)[0] if file.suffix == ".bin" else len(read_images(file))
    return dict(sorted(counts.items(), key=lambda one: -one[1]))


def model_files(model: Path) -> tuple[Path, Path]:
    """Its cameras and images: binary where both are there, else text."""
    pairs = [(model / f"cameras{ending}", model / f"images{ending}") for ending in _ENDINGS]
    return next((pair for pair in pairs if all(file.is_file() for file in pair)), pairs[-1])


def _is_model(place: Path) -> bool:
    return all(file.is_file() for file in model_files(place))


def points_file(model: Path) -> Path | None:
    return next((file for ending in _ENDINGS if (file := model / f"points3D{ending}").is_file()), None)


def check_whole(folder: Path) -> None:
    """Refuse a reconstruction of which one of the two files is missing, or that lies where none is looked for: its
    pictures would pass for mere photos."""
    hint = "copy it from where the scene was reconstructed, or remove the other to have the photos' poses found"
    for name, ending in itertools.product(_FOLDERS, _ENDINGS):
        files = [folder / name / f"{file}{ending}" for file in ("cameras", "images")]
        there = [file for file in files if file.is_file()]
        known: object = name  # among photos themselves a file of such a name may be anyone's list
        with contextlib.suppress(InputError):
            if len(there) == 1 and not name:
                known = read_cameras(there[0]) if there[0].stem == "cameras" else read_images(there[0])
        if len(there) == 1 and known:
            (missing,) = set(files) - set(there)
            raise InputError(str(missing), f"a file beside {there[0].name}, which needs it", "no such file", hint)
    for file in sorted(file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/images.*")):
        made = any((place / "process.json").is_file() for place in file.parents)  # by `nerfturbo process`
        if _is_model(file.parent) and not made:
            hint = "move it there; to find new poses from the images: nerfturbo process FOLDER OUTPUT"
            raise InputError(str(file.parent), f"COLMAP's model in {folder / 'sparse/0'}", "one elsewhere", hint)


def load_colmap(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of a reconstruction; `held_out` chooses the test views, in the order of names."""
    if not (models := find_models(folder)):
        check_whole(folder)
        raise InputError(str(folder), "a COLMAP reconstruction in sparse/0", "none")
    as_before = options.up == "mean"  # how runs of version 1 were opened
    model = next(place for place in ([folder / name for name in _FOLDERS] if as_before else models) if place in models)
    cameras_file, images_file = model_files(model)
    cameras = read_cameras(cameras_file)
    images = sorted(read_images(images_file), key=lambda image: image.name if as_before else natural(image.name))
    refuse(not images, str(images_file), "at least one registered image", "none", "reconstruct the scene again")
    lenses = {number: lens_of(camera, f"{cameras_file}: camera {number}") for number, camera in cameras.items()}
    place, paths = _find_images(folder, images, images_file, options.allow_outside)
    views = []
    for image, path in zip(images, paths, strict=True):
        where = f"{images_file}: image {image.number}"
        hint = "the two files do not belong together, or one is damaged"
        refuse(image.camera not in lenses, where, f"a camera of {cameras_file.name}", f"camera {image.camera}", hint)
        if path is not None:
            views.append(View(path, pose_of(image, where), lenses[image.camera]))
    views, split_note = held_out(views)
    found = points_file(model)
    points = None if found is None else read_cloud(found).positions
    names = ", ".join(sorted({camera.model for camera in cameras.values()}))
    where = f"{model.relative_to(folder)}/*{images_file.suffix}"
    notes = (f"{counted(len(images), 'image')} by {counted(len(cameras), 'camera')} ({names}) in {where}", split_note)
    if len(models) > 1:
        rest = ", ".join(f"{place.relative_to(folder)} ({count})" for place, count in list(models.items())[1:])
        why = f"{len(images)} images, the most; left out: {rest}"
        notes += (Decision.of("model", str(model.relative_to(folder)), why, "removing its folder"),)
    notes += unposed_note([path for path in paths if path is not None])
    if len(views) < len(images):
        notes += (f"warning: skipped {counted(len(images) - len(views), 'image')}: files missing in {place}",)
    return posed_scene(folder, views, split, options, points=points, notes=notes)


def image_files(folder: Path, images_file: Path) -> dict[str, ColmapImage]:
    """The registered images by the files of their pictures, as `Scene.files` names them."""
    if not (images := read_images(images_file)):
        return {}
    _, paths = _find_images(folder, images, images_file, outside=True)  # whoever loaded the scene has decided
    return {str(path): image for path, image in zip(paths, images, strict=True) if path is not None}


def load_points(source: Path) -> ColmapPoints | None:
    """The points of a scene's reconstruction, in its own coordinates; None where it has none."""
    model = find_model(source) if source.is_dir() else None
    file = None if model is None else points_file(model)
    return None if file is None else read_cloud(file)


def lens_of(camera: ColmapCamera, what: str) -> Lens:
    """A COLMAP camera as a lens."""
    if camera.model == "EQUIRECTANGULAR":
        return Lens.sphere(camera.width, camera.height).checked(what)
    model, n_focal, _ = MODELS[camera.model]
    (fx, fy), values = (camera.parameters[0], camera.parameters[n_focal - 1]), camera.parameters[n_focal:]
    distortion = (*values[2:], *[0.0] * (LENS_MODELS[model].n_coefficients - len(values) + 2))
    return Lens(camera.width, camera.height, (fx, fy), (values[0], values[1]), model, distortion).checked(what)


def pose_of(image: ColmapImage, what: str) -> Tensor:
    """(3, 4) float64, camera to world, OpenGL axes; errors name `what`."""
    quaternion = torch.tensor(image.quaternion, dtype=torch.float64)
    translation = torch.tensor(image.translation, dtype=torch.float64)
    length = float(quaternion.norm())
    if not 0.5 < length < 2.0 or not bool((translation.abs() < 1e12).all()):
        got = shown((*image.quaternion, *image.translation))
        raise InputError(what, "a unit quaternion and a finite translation", got)
    return opencv_to_opengl(world_to_camera(torch.cat([rotations(quaternion / length), translation[:, None]], dim=1)))


def _find_images(folder: Path, images: list[ColmapImage], file: Path, outside: bool) -> tuple[Path, list[Path | None]]:
    """Where the images are, and the file of each: all of them, or more than anywhere else. Undistorted ones are those
    of the model beside them alone, and 3D Gaussian Splatting's input/ those of its distorted/."""
    best: Path = folder
    most: list[Path | None] = [None] * len(images)
    model, own = file.parent.relative_to(folder).as_posix(), {name: f"{name[:-6]}images" for name in _UNDISTORTED}
    first = own.get(model, "input" if model.startswith("distorted") else "images")
    others = (place for name, place in own.items() if not _is_model(folder / name))
    names = [(image.name, f"{file}: image {image.number}") for image in images]
    for place in (folder / name for name in (first, *_IMAGE_FOLDERS, *others) if (folder / name).is_dir()):
        paths = [find_image(place, *name, allow_outside=outside, places=None) for name in names]
        if paths.count(None) < most.count(None):
            best, most = place, paths
        if None not in paths:
            break
    if not any(most):
        if leads_out(images[0].name) and not outside:
            raise missing(images[0].name, f"{file}: image {images[0].number}", outside)
        got = f"no such file {shown(images[0].name)}"
        raise InputError(str(file), f"the images it names in {folder / 'images'}", got)
    return best, most


FORMAT = SceneFormat("COLMAP", "sparse/0/cameras.bin or .txt", lambda folder: bool(find_models(folder)), load_colmap)
