"""LLFF folders: poses_bounds.npy beside images or images_N, as in the forward-facing scenes of the NeRF paper.

Each row holds a 3x5 matrix (down, right and backward axes, position, then height, width and focal length) and the
smallest and largest depth the camera sees, which place the scene.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ..capture.photos import PHOTO_ENDINGS
from ..json_checks import rigid, shown
from ..options import DEFAULTS, LoadOptions
from ..scene import Scene, SceneFormat, Split
from .posed import Lens, View, cameras_of, held_out, posed_scene

FILE = "poses_bounds.npy"
_MAX_VIEWS = 100_000


def load_llff(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split; `held_out` chooses the test views, in the order of names. Pictures come from images_N for a downscale
    of N where that is there, else from images, else from the largest images_N, whose own shrinking does not count."""
    file = folder / FILE
    rows = _read_rows(file)
    pictures, shrink = _picture_folder(folder, options.downscale)
    paths = sorted(path for path in pictures.iterdir() if path.suffix.lower() in PHOTO_ENDINGS)
    if len(paths) != rows.shape[0]:
        raise InputError(str(pictures), f"{rows.shape[0]} pictures, one per row of {FILE}", str(len(paths)))
    placed = enumerate(zip(rows, paths, strict=True))
    views, split_note = held_out([View(path, *_camera(row, f"{file}: row {index}")) for index, (row, path) in placed])
    depths = rows[:, 15:]
    if not bool(((depths[:, 0] > 0.0) & (depths[:, 0] < depths[:, 1])).all()):
        raise InputError(f"{file}: bounds", "0 < near < far in every row", "others")
    notes = (f"{len(views)} rows in {FILE}, pictures in {pictures.name}", split_note)
    points = _seen_points(views, depths, folder)
    return posed_scene(folder, views, split, replace(options, downscale=shrink), points=points, notes=notes)


def _read_rows(file: Path) -> Tensor:
    """(n, 17) float64. The header is read first, so that no more is allocated than the file holds."""
    try:
        with file.open("rb") as source:
            if np.lib.format.read_magic(source) != (1, 0):  # later versions hold headers of more than 64 kB
                raise ValueError("a version of the format that no small array needs")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(source, max_header_size=10_000)
            raw = source.read()
    except OSError as error:
        raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None
    except Exception as error:  # numpy's parser of headers fails in as many ways as there are damaged headers
        raise InputError(str(file), "a numpy array", str(error)[:120], "the file is damaged") from None
    if len(shape) != 2 or shape[1] != 17 or not 1 <= shape[0] <= _MAX_VIEWS or dtype.kind != "f":
        raise InputError(str(file), "an (n, 17) array of floats", f"{shape} of {dtype}")
    n_bytes = shape[0] * 17 * dtype.itemsize
    if len(raw) != n_bytes:
        raise InputError(str(file), f"{n_bytes} bytes of numbers", f"{len(raw)}", "the file is damaged")
    values = np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    rows = torch.from_numpy(values.astype(np.float64))
    good = (rows.abs() < 1e12).all(-1)
    if not bool(good.all()):
        raise InputError(f"{file}: row {int((~good).nonzero()[0])}", "finite numbers", "NaN, infinity or huge ones")
    return rows


def _camera(row: Tensor, where: str) -> tuple[Tensor, Lens]:
    matrix = row[:15].view(3, 5)
    down, right, backward, position = matrix[:, :4].unbind(1)
    pose = rigid(torch.stack([right, -down, backward, position], dim=1), where)
    height, width, focal = matrix[:, 4].tolist()
    lens = Lens(round(width), round(height), (focal, focal), (0.5 * width, 0.5 * height))
    return pose, lens.checked(where)


def _picture_folder(folder: Path, downscale: int) -> tuple[Path, int]:
    """Where the pictures are, and how much is left to shrink them."""
    exact = folder / f"images_{downscale}"
    if downscale > 1 and exact.is_dir():
        return exact, 1
    if (folder / "images").is_dir():
        return folder / "images", downscale
    found = [path for path in folder.glob("images_*") if path.name[7:].isdecimal() and path.is_dir()]
    if not found:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
        raise InputError(str(folder), "a folder images or images_N", shown(names))
    return min(found, key=lambda path: int(path.name[7:])), downscale


def _seen_points(views: list[View], depths: Tensor, folder: Path) -> Tensor:
    """Corners and middle of every picture at both ends of its depths: what stands in for points on surfaces."""
    cameras, index = cameras_of(views, folder), torch.arange(len(views)).repeat_interleave(5)
    rays = cameras.rays_through([(0.02, 0.02), (0.02, 0.98), (0.98, 0.02), (0.98, 0.98), (0.5, 0.5)])
    cosines = (rays.directions * cameras.forward[index]).sum(-1)
    ends = [rays.origins + rays.directions * (depths[index, end].float() / cosines)[:, None] for end in (0, 1)]
    return torch.cat(ends).double()


FORMAT = SceneFormat(name="LLFF", looked_for=FILE, recognise=lambda folder: (folder / FILE).is_file(), load=load_llff)
