"""A folder of numbered PNG files that a broken rendering goes on with.

`frames.json` in the folder says what the frames show: which checkpoint, cameras, background and crop, as one digest.
Frames of the same digest are kept; others are refused. A file appears when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import save_image
from ..errors import InputError
from ..evaluation.channels import Channel
from ..evaluation.run_folder import write_json
from ..files import replacing
from .behind import Behind
from .frames import Look

VERSION = 1
WRITERS = 4  # threads: encoding a PNG takes longer than rendering it on a GPU
_NAME = re.compile(r"(frame|depth|opacity|normal)_\d{4,}\.png")


def frame_name(channel: Channel, index: int) -> str:
    """
    >>> frame_name("color", 7), frame_name("depth", 7)
    ('frame_0007.png', 'depth_0007.png')
    """
    return f"{'frame' if channel == 'color' else channel}_{index:04d}.png"


def digest(checkpoint: str, cameras: Cameras, look: Look) -> str:
    """What decides the pixels of a sequence, in 32 hexadecimal digits."""
    state = hashlib.sha256()
    crop = None if look.crop is None else [look.crop.low, look.crop.high]
    state.update(json.dumps([VERSION, checkpoint, look.background, crop, cameras.model]).encode())
    parts = (cameras.camera_to_world, cameras.focal, cameras.center, cameras.size, cameras.times, cameras.distortion)
    for part in parts:
        state.update(b"-" if part is None else part.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()[:32]


class Sequence:
    """PNG files of one rendering in one folder. Use it as a context: leaving it waits for the last file."""

    def __init__(self, folder: Path, key: str, *, overwrite: bool = False) -> None:
        self.folder, self._key, self._overwrite = folder, key, overwrite
        self.check()
        self._behind = Behind(WRITERS, ahead=4 * WRITERS)

    @property
    def _note(self) -> Path:
        return self.folder / "frames.json"

    def check(self) -> None:
        """Refuse frames of another rendering, before anything is rendered."""
        if self._overwrite or not self.folder.is_dir() or not self._old_frames() or self._saved_key() == self._key:
            return
        hint = "choose another folder, or replace them by --overwrite"
        raise InputError(str(self.folder), "an empty folder, or one with frames of this rendering", "others", hint)

    def _old_frames(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def _saved_key(self) -> str | None:
        try:
            return json.loads(self._note.read_text(encoding="utf-8"))["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __enter__(self) -> Sequence:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved_key() != self._key:
            for path in self._old_frames():
                path.unlink()
            write_json(self._note, {"version": VERSION, "digest": self._key})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._behind.finish()
        finally:
            self._behind.close(drop=False)

    def path(self, channel: Channel, index: int) -> Path:
        return self.folder / frame_name(channel, index)

    def has(self, channels: tuple[Channel, ...], index: int) -> bool:
        """Whether all files of a frame are there."""
        return all(self.path(channel, index).is_file() for channel in channels)

    def load(self, channel: Channel, index: int) -> Tensor:
        from PIL import Image

        with Image.open(self.path(channel, index)) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))

    def save(self, channel: Channel, index: int, frame: Tensor) -> None:
        """Queue a file; waits where the disk is far behind."""
        self._behind.submit(lambda: self._write(self.path(channel, index), frame))

    def _write(self, path: Path, frame: Tensor) -> None:
        with replacing(path) as temporary:
            save_image(temporary, frame)
