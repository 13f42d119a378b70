"""Rendered pictures kept on disk. The cache is a convenience: whatever is wrong with it, the pictures are made anew."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..files import replacing

_MAX_BYTES = 1 << 30  # larger sets are rendered each time rather than left on the user's disk


def cache_folder() -> Path:
    """Where nerfturbo keeps what it can make again: NERFTURBO_CACHE, else the platform's place for caches."""
    if chosen := os.environ.get("NERFTURBO_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "nerfturbo"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nerfturbo"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "nerfturbo" / "cache"
    return Path.home() / ".cache" / "nerfturbo"


def cached_pictures(key: str, shape: tuple[int, ...], render: Callable[[], np.ndarray]) -> np.ndarray:
    """uint8 pictures of this shape, from the cache if a good copy is there, else rendered and kept."""
    if int(np.prod(shape)) > _MAX_BYTES:
        return render()
    try:
        path = cache_folder() / "scenes" / f"{key}.npz"
    except RuntimeError:  # no home folder
        return render()
    pictures = _read(path, shape)
    if pictures is None:
        pictures = render()
        _write(path, pictures)
    return pictures


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        with np.load(path, allow_pickle=False) as archive:  # a zip file: reading checks a checksum
            pictures = archive["pictures"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError):
        return None
    return pictures if pictures.shape == shape and pictures.dtype == np.uint8 else None


def _write(path: Path, pictures: np.ndarray) -> None:
    try:
        with replacing(path) as temporary:
            np.savez(temporary, pictures=pictures)
    except OSError as error:
        _warn_once(str(path.parent), error.strerror or str(error))


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    message = (
        f"cannot keep rendered pictures in {folder} ({reason}); set NERFTURBO_CACHE to a folder that can be written"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=2)
