"""Photos and videos as scenes: their poses are found once, by `process`, and kept in a folder beside them.

photos/       -> photos/nerfturbo_colmap/
walk.mp4      -> walk_nerfturbo_colmap/
read-only     -> the cache folder (NERFTURBO_CACHE, else the platform's), under colmap/
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import replace
from pathlib import Path

from ...errors import InputError
from ...files import cache_folder
from ..formats.colmap import load_colmap
from ..options import DEFAULTS, LoadOptions
from ..scene import UNPOSED, Scene, SceneFormat, Split
from .photos import find_photos, is_video
from .process import STATE_FILE, is_current

NAME = "nerfturbo_colmap"


class MissingPosesError(InputError):
    """Photos or a video that no one has found the poses of yet."""


def is_unposed(source: Path) -> bool:
    """Whether this is a video file or a folder with photos in it; formats with poses must have been ruled out."""
    return is_video(source) or bool(find_photos(source))


def poses_folder(source: Path) -> Path:
    """Where the scene made of these photos is, or will be."""
    source = source.resolve()
    beside = source / NAME if source.is_dir() else source.with_name(f"{source.stem}_{NAME}")
    if (beside / STATE_FILE).is_file():
        return beside
    key = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
    try:
        cached = cache_folder() / "colmap" / f"{source.stem}-{key}"
    except RuntimeError:  # no home folder
        return beside
    writable = _is_writable(beside if beside.exists() else beside.parent)
    return beside if writable and not (cached / STATE_FILE).is_file() else cached


def _is_writable(folder: Path) -> bool:
    """Not where nobody has the right to write, even for an administrator who could."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def has_poses(source: Path) -> bool:
    """Whether the poses of what the source holds now are known."""
    return is_current(source, poses_folder(source))


def load_unposed(source: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of photos or a video whose poses were found before; `Scene.source` stays the photos themselves."""
    folder = poses_folder(source)
    command = shlex.join(["nerfturbo", "process", str(source), str(folder)])
    if not (folder / "sparse" / "0").is_dir():
        hint = f"`nerfturbo train` finds them, and so does: {command}"
        raise MissingPosesError(str(source), "pictures with poses", "pictures without", hint)
    scene = load_colmap(folder, split, options)
    notes = (f"poses found by COLMAP, kept in {folder}",)
    if not is_current(source, folder):
        notes += (f"warning: the pictures have changed since; renew it with: {command}",)
    name = source.resolve().stem if is_video(source) else source.resolve().name
    return replace(scene, name=name, source=str(source), notes=notes + scene.notes)


FORMAT = SceneFormat(name=UNPOSED, looked_for="JPEG, PNG or WebP files", recognise=is_unposed, load=load_unposed)
