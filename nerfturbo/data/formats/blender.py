"""Blender-format scenes: transforms_{train,val,test}.json beside folders of RGBA pictures, read and written.

The NeRF paper's scenes stand in [-1.5, 1.5]^3 with cameras about 4 away. Its near = 2 and far = 6 were the bounds of
a sampler that knew no box; here rays are clipped to the box, so `near` is 0 (a viewer may fly inside) and `far` is the
farthest corner any of the cameras can see.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...files import replacing
from ...types import Aabb
from ..cameras import Cameras
from ..images import find_mask, load_images, mask_notes, save_image
from ..json_checks import image_path, number, pose, read_frames, read_json
from ..options import DEFAULTS, LoadOptions
from ..placement import bounded_levels
from ..scene import SPLITS, MissingSplitError, Scene, SceneFormat, Split, farthest_distance
from .posed import unit_times
from .transforms import has_lenses, load_split_files

BLENDER_AABB = Aabb.cube(1.5)


def load_blender(
    folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS, *, aabb: Aabb = BLENDER_AABB
) -> Scene:
    """One split of a Blender-format scene. A `time` in every frame becomes the cameras' times.

    A file with focal lengths, a principal point or distortion is read as `transforms.json` is, and placed like it.
    """
    file = folder / f"transforms_{split}.json"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("transforms*.json"))) or "none"
        raise MissingSplitError(str(file), "a Blender transforms file", "no such file", f"found here: {found}")
    document = read_json(file)
    if has_lenses(document):
        return load_split_files(folder, split, options)
    angle = number(document.get("camera_angle_x"), f"{file}: camera_angle_x")
    if not 0.0 < angle < math.pi:
        raise InputError(f"{file}: camera_angle_x", "an angle between 0 and pi radians", str(angle))
    placed = read_frames(document, file)
    poses = torch.stack([pose(frame.get("transform_matrix"), place) for frame, place in placed])
    outside = options.allow_outside
    paths = [
        image_path(folder, frame.get("file_path"), f"{place}: file_path", allow_outside=outside)
        for frame, place in placed
    ]
    masks = [find_mask(folder, path) for path in paths]
    images = load_images(paths, options, masks=masks)
    width = images.sizes[:, :1].float()
    times, moments = _times(placed, folder)
    cameras = Cameras(
        camera_to_world=poses,
        focal=(0.5 * width / math.tan(0.5 * angle)).expand(-1, 2).contiguous(),
        center=images.sizes.float() * 0.5,
        size=images.sizes,
        times=times,
    )
    levels, asked = bounded_levels(1, options.bounds)
    note = asked or f"bounded: Blender scenes stand in a box of {aabb.high[0] - aabb.low[0]:.3g} about the origin"
    return Scene(
        name=folder.resolve().name,
        cameras=cameras,
        images=images,
        aabb=aabb,
        near=0.0,
        far=farthest_distance(cameras.positions, aabb.scaled(2.0 ** (levels - 1))),
        grid_levels=levels,
        split=split,
        source=str(folder),
        notes=(note, *moments, *mask_notes(images, masks)),
        files=tuple(map(str, paths)),
    )


def write_blender(scenes: Sequence[Scene], folder: str | Path) -> Path:
    """Write the splits of a scene as a Blender-format folder that other tools read too, and return it.

    All or nothing: it is written beside its place and renamed at the end. An existing folder must be empty.
    """
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
    frames: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        matrix = torch.cat([scene.cameras.camera_to_world[index].cpu(), bottom]).tolist()
        frame = {"file_path": name, "transform_matrix": matrix}
        frames.append(frame if scene.cameras.times is None else frame | {"time": scene.cameras.times[index].item()})
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


def _times(placed: list[tuple[dict[str, Any], str]], folder: Path) -> tuple[Tensor | None, tuple[str, ...]]:
    """Of one split; the span of time is that of all of them."""
    if not any("time" in frame for frame, _ in placed):
        return None, ()
    times = [number(frame.get("time"), f"{place}: time") for frame, place in placed]
    of_all = list(times)
    for split in SPLITS:
        file = folder / f"transforms_{split}.json"
        with contextlib.suppress(InputError):  # said when that split is opened
            frames = read_frames(read_json(file), file)
            of_all += [number(frame.get("time"), f"{place}: time") for frame, place in frames]
    return unit_times(times, of_all)


FORMAT = SceneFormat(
    name="Blender",
    looked_for="transforms_train.json",
    recognise=lambda folder: any((folder / f"transforms_{split}.json").is_file() for split in SPLITS),
    load=load_blender,
)
