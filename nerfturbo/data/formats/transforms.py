"""Transforms files. Blender scenes: transforms_{train,val,test}.json beside folders of RGBA pictures, read and written.

The NeRF paper's scenes stand in [-1.5, 1.5]^3 with cameras about 4 away. Rays are clipped to that box, so `near` is 0
(a viewer may fly inside) and `far` is the farthest corner any of the cameras can see. Photos are placed as others are.

`transforms.json` of instant-ngp and nerfstudio: one file, intrinsics for all frames or for each, lens distortion.

A file with `aabb_scale` follows instant-ngp: its box is the unit cube after `scale` and `offset`, and the scene reaches
`aabb_scale` times as far. Without it the scene is placed by its cameras, as nerfstudio does. `train_filenames` and its
kin choose the splits; without them every 8th frame, in the order of names, is a test view. `transforms_train.json` and
its kin, as Blender scenes have them, may hold the same lenses: each is then a file like this one, with its own split.
"""

from __future__ import annotations

import functools
import json
import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, counted, refuse
from ...files import replacing
from ...types import Aabb
from .. import json_checks as checks
from ..cameras import CameraModel, half_tangent, similarity_scale
from ..capture.photos import PHOTO_ENDINGS
from ..images import OBJECT_BORDER, Backdrop, find_mask, image_size, save_image
from ..json_checks import IMAGE_FOLDERS, find_image, image_path, leads_out, number, read_json, shown
from ..options import DEFAULTS, LoadOptions
from ..placement import MAX_LEVELS, Placement, given_place
from ..scene import SPLITS, Decision, Extent, IncompleteSplitError, MissingSplitError, Scene, SceneFormat, Split
from .colmap import MODELS
from .posed import Lens, View, held_out, posed_scene, read_ply, reading, unposed_note

FILE = "transforms.json"
NGP_SCALE, NGP_OFFSET = 0.33, 0.5
NGP_NEAR = 0.1  # in the unit cube
_NAMES = ("PINHOLE", "SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE")
_NAMES += ("THIN_PRISM_FISHEYE", "EQUIRECTANGULAR")
_MODELS: dict[str, CameraModel] = {name: MODELS[name][0] for name in _NAMES}
COEFFICIENTS: dict[CameraModel, tuple[str, ...]] = {
    "pinhole": (),
    "opencv": ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6"),
    "fisheye": ("k1", "k2", "k3", "k4"),
    "thin_prism": ("k1", "k2", "p1", "p2", "k3", "k4", "sx1", "sy1"),
}
_OTHER_NAMES = {"fx": "fl_x", "fy": "fl_y", "width": "w", "height": "h"}
_MATRICES = ("K", "intrinsics", "intrinsic_matrix", "camera_matrix")
_LENS_NAMES = ("fl_x", "fl_y", "camera_angle_y", "cx", "cy", "camera_model", "is_fisheye", *COEFFICIENTS["opencv"])
_LENS_NAMES += ("fx", "fy", *_MATRICES)
DEPTH_UNIT = 1e-3  # of depth maps, in the file's unit: millimetres in scenes measured in metres


def load_blender(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of a scene with a `transforms_SPLIT.json` for each split; all of them decide about the place. Objects
    stand in Blender's box. Cameras with lenses of their own, and images with a background, are placed as photos are."""
    file = folder / f"transforms_{split}.json"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("transforms*.json"))) or "none"
        raise MissingSplitError(str(file), "a Blender transforms file", "no such file", f"found here: {found}")
    views: list[View] = []
    notes: tuple[str, ...] = ()
    sources: list[_File] = []
    for other in SPLITS:
        if not (folder / f"transforms_{other}.json").is_file():
            continue
        try:
            source = _File(folder, f"transforms_{other}.json", options)
            frames, said = source.frames()
            own = [source.view(frame, other) for frame in frames]
        except InputError:
            if other == split:
                raise
            continue  # a split that was never copied here does not stand in the way of the others
        views += _by_name(own, options) if has_lenses(source.document) else own
        notes, sources = notes + said, [*sources, source]
    if has_lenses(sources[0].document):
        return sources[0].scene(views, split, notes)
    backdrop = Backdrop.of([view.image for view in views], [find_mask(folder, view.image, view.mask) for view in views])
    if options.up != "mean" and not backdrop.transparent and 0.0 <= backdrop.flat < OBJECT_BORDER:
        return sources[0].scene(views, split, notes)
    why, origin = "an object on nothing, in Blender's box of 3 about the origin", torch.eye(4, dtype=torch.float64)
    placing = functools.partial(given_place, to_original=origin, options=options, half=1.5, levels=1, near=0.0, why=why)
    return posed_scene(folder, views, split, options, placing=placing, notes=notes)


def write_blender(scenes: Sequence[Scene], folder: str | Path) -> Path:
    """Write the splits of a scene as a Blender-format folder that other tools read too, and return it. All or nothing:
    it is written beside its place and renamed at the end. An existing folder must be empty."""
    folder = Path(folder).expanduser()
    if not scenes or len({scene.split for scene in scenes}) != len(scenes):
        raise InputError("scenes", "one scene per split", ", ".join(scene.split for scene in scenes) or "none")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(str(folder), "a new or empty folder", "one that holds something", "choose another name")
    angles = [_shared_angle(scene) for scene in scenes]
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            for scene, angle in zip(scenes, angles, strict=True):
                _write_split(scene, angle, temporary)
    except OSError as error:
        raise InputError(str(folder), "a place that can be written", error.strerror or str(error)) from None
    return folder


def _write_split(scene: Scene, angle: float, folder: Path) -> None:
    (folder / scene.split).mkdir()
    names = [f"./{scene.split}/r_{index}" for index in range(len(scene))]
    bottom = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    poses = (torch.cat([pose, bottom]).tolist() for pose in scene.cameras.camera_to_world.cpu())
    frames = [{"file_path": name, "transform_matrix": matrix} for name, matrix in zip(names, poses, strict=True)]
    if scene.cameras.times is not None:
        frames = [frame | {"time": time} for frame, time in zip(frames, scene.cameras.times.tolist(), strict=True)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        files = [folder / f"{name}.png" for name in names]
        list(threads.map(save_image, files, map(scene.images.image_bytes, range(len(scene)))))
    document = {"camera_angle_x": angle, "frames": frames}
    (folder / f"transforms_{scene.split}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _shared_angle(scene: Scene) -> float:
    """The one horizontal field of view the format has room for."""
    cameras = scene.cameras.to("cpu")
    half = 0.5 * cameras.size.double() / cameras.focal.double()  # (n, 2) tangents
    square = torch.allclose(cameras.focal[:, 0], cameras.focal[:, 1], rtol=1e-5)
    centred = torch.allclose(cameras.center, cameras.size.float() * 0.5, atol=1e-3)
    shared = torch.allclose(half[:, 0], half[:1, 0], rtol=1e-5)
    if cameras.model != "pinhole" or not (square and centred and shared):
        expected = "centred pinhole cameras with square pixels and one field of view"
        raise InputError("scenes", expected, "others", "the Blender format cannot say more")
    return 2.0 * math.atan(float(half[0, 0]))


class Capture(NamedTuple):
    """What a file of poses says, in the words of a transforms file. Beyond these, a frame may have `where` it stands, a
    document or frame `from_middle` (cx, cy count from it) and `per_side` (lengths are shares of the larger side)."""

    document: dict[str, Any]
    notes: tuple[str, ...] = ()
    points: Tensor | None = None
    box: str = ""  # what is bounded by the points, in words
    up: str = ""  # why the file's z is up


def pose_format(
    name: str, looked_for: str, find: Callable[[Path], Path | None], read: Callable[[Path], Capture]
) -> SceneFormat:
    """A format of which `find` knows the file or folder of poses, and `read` what it says."""

    def load(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
        if (file := find(folder)) is None:
            raise InputError(str(folder), looked_for, "none")
        with reading(file, name):
            capture = read(file)
        return load_capture(folder, file, capture, split, options)

    return SceneFormat(name, looked_for, lambda folder: find(folder) is not None, load)


def load_capture(folder: Path, file: Path, capture: Capture, split: Split, options: LoadOptions) -> Scene:
    """One split of what a file of poses says."""
    source = _File(folder, file.relative_to(folder).as_posix(), options, capture)
    frames, notes = source.frames()
    notes += unposed_note([frame.image for frame in frames])
    listed, warnings = source.listed_splits(frames)
    if listed is None:
        views, note = held_out(_by_name((source.view(frame) for frame in frames), options))
    else:
        used = zip(frames, listed, strict=True)
        views = _by_name((source.view(frame, name) for frame, name in used if name is not None), options)
        note = "splits by the file's own lists"
    return source.scene(views, split, (*notes, *capture.notes, note, *warnings))


def first_file(*names: str, beside: str = "*") -> Callable[[Path], Path | None]:
    """Finds the first of these files in a folder that holds something of the name `beside`."""
    there = lambda folder: (folder / name for name in names if (folder / name).is_file())  # noqa: E731
    return lambda folder: next(there(folder), None) if next(folder.glob(beside), None) is not None else None


def has_lenses(document: dict[str, Any]) -> bool:
    """Whether a split file of a Blender scene says more about its cameras than one field of view."""
    frames = document.get("frames")
    first = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    return any(name in source for source in (document, first) for name in _LENS_NAMES)


def _by_name(views: Iterable[View], options: LoadOptions) -> list[View]:
    """Runs of version 1 ("mean") took names as text."""
    return sorted(views, key=lambda view: view.image.as_posix() if options.up == "mean" else checks.natural(view.image))


def _key(name: object) -> str:
    return posixpath.normpath(str(name).replace("\\", "/"))


@dataclass(frozen=True)
class _Frame:
    """One frame whose image is there."""

    values: dict[str, Any]
    where: str  # it stands, for errors
    image: Path


class _File:
    """A transforms file."""

    def __init__(self, folder: Path, name: str, options: LoadOptions, capture: Capture | None = None) -> None:
        self.folder, self.file, self.options = folder, folder / name, options
        self.capture = capture or Capture(read_json(self.file))
        self.document = _plain_names(self.capture.document, str(self.file))

    def frames(self) -> tuple[list[_Frame], tuple[str, ...]]:
        """The frames whose images are there: files often list some that were sorted out later."""
        listed, outside = checks.read_frames(self.document, self.file), self.options.allow_outside
        frames, found, lost = [], {}, []
        names = [(values.get("file_path"), f"{where}: file_path") for values, where in listed]
        others = (*IMAGE_FOLDERS, self.file.parent.relative_to(self.folder).as_posix())
        paths: list[Path | None] = []
        for places in ((), others):  # in other folders only where none is where the file says: others were sorted out
            if not any(paths):
                paths = [find_image(self.folder, *one, allow_outside=outside, places=places) for one in names]
        if not any(paths) and not any("/" in _key(name) for name, _ in names):  # labels of images anywhere below
            below = [path for path in self.folder.rglob("*.*") if path.suffix.lower() in PHOTO_ENDINGS]
            counts = Counter(path.stem for path in below)
            alone = {name: path for path in below for name in (path.name, path.stem) if counts[path.stem] == 1}
            paths = [alone.get(str(name)) for name, _ in names]
        for (values, where), (name, what), path in zip(listed, names, paths, strict=True):
            if path is None:
                lost.append((name, what))
            elif _key(found.setdefault(path, name)) != _key(name):
                raise InputError(what, "an image of its own", f"{path.name}, where {shown(found[path])} leads as well")
            else:
                frames.append(_Frame(_plain_names(values, where), where, path))
        refused = [one for one in lost if leads_out(one[0]) and not outside]
        if not frames or (refused and not any(map(leads_out, found.values()))):  # else these are merely missing
            name, what = (refused or lost)[0]
            if not refused:
                raise IncompleteSplitError(what, "the path of an image", f"no such file {shown(name)}")
            raise checks.missing(name, what, outside)
        notes = (f"{counted(len(listed), 'frame')} in {self.file.name}",)
        keys = {path: _key(name) for path, name in found.items()}
        if moved := [path for path, key in keys.items() if "/" in key and path.parent != (self.folder / key).parent]:
            one = moved[0]
            first = f"{shown(found[one])} is {one.name} in {one.parent.name} (--allow-outside: as written)"
            notes += (f"{counted(len(moved), 'image')} found by the end of the path: {first}",)
        if len(frames) < len(listed):
            lost_note = f"skipped {counted(len(listed) - len(frames), 'frame')}: image files missing"
            notes += (f"warning: {self.file.name}: {lost_note}",)
        poses: dict[Path, object] = {}
        given = [(frame.image, frame.values.get("transform_matrix")) for frame in frames]
        if twice := [image.name for image, pose in given if poses.setdefault(image, pose) != pose]:
            notes += (f"warning: {self.file.name}: two poses of {counted(len(twice), 'image')}, as {twice[0]}",)
        if named := [frame for frame in frames if frame.values.get("depth_file_path") is not None]:
            n_depths = sum(self._depth_file(frame) is not None for frame in named)
            warns = "" if n_depths == len(named) else "warning: "
            there = f"{warns}depth maps of {n_depths} of {len(frames)} frames are there"
            notes += (f"{there}: --loss.depth trains on them",)
        return frames, notes

    def view(self, frame: _Frame, split: Split = "train") -> View:
        values, where = frame.values, frame.where
        what = f"{where}: transform_matrix"
        camera = checks.rigid(checks.three_rows(values.get("transform_matrix"), what, "a 4x4 matrix"), what)
        if (mask := values.get("mask_path")) is not None:  # not there is an error: what it hides would be trained on
            mask = image_path(self.folder, mask, f"{where}: mask_path", allow_outside=self.options.allow_outside)
        time = number(values["time"], f"{where}: time") if "time" in values else None
        depth = None
        if (file := self._depth_file(frame)) is not None:
            name, back = "depth_unit_scale_factor", _before_export(self.document, self.file)
            unit = number(self.document.get(name, DEPTH_UNIT), f"{self.file}: {name}")
            depth = (str(file), unit if back is None else unit * similarity_scale(back))
        return View(frame.image, camera, self._lens(frame), split, mask, time, depth)

    def _depth_file(self, frame: _Frame) -> Path | None:
        name, what = frame.values.get("depth_file_path"), f"{frame.where}: depth_file_path"
        return None if name is None else find_image(self.folder, name, what, allow_outside=self.options.allow_outside)

    def scene(self, views: list[View], split: Split, notes: tuple[str, ...]) -> Scene:
        """The views at the place that the file asks for, or that their cameras give."""
        document, back, capture = self.document, _before_export(self.document, self.file), self.capture
        placing: Callable[[Tensor], Placement] | None = None
        auto, told = self.options.bounds == "auto", {}
        opened = replace(self.options, bounds="bounded") if auto and capture.box else self.options
        if capture.up and opened.up == "auto":
            opened, told = replace(opened, up="z"), {"up": capture.up}
        to_original, levels = _ngp_box(document, self.file) if "aabb_scale" in document else (None, 1)
        if auto and levels > 1 and self.options.up != "mean":  # an object on nothing ends, whatever the file says
            masks = [find_mask(self.folder, view.image, view.mask) for view in views]
            to_original = None if Backdrop.of([view.image for view in views], masks).transparent else to_original
        if to_original is not None:
            why = f"aabb_scale {document['aabb_scale']}, instant-ngp's unit cube about the origin"
            options = {"options": opened, "half": 0.5, "levels": levels, "near": NGP_NEAR, "why": why}
            placing = functools.partial(given_place, to_original=to_original, **options)
        points, name, what = capture.points, document.get("ply_file_path"), f"{self.file}: ply_file_path"
        if name is not None and self.options.up != "mean":
            file = find_image(self.folder, name, what, allow_outside=self.options.allow_outside)
            points = None if file is None else read_ply(file)
            notes += (f"warning: no {shown(name)}" if points is None else f"{len(points)} points in {shown(name)}",)
        if points is not None:
            points = points[(points.abs() < 1e12).all(-1)] if len(points) else None
        scene = posed_scene(self.folder, views, split, opened, points=points, placing=placing, notes=notes)
        if auto and capture.box and capture.points is not None and scene.to_original is not None:
            inverse = torch.linalg.inv(scene.to_original)
            half = float((capture.points @ inverse[:3, :3].T + inverse[:3, 3]).abs().max())
            scene = scene.within(Extent(Aabb.cube(half), 0.0, 1.0 + half * 3.0**0.5, 1))
            told["bounds"] = f"{capture.box}; one box of {2.0 * half:.3g}"
        chosen = [note for note in scene.notes if isinstance(note, Decision) and note.what in told]
        said = {str(note): Decision.of(note.what, note.choice, told[note.what], note.flag) for note in chosen}
        scene = replace(scene, notes=tuple(said.get(note, note) for note in scene.notes))
        if back is None:
            return scene
        assert scene.to_original is not None
        return replace(scene, to_original=back @ scene.to_original)

    def _lens(self, frame: _Frame) -> Lens:
        """Of a frame: its own numbers where it has them, else the file's."""
        where = frame.where

        def value(name: str) -> float | None:
            given = (source[name] for source in (frame.values, self.document) if source.get(name) is not None)
            return next((number(one, f"{where}: {name}") for one in given), None)

        def focal(name: str, side: float) -> float | None:
            angle = value(name)
            return None if angle is None else 0.5 * side / half_tangent(angle, f"{where}: {name}")

        width, height = value("w"), value("h")
        if width is None or height is None:
            shrunk = re.fullmatch(r"images_(\d{1,2})", frame.image.parent.name)  # in place of what the file names
            factor = 1 if shrunk is None or shrunk[0] in str(frame.values["file_path"]) else int(shrunk[1])
            width, height = (side * factor for side in image_size(frame.image, upright=False))
        if not (1 <= width <= 1 << 20 and 1 <= height <= 1 << 20):
            raise InputError(f"{where}: w, h", "a picture of 1 to 2^20 pixels a side", f"{width:g} x {height:g}")
        if (model := self._model(frame)) == "equirectangular":
            return Lens.sphere(round(width), round(height)).checked(where)
        fx = value("fl_x") or focal("camera_angle_x", width)
        fy = value("fl_y") or focal("camera_angle_y", height) or fx
        fx = fx or fy
        if fx is None or fy is None:
            raise InputError(where, "fl_x or camera_angle_x, there or for the whole file", "neither")
        cx, cy = value("cx"), value("cy")
        coefficients = [value(name) or 0.0 for name in COEFFICIENTS[model]]
        known = self.document | frame.values
        plain = model == "opencv" and str(known.get("camera_model")).upper() != "FULL_OPENCV"
        if plain and value("k4") and value("k5") is None and value("k6") is None:  # OpenCV's is another
            place, got = where if frame.values.get("k4") is not None else self.file, f"{value('k4'):g}"
            raise InputError(f"{place}: k4", "0: no lens here has it", got, "export undistorted images")
        side, middle = (max(width, height) if known.get("per_side") else 1.0), bool(known.get("from_middle"))
        cx, cy = (None if c is None else c * side + middle * 0.5 * end for c, end in ((cx, width), (cy, height)))
        center = (0.5 * width if cx is None else cx, 0.5 * height if cy is None else cy)
        distortion = tuple(coefficients + [0.0] * (8 - len(coefficients)))
        return Lens(round(width), round(height), (fx * side, fy * side), center, model, distortion).checked(where)

    def _model(self, frame: _Frame) -> CameraModel:
        values = self.document | frame.values
        if (name := values.get("camera_model")) is None:
            return "fisheye" if values.get("is_fisheye") is True else "opencv"
        if not isinstance(name, str) or name.upper() not in _MODELS:
            raise InputError(f"{frame.where}: camera_model", "one of " + ", ".join(_MODELS), shown(name))
        return _MODELS[name.upper()]

    def listed_splits(self, frames: list[_Frame]) -> tuple[list[Split | None] | None, tuple[str, ...]]:
        """The split of each frame by `train_filenames` and its kin, and warnings; None where the file has none of them.
        A frame that no list names is trained on only if there is no list of those to train on, as in nerfstudio."""
        chosen: dict[str, Split] = {}
        for split in SPLITS:
            if (names := self.document.get(f"{split}_filenames", [])) is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise InputError(f"{self.file}: {split}_filenames", "a list of file paths", shown(names))
            chosen |= {_key(name): split for name in names}
        if not chosen:
            return None, ()
        keys = [_key(frame.values["file_path"]) for frame in frames]
        unknown = [name for name in chosen if name not in keys]
        to_train = [name for name, split in chosen.items() if split == "train"] or list(chosen)
        if all(name in unknown for name in to_train):
            expected = "paths of frames, as file_path has them"
            raise InputError(f"{self.file}: {chosen[to_train[0]]}_filenames", expected, shown(to_train[0]))
        if self.document.get("train_filenames") is None:
            rest: dict[str, Split] = dict.fromkeys(keys, "train")
            chosen = rest | chosen
        splits: list[Split | None] = [chosen.get(key) for key in keys]
        notes: tuple[str, ...] = ()
        if unknown:
            notes += (f"warning: {len(unknown)} names in the lists are of no image that is there, as {unknown[0]}",)
        if None in splits:
            notes += (f"warning: skipped {counted(splits.count(None), 'frame')}: no list names them",)
        return splits, notes


def _plain_names(values: dict[str, Any], where: str) -> dict[str, Any]:
    """With instant-ngp's names for what other exporters call fx, fy, width, height, or write as a camera matrix."""
    known = dict(values)
    for other, name in _OTHER_NAMES.items():
        if values.get(other) is not None and known.get(name) is None:
            known[name] = values[other]
    for name in _MATRICES:
        if isinstance(values.get(name), list) and (known.get("fl_x") is None or known.get("cx") is None):
            given = {key: value for key, value in known.items() if value is not None}
            known = checks.calibration(values[name], f"{where}: {name}") | given
    return known


def _ngp_box(document: dict[str, Any], file: Path) -> tuple[Tensor, int]:
    """(4, 4) float64 from the unit cube about the origin to the file's coordinates, and grid levels, by its rules. Its
    unit matters: in the file's, three times as small, the fog of a new field would hide what the cameras look at."""
    reach = number(document["aabb_scale"], f"{file}: aabb_scale")
    refuse(not 1.0 <= reach <= 128.0, f"{file}: aabb_scale", "a power of two from 1 to 128", f"{reach:g}")
    scale = number(document.get("scale", NGP_SCALE), f"{file}: scale")
    refuse(not 1e-6 < scale < 1e6, f"{file}: scale", "a number > 0", f"{scale:g}")
    offset = document.get("offset", [NGP_OFFSET] * 3)
    refuse(not isinstance(offset, list) or len(offset) != 3, f"{file}: offset", "three numbers", shown(offset))
    x, y, z = (number(entry, f"{file}: offset") for entry in offset)
    matrix = torch.eye(4, dtype=torch.float64) / scale
    matrix[:, 3] = torch.tensor([(0.5 - x) / scale, (0.5 - y) / scale, (0.5 - z) / scale, 1.0])
    return matrix, min(MAX_LEVELS, 1 + math.ceil(math.log2(reach)))


def _before_export(document: dict[str, Any], file: Path) -> Tensor | None:
    """(4, 4): from the file's coordinates to those before `applied_transform` and `applied_scale`."""
    if "applied_transform" not in document and "applied_scale" not in document:
        return None
    rows, what = document.get("applied_transform", torch.eye(4).tolist()), f"{file}: applied_transform"
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3] = checks.three_rows(rows, what, "a 3x4 or 4x4 matrix")
    matrix[:3] *= number(document.get("applied_scale", 1.0), f"{file}: applied_scale")
    refuse(not abs(float(torch.linalg.det(matrix))) > 1e-12, what, "a transform that can be undone", "one that cannot")
    return torch.linalg.inv(matrix)


_find_split = first_file(*(f"transforms_{split}.json" for split in SPLITS))
BLENDER = SceneFormat("Blender", "transforms_train.json", lambda folder: _find_split(folder) is not None, load_blender)
FORMAT = pose_format("instant-ngp / nerfstudio", FILE, first_file(FILE), lambda file: Capture(read_json(file)))
