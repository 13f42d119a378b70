"""Opening the two halves of a scene: what is trained on and what it is scored on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..data.scene import BUILTIN_PREFIX, MissingSplitError, Scene, Split, hold_out, load_scene
from ..errors import InputError

HOLD_OUT_EVERY = 8


def absolute_source(source: str) -> str:
    """A folder's full path, so that a run finds its pictures again from anywhere; names of scenes stay."""
    return source if source.startswith(BUILTIN_PREFIX) or not Path(source).exists() else str(Path(source).resolve())


def open_scenes(
    source: str,
    downscale: int,
    *,
    allow_outside: bool = False,
    bounds: Literal["auto", "bounded", "unbounded"] = "auto",
    ndc: bool = False,
) -> tuple[Scene, Scene]:
    """(training views, test views): the test split, else the val split, else every 8th training view held out."""

    def opened(split: Split) -> Scene:
        return load_scene(source, split, downscale=downscale, allow_outside=allow_outside, bounds=bounds, ndc=ndc)

    train = opened("train")
    for split in ("test", "val"):
        try:
            return train, opened(split)
        except InputError as error:
            if not split_is_missing(error):
                raise
    if len(train) < 2:
        raise InputError(source, "at least 2 views, one of them to score", str(len(train)))
    return hold_out(train, HOLD_OUT_EVERY)


def split_is_missing(error: InputError) -> bool:
    """The folder has no such split, as opposed to one that is broken."""
    if isinstance(error, MissingSplitError):
        return True
    return error.got == "no such file" and Path(error.what).name.startswith("transforms_")
