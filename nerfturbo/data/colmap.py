"""COLMAP reconstructions: sparse/0 (or sparse/), binary or text, beside the pictures.

`colmap_files.py` reads the files; here they become views: COLMAP's world-to-camera poses with OpenCV axes turn into
camera-to-world ones with OpenGL axes, its pixel coordinates are ours already (the corner of the picture is 0, 0).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .cameras import CameraModel, n_coefficients
from .colmap_files import (
    ColmapCamera,
    ColmapImage,
    ColmapPoints,
    read_cameras,
    read_cloud,
    read_images,
    read_points,
)
from .conventions import opencv_to_opengl, world_to_camera
from .documents import find_image, shown
from .posed import Lens, View, held_out, posed_scene
from .scene import Scene, Split

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
    for name in _FOLDERS:
        for ending in (".bin", ".txt"):
            if all((folder / name / f"{file}{ending}").is_file() for file in ("cameras", "images")):
                return folder / name
    return None


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


def load_colmap(folder: Path, split: Split = "train", *, downscale: int = 1) -> Scene:
    """One split of a reconstruction; `held_out` chooses the test views, in the order of names."""
    model = find_model(folder)
    if model is None:
        check_whole(folder)
        raise InputError(str(folder), "a COLMAP reconstruction in sparse/0", "none")
    ending = ".bin" if all((model / f"{file}.bin").is_file() for file in ("cameras", "images")) else ".txt"
    cameras = read_cameras(model / f"cameras{ending}")
    images_file = model / f"images{ending}"
    images = sorted(read_images(images_file), key=lambda image: image.name)
    if not images:
        raise InputError(str(images_file), "at least one registered image", "none", "reconstruct the scene again")
    lenses = {
        number: lens_of(camera, f"{model / 'cameras'}{ending}: camera {number}") for number, camera in cameras.items()
    }
    pictures = _picture_folder(folder, images, images_file)
    views = []
    for image in images:
        where = f"{images_file}: image {image.number}"
        if image.camera not in lenses:
            hint = "the two files do not belong together, or one is damaged"
            raise InputError(where, f"a camera of cameras{ending}", f"camera {image.camera}", hint)
        path = find_image(pictures, image.name, where, shorten=False)
        if path is not None:
            views.append(View(path, pose_of(image, where), lenses[image.camera]))
    views, split_note = held_out(views)
    points_file = model / f"points3D{ending}"
    points = read_points(points_file) if points_file.is_file() else None
    names = ", ".join(sorted({camera.model for camera in cameras.values()}))
    notes = (
        f"{len(images)} images by {len(cameras)} cameras ({names}) in {model.relative_to(folder)}/*{ending}",
        split_note,
    )
    if len(views) < len(images):
        missing = len(images) - len(views)
        notes += (f"warning: {missing} images left out, because their pictures are not in {pictures}",)
    return posed_scene(folder, views, split, downscale=downscale, points=points, notes=notes)


def picture_files(folder: Path, images_file: Path) -> dict[str, ColmapImage]:
    """The registered images by the files of their pictures, as `Scene.files` names them."""
    images = read_images(images_file)
    if not images:
        return {}
    images.sort(key=lambda image: image.name)
    pictures = _picture_folder(folder, images, images_file)
    where = f"{images_file}: image"
    found = [(find_image(pictures, image.name, f"{where} {image.number}", shorten=False), image) for image in images]
    return {str(path): image for path, image in found if path is not None}


def load_points(source: Path) -> ColmapPoints | None:
    """The points of a scene's reconstruction, in its own coordinates; None where it has none."""
    model = find_model(source) if source.is_dir() else None
    if model is None:
        return None
    file = next((file for ending in (".bin", ".txt") if (file := model / f"points3D{ending}").is_file()), None)
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
        distortion=tuple(distortion + [0.0] * (n_coefficients(model) - len(distortion))),
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


def _picture_folder(folder: Path, images: list[ColmapImage], file: Path) -> Path:
    """Where the pictures are found: all of them, or more than anywhere else, for some may have been sorted out."""
    counts: dict[str, int] = {}
    for name in _IMAGE_FOLDERS:
        if (folder / name).is_dir():
            found = (find_image(folder / name, image.name, str(file), shorten=False) for image in images)
            counts[name] = sum(path is not None for path in found)
            if counts[name] == len(images):
                return folder / name
    best = max(counts, key=lambda name: counts[name], default="")
    if not counts.get(best):
        expected = f"the pictures it names in {folder / 'images'}"
        raise InputError(str(file), expected, f"no such file {shown(images[0].name)}")
    return folder / best
