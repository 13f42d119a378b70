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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...files import replacing
from ..cameras import CameraModel, half_tangent
from ..images import OBJECT_BORDER, Backdrop, find_mask, image_size, save_image
from ..json_checks import find_image, image_path, number, pose, read_frames, read_json, shown, three_rows
from ..options import DEFAULTS, LoadOptions
from ..placement import MAX_LEVELS, Placement, given_place
from ..scene import SPLITS, IncompleteSplitError, MissingSplitError, Scene, SceneFormat, Split
from .colmap import MODELS
from .posed import Lens, View, held_out, posed_scene, unposed_note

FILE = "transforms.json"
NGP_SCALE, NGP_OFFSET = 0.33, 0.5
NGP_NEAR = 0.1  # in the unit cube
_PLAIN = ("PINHOLE", "SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE")
_MODELS: dict[str, CameraModel] = {name: MODELS[name][0] for name in (*_PLAIN, "EQUIRECTANGULAR")}
COEFFICIENTS: dict[CameraModel, tuple[str, ...]] = {
    "pinhole": (),
    "opencv": ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6"),
    "fisheye": ("k1", "k2", "k3", "k4"),
}
_LENS_NAMES = ("fl_x", "fl_y", "camera_angle_y", "cx", "cy", "camera_model", "is_fisheye", *COEFFICIENTS["opencv"])


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
        views += _by_name(own) if has_lenses(source.document) else own
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
        moments = zip(frames, scene.cameras.times.tolist(), strict=True)
        frames = [frame | {"time": time} for frame, time in moments]
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


def load_transforms(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of a scene with a `transforms.json`."""
    source = _File(folder, FILE, options)
    frames, notes = source.frames()
    notes += unposed_note([frame.image for frame in frames])
    listed, warnings = source.listed_splits(frames)
    if listed is None:
        views, note = held_out(_by_name(source.view(frame) for frame in frames))
        return source.scene(views, split, (*notes, note))
    used = zip(frames, listed, strict=True)
    views = _by_name(source.view(frame, name) for frame, name in used if name is not None)
    return source.scene(views, split, (*notes, "splits by the file's own lists", *warnings))


def has_lenses(document: dict[str, Any]) -> bool:
    """Whether a split file of a Blender scene says more about its cameras than one field of view."""
    frames = document.get("frames")
    first = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    return any(name in source for source in (document, first) for name in _LENS_NAMES)


def _by_name(views: Iterable[View]) -> list[View]:
    return sorted(views, key=lambda view: view.image.as_posix())


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

    def __init__(self, folder: Path, name: str, options: LoadOptions) -> None:
        self.folder, self.file, self.options = folder, folder / name, options
        self.document = read_json(self.file)

    def frames(self) -> tuple[list[_Frame], tuple[str, ...]]:
        """The frames whose images are there: files often list some that were sorted out later."""
        listed, outside = read_frames(self.document, self.file), self.options.allow_outside
        found = [
            find_image(self.folder, values.get("file_path"), f"{where}: file_path", allow_outside=outside)
            for values, where in listed
        ]
        frames = [_Frame(*entry, path) for entry, path in zip(listed, found, strict=True) if path is not None]
        if not frames:
            values, where = listed[0]
            got = f"no such file {shown(values.get('file_path'))}"
            raise IncompleteSplitError(f"{where}: file_path", "the path of an image", got)
        notes = (f"{len(listed)} frames in {self.file.name}",)
        if len(frames) < len(listed):
            missing = len(listed) - len(frames)
            notes += (f"warning: {self.file.name}: {missing} frames left out, because their pictures are not there",)
        return frames, notes

    def view(self, frame: _Frame, split: Split = "train") -> View:
        values, where = frame.values, frame.where
        camera = pose(values.get("transform_matrix"), where).double()
        mask = None
        if values.get("mask_path") is not None:  # one that is not there is an error: what it hides would be trained on
            outside = self.options.allow_outside
            mask = image_path(self.folder, values["mask_path"], f"{where}: mask_path", allow_outside=outside)
        time = number(values["time"], f"{where}: time") if "time" in values else None
        return View(frame.image, camera, self._lens(frame), split, mask, time)

    def scene(self, views: list[View], split: Split, notes: tuple[str, ...]) -> Scene:
        """The views at the place that the file asks for, or that their cameras give."""
        document, back = self.document, _before_export(self.document, self.file)
        placing: Callable[[Tensor], Placement] | None = None
        if "aabb_scale" in document:
            to_original, levels = _ngp_box(document, self.file)
            why = f"aabb_scale {document['aabb_scale']}, instant-ngp's unit cube about the origin"
            options = {"options": self.options, "half": 0.5, "levels": levels, "near": NGP_NEAR, "why": why}
            placing = functools.partial(given_place, to_original=to_original, **options)
        scene = posed_scene(self.folder, views, split, self.options, placing=placing, notes=notes)
        if back is None:
            return scene
        assert scene.to_original is not None
        return replace(scene, to_original=back @ scene.to_original)

    def _lens(self, frame: _Frame) -> Lens:
        """Of a frame: its own numbers where it has them, else the file's."""
        where = frame.where

        def value(name: str) -> float | None:
            for source in (frame.values, self.document):
                if source.get(name) is not None:
                    return number(source[name], f"{where}: {name}")
            return None

        def focal(name: str, side: float) -> float | None:
            angle = value(name)
            return None if angle is None else 0.5 * side / half_tangent(angle, f"{where}: {name}")

        width, height = value("w"), value("h")
        if width is None or height is None:
            width, height = image_size(frame.image, upright=False)
        if not (1 <= width <= 1 << 20 and 1 <= height <= 1 << 20):
            raise InputError(f"{where}: w, h", "a picture of 1 to 2^20 pixels a side", f"{width:g} x {height:g}")
        model = self._model(frame)
        if model == "equirectangular":
            return Lens.sphere(round(width), round(height)).checked(where)
        fx = value("fl_x") or focal("camera_angle_x", width)
        fy = value("fl_y") or focal("camera_angle_y", height) or fx
        fx = fx or fy
        if fx is None or fy is None:
            raise InputError(where, "fl_x or camera_angle_x, there or for the whole file", "neither")
        cx, cy = value("cx"), value("cy")
        coefficients = [value(name) or 0.0 for name in COEFFICIENTS[model]]
        return Lens(
            width=round(width),
            height=round(height),
            focal=(fx, fy),
            center=(0.5 * width if cx is None else cx, 0.5 * height if cy is None else cy),
            model=model,
            distortion=tuple(coefficients + [0.0] * (8 - len(coefficients))),
        ).checked(where)

    def _model(self, frame: _Frame) -> CameraModel:
        values = self.document | frame.values
        name = values.get("camera_model")
        if name is None:
            return "fisheye" if values.get("is_fisheye") is True else "opencv"
        if not isinstance(name, str) or name.upper() not in _MODELS:
            raise InputError(f"{frame.where}: camera_model", "one of " + ", ".join(_MODELS), shown(name))
        return _MODELS[name.upper()]

    def listed_splits(self, frames: list[_Frame]) -> tuple[list[Split | None] | None, tuple[str, ...]]:
        """The split of each frame by `train_filenames` and its kin, and warnings; None where the file has none of them.
        A frame that no list names is trained on only if there is no list of those to train on, as in nerfstudio."""
        chosen: dict[str, Split] = {}
        for split in SPLITS:
            names = self.document.get(f"{split}_filenames", [])
            if names is None:
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
            notes += (f"warning: {len(unknown)} names in the lists are of no picture that is there, as {unknown[0]}",)
        if None in splits:
            notes += (f"warning: {splits.count(None)} frames left out, because no list names them",)
        return splits, notes


def _ngp_box(document: dict[str, Any], file: Path) -> tuple[Tensor, int]:
    """(4, 4) float64 from the unit cube about the origin to the file's coordinates, and grid levels, by its rules. Its
    unit matters: in the file's, three times as small, the fog of a new field would hide what the cameras look at."""
    reach = number(document["aabb_scale"], f"{file}: aabb_scale")
    if not 1.0 <= reach <= 128.0:
        raise InputError(f"{file}: aabb_scale", "a power of two from 1 to 128", f"{reach:g}")
    scale = number(document.get("scale", NGP_SCALE), f"{file}: scale")
    if not 1e-6 < scale < 1e6:
        raise InputError(f"{file}: scale", "a number > 0", f"{scale:g}")
    offset = document.get("offset", [NGP_OFFSET] * 3)
    if not isinstance(offset, list) or len(offset) != 3:
        raise InputError(f"{file}: offset", "three numbers", shown(offset))
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
    matrix[:3] = three_rows(rows, what, "a 3x4 or 4x4 matrix")
    matrix[:3] *= number(document.get("applied_scale", 1.0), f"{file}: applied_scale")
    if not abs(float(torch.linalg.det(matrix))) > 1e-12:
        raise InputError(what, "a transform that can be undone", "one that cannot")
    return torch.linalg.inv(matrix)


def _has_split_file(folder: Path) -> bool:
    return any((folder / f"transforms_{split}.json").is_file() for split in SPLITS)


BLENDER = SceneFormat("Blender", "transforms_train.json", _has_split_file, load_blender)
FORMAT = SceneFormat("instant-ngp / nerfstudio", FILE, lambda folder: (folder / FILE).is_file(), load_transforms)
