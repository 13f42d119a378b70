"""LLFF folders: poses_bounds.npy beside images or images_N, as in the forward-facing scenes of the NeRF paper.

Each row holds a 3x5 matrix (down, right and backward axes, position, then height, width and focal length) and the
smallest and largest depth the camera sees, which place the scene.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...errors import InputError, refuse
from ..capture.photos import PHOTO_ENDINGS
from ..json_checks import shown
from ..options import DEFAULTS, LoadOptions
from ..scene import Scene, SceneFormat, Split
from .posed import ONE_FOCAL, reading
from .transforms import Capture, load_capture

FILE = "poses_bounds.npy"


def load_llff(folder: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split; `held_out` chooses the test views, in the order of names. Pictures come from images_N for a downscale
    of N where that is there, else from images, else from the largest images_N, whose own shrinking does not count."""
    file = folder / FILE
    with reading(file, "LLFF"):  # mapped: no more is allocated than the file holds
        rows = torch.from_numpy(np.load(file, mmap_mode="r", allow_pickle=False).astype(np.float64))
    if rows.dim() != 2 or rows.shape[1] != 17 or not bool((rows.abs() < 1e12).all()):
        raise InputError(str(file), "an (n, 17) array of finite numbers", f"{tuple(rows.shape)}, or others")
    pictures, shrink = _picture_folder(folder, options.downscale)
    paths = sorted(path for path in pictures.iterdir() if path.suffix.lower() in PHOTO_ENDINGS)  # as LLFF's rows are
    refuse(len(paths) != rows.shape[0], str(pictures), f"{rows.shape[0]} images, one per row of {FILE}", len(paths))
    if not bool(((rows[:, 15] > 0.0) & (rows[:, 15] < rows[:, 16])).all()):
        raise InputError(f"{file}: bounds", "0 < near < far in every row", "others")
    down, right, backward, position, lens = rows[:, :15].view(-1, 3, 5).unbind(-1)
    poses, names = torch.stack([right, -down, backward, position], -1), ("h", "w", "fl_x")
    frames = [
        {"file_path": path.relative_to(folder).as_posix(), "transform_matrix": pose, "where": f"{file}: row {index}"}
        | dict(zip(names, values, strict=True))
        for index, (path, pose, values) in enumerate(zip(paths, poses.tolist(), lens.tolist(), strict=True))
    ]
    # Corners and middle of every picture at both ends of its depths stand in for points on surfaces.
    places = torch.tensor([[-0.48, -0.48], [-0.48, 0.48], [0.48, -0.48], [0.48, 0.48], [0.0, 0.0]]).double()
    across = places * (lens[:, [1, 0]] / lens[:, 2:])[:, None]  # (n, 5, 2)
    local = torch.cat([across, -torch.ones_like(across[..., :1])], -1)
    ends = [local * rows[:, end, None, None] @ poses[:, :, :3].mT + poses[:, None, :, 3] for end in (15, 16)]
    capture = Capture({"frames": frames}, (f"pictures in {pictures.name}", ONE_FOCAL), torch.cat(ends).reshape(-1, 3))
    return load_capture(folder, file, capture, split, replace(options, downscale=shrink))


def _picture_folder(folder: Path, downscale: int) -> tuple[Path, int]:
    """Where the pictures are, and how much is left to shrink them."""
    if downscale > 1 and (exact := folder / f"images_{downscale}").is_dir():
        return exact, 1
    if plain := [folder / name for name in ("images", "input", "rgb") if (folder / name).is_dir()]:
        return plain[0], downscale
    found = [path for path in folder.glob("images_*") if path.name[7:].isdecimal() and path.is_dir()]
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
    refuse(not found, str(folder), "a folder images or images_N", shown(names))
    return min(found, key=lambda path: int(path.name[7:])), downscale


FORMAT = SceneFormat(name="LLFF", looked_for=FILE, recognise=lambda folder: (folder / FILE).is_file(), load=load_llff)
