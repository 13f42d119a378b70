"""`transforms.json` of instant-ngp and nerfstudio: one file, intrinsics for all frames or for each, lens distortion.

A file with `aabb_scale` follows instant-ngp: its box is the unit cube after `scale` and `offset`, and the scene reaches
`aabb_scale` times as far. Without it the scene is placed by its cameras, as nerfstudio does. `train_filenames` and its
kin choose the splits; without them every 8th frame, in the order of names, is a test view. `transforms_train.json` and
its kin, as Blender scenes have them, may hold the same lenses: each is then a file like this one, with its own split.
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .cameras import CameraModel
from .documents import find_image, image_path, number, pose, read_frames, read_json, shown
from .images import image_size
from .placement import MAX_LEVELS, Placement, bounded_levels, given_place
from .posed import Lens, View, held_out, posed_scene
from .scene import SPLITS, Scene, Split

FILE = "transforms.json"
NGP_SCALE, NGP_OFFSET = 0.33, 0.5
NGP_NEAR = 0.1  # in the unit cube
_MODELS: dict[str, CameraModel] = {
    "PINHOLE": "pinhole",
    "SIMPLE_PINHOLE": "pinhole",
    "SIMPLE_RADIAL": "opencv",
    "RADIAL": "opencv",
    "OPENCV": "opencv",
    "FULL_OPENCV": "opencv",
    "OPENCV_FISHEYE": "fisheye",
    "EQUIRECTANGULAR": "equirectangular",
}
_COEFFICIENTS: dict[CameraModel, tuple[str, ...]] = {
    "pinhole": (),
    "opencv": ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6"),
    "fisheye": ("k1", "k2", "k3", "k4"),
}
_LENS_NAMES = ("fl_x", "fl_y", "camera_angle_y", "cx", "cy", "camera_model", "is_fisheye", *_COEFFICIENTS["opencv"])

Frame = tuple[dict[str, Any], str]  # with the words that say where it stands


def load_transforms(folder: Path, split: Split = "train", *, downscale: int = 1) -> Scene:
    """One split of a scene with a `transforms.json`."""
    file = folder / FILE
    document = read_json(file, "a transforms file")
    frames, paths, notes = _with_pictures(folder, read_frames(document, file), file)
    listed, left_out = _listed_splits(document, frames, file)
    if listed is None:
        views, split_note = held_out(_views(folder, document, frames, paths, ["train"] * len(frames)))
        return _scene(folder, views, split, downscale, (document, file), (*notes, split_note))
    used = [index for index, name in enumerate(listed) if name is not None]
    splits: list[Split] = [name for name in listed if name is not None]
    views = _views(folder, document, [frames[index] for index in used], [paths[index] for index in used], splits)
    notes += ("splits by the file's own lists", *left_out)
    return _scene(folder, views, split, downscale, (document, file), notes)


def has_lenses(document: dict[str, Any]) -> bool:
    """Whether a split file of a Blender scene says more about its cameras than one field of view."""
    frames = document.get("frames")
    first = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    return any(name in source for source in (document, first) for name in _LENS_NAMES)


def load_split_files(folder: Path, split: Split = "train", *, downscale: int = 1) -> Scene:
    """One split of a scene with a `transforms_SPLIT.json` for each split, whose cameras have lenses of their own.

    All of them decide about the place, so that every split stands in the same one.
    """
    if not (folder / f"transforms_{split}.json").is_file():
        read_json(folder / f"transforms_{split}.json", "a transforms file")  # says what is there instead
    views: list[View] = []
    notes: tuple[str, ...] = ()
    first: tuple[dict[str, Any], Path] | None = None
    for other in SPLITS:
        file = folder / f"transforms_{other}.json"
        if not file.is_file():
            continue
        document = read_json(file, "a transforms file")
        first = first or (document, file)
        try:
            frames, paths, found = _with_pictures(folder, read_frames(document, file), file)
        except InputError:
            if other == split:
                raise
            continue  # a split that was never copied here does not stand in the way of the others
        views += _views(folder, document, frames, paths, [other] * len(frames))
        notes += found
    assert first is not None  # the split asked for is there
    return _scene(folder, views, split, downscale, first, notes)


def _views(
    folder: Path, document: dict[str, Any], frames: list[Frame], paths: list[Path], splits: list[Split]
) -> list[View]:
    poses = [pose(frame.get("transform_matrix"), where).double() for frame, where in frames]
    lenses = [_lens(document, frame, path) for frame, path in zip(frames, paths, strict=True)]
    masks = [_mask(folder, frame) for frame in frames]
    times = [number(frame["time"], f"{where}: time") if "time" in frame else None for frame, where in frames]
    views = [View(*entry) for entry in zip(paths, poses, lenses, splits, masks, times, strict=True)]
    return sorted(views, key=lambda view: view.image.as_posix())


def _scene(
    folder: Path,
    views: list[View],
    split: Split,
    downscale: int,
    source: tuple[dict[str, Any], Path],
    notes: tuple[str, ...],
) -> Scene:
    """The views at the place that the document asks for, or that their cameras give."""
    document, file = source
    back = _before_export(document, file)
    if "aabb_scale" not in document:
        scene = posed_scene(folder, views, split, downscale=downscale, notes=notes)
    else:
        to_original, levels = _ngp_box(document, file)
        levels, asked = bounded_levels(levels)
        box_note = (
            f"aabb_scale {document['aabb_scale']}: instant-ngp's unit cube about the origin, {levels} grid levels"
        )
        notes += (asked,) if asked else ()

        def placing(all_poses: Tensor) -> Placement:
            return given_place(all_poses, to_original, levels=levels, near=NGP_NEAR, notes=(box_note,))

        scene = posed_scene(folder, views, split, downscale=downscale, placing=placing, notes=notes)
    return scene if back is None else _with_way_back(scene, back)


def _with_pictures(folder: Path, listed: list[Frame], file: Path) -> tuple[list[Frame], list[Path], tuple[str, ...]]:
    """The frames whose pictures are there: files often list some that were sorted out later."""
    found = [find_image(folder, frame.get("file_path"), f"{where}: file_path") for frame, where in listed]
    if not any(found):
        frame, where = listed[0]
        raise InputError(f"{where}: file_path", "the path of an image", f"no such file {shown(frame.get('file_path'))}")
    frames = [frame for frame, path in zip(listed, found, strict=True) if path is not None]
    notes = (f"{len(listed)} frames in {file.name}",)
    if len(frames) < len(listed):
        notes += (f"warning: {len(listed) - len(frames)} frames left out, because their pictures are not there",)
    return frames, [path for path in found if path is not None], notes


def _mask(folder: Path, placed_frame: Frame) -> Path | None:
    """The mask a frame names; one that is not there is an error, because what it hides would be trained on."""
    frame, where = placed_frame
    if frame.get("mask_path") is None:
        return None
    return image_path(folder, frame["mask_path"], f"{where}: mask_path")


def _lens(document: dict[str, Any], placed_frame: Frame, path: Path) -> Lens:
    """Of a frame: its own numbers where it has them, else the file's."""
    frame, where = placed_frame

    def value(name: str) -> float | None:
        for source in (frame, document):
            if source.get(name) is not None:
                return number(source[name], f"{where}: {name}")
        return None

    width, height = value("w"), value("h")
    if width is None or height is None:
        width, height = image_size(path, upright=False)
    if not (1 <= width <= 1 << 20 and 1 <= height <= 1 << 20):
        raise InputError(f"{where}: w, h", "a picture of 1 to 2^20 pixels a side", f"{width:g} x {height:g}")
    model = _model(document, placed_frame)
    if model == "equirectangular":
        return Lens.sphere(round(width), round(height)).checked(where)
    fx = value("fl_x") or _focal(value("camera_angle_x"), width, f"{where}: camera_angle_x")
    fy = value("fl_y") or _focal(value("camera_angle_y"), height, f"{where}: camera_angle_y") or fx
    fx = fx or fy
    if fx is None or fy is None:
        raise InputError(where, "fl_x or camera_angle_x, there or for the whole file", "neither")
    cx, cy = value("cx"), value("cy")
    coefficients = [value(name) or 0.0 for name in _COEFFICIENTS[model]]
    return Lens(
        width=round(width),
        height=round(height),
        focal=(fx, fy),
        center=(0.5 * width if cx is None else cx, 0.5 * height if cy is None else cy),
        model=model,
        distortion=tuple(coefficients + [0.0] * (8 - len(coefficients))),
    ).checked(where)


def _focal(angle: float | None, side: float, what: str) -> float | None:
    if angle is None:
        return None
    if not 0.0 < angle < math.pi:
        raise InputError(what, "an angle between 0 and pi radians", str(angle))
    return 0.5 * side / math.tan(0.5 * angle)


def _model(document: dict[str, Any], placed_frame: Frame) -> CameraModel:
    frame, where = placed_frame
    name = frame.get("camera_model", document.get("camera_model"))
    if name is None:
        return "fisheye" if frame.get("is_fisheye", document.get("is_fisheye")) is True else "opencv"
    if not isinstance(name, str) or name.upper() not in _MODELS:
        raise InputError(f"{where}: camera_model", "one of " + ", ".join(_MODELS), shown(name))
    return _MODELS[name.upper()]


def _listed_splits(
    document: dict[str, Any], frames: list[Frame], file: Path
) -> tuple[list[Split | None] | None, tuple[str, ...]]:
    """The split of each frame by `train_filenames` and its kin, and warnings; None where the file has none of them.

    A frame that no list names is trained on only if there is no list of those to train on, as in nerfstudio.
    """
    chosen: dict[str, Split] = {}
    for split in SPLITS:
        names = document.get(f"{split}_filenames")
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"{file}: {split}_filenames", "a list of file paths", shown(names))
        chosen |= {posixpath.normpath(name.replace("\\", "/")): split for name in names}
    if not chosen:
        return None, ()
    keys = [posixpath.normpath(str(frame["file_path"]).replace("\\", "/")) for frame, _ in frames]
    unknown = [name for name in chosen if name not in keys]
    to_train = [name for name, split in chosen.items() if split == "train"] or list(chosen)
    if all(name in unknown for name in to_train):
        expected = "paths of frames, as file_path has them"
        raise InputError(f"{file}: {chosen[to_train[0]]}_filenames", expected, shown(to_train[0]))
    if document.get("train_filenames") is None:
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
    """(4, 4) float64 from the unit cube about the origin to the file's coordinates, and grid levels, by its rules.

    Its unit matters: at the start a field is fog of density 1, and in the file's unit, three times as small, hardly
    any light would reach what the cameras look at.
    """
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
    rows = document.get("applied_transform", torch.eye(4).tolist())
    what = f"{file}: applied_transform"
    good = isinstance(rows, list) and len(rows) in (3, 4) and all(isinstance(r, list) and len(r) == 4 for r in rows)
    if not good:
        raise InputError(what, "a 3x4 or 4x4 matrix", shown(rows))
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3] = torch.tensor([[number(entry, what) for entry in row] for row in rows[:3]], dtype=torch.float64)
    matrix[:3] *= number(document.get("applied_scale", 1.0), f"{file}: applied_scale")
    if not abs(float(torch.linalg.det(matrix))) > 1e-12:
        raise InputError(what, "a transform that can be undone", "one that cannot")
    return torch.linalg.inv(matrix)


def _with_way_back(scene: Scene, back: Tensor) -> Scene:
    to_file = torch.eye(4, dtype=torch.float64) if scene.to_original is None else scene.to_original
    return replace(scene, to_original=back @ to_file)
