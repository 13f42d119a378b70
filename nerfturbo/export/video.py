"""Frames to files: GIF with Pillow, MP4 with imageio-ffmpeg, or a folder of PNG files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.images import save_image
from ..errors import InputError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = (".gif", ".mp4")


def can_write_mp4() -> bool:
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def check_video_path(path: Path) -> None:
    """Refuse a file that could not be written, before any frame is rendered."""
    if path.suffix.lower() not in ("", *FORMATS):
        raise InputError(str(path), "a file ending in .gif or .mp4, or a folder", repr(path.suffix))
    if path.suffix.lower() == ".mp4" and not can_write_mp4():
        raise InputError(str(path), "imageio-ffmpeg for MP4", "none", "pip install imageio-ffmpeg, or write a .gif")
    if path.suffix and path.is_dir():
        raise InputError(str(path), "a file", "a folder of that name")
    if not path.suffix and path.exists() and not path.is_dir():
        raise InputError(str(path), "a folder", "a file of that name")


def write_video(path: Path, frames: Iterable[Tensor], *, fps: int = 24) -> None:
    """Write uint8 frames (height, width, 3) in the format of the path's ending; without one, PNG files into a folder.

    Frames are taken one at a time. A file appears when it is whole; PNG files appear one by one.
    """
    check_video_path(path)
    if fps < 1:
        raise InputError("fps", "at least 1", str(fps))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.suffix:
        path.mkdir(exist_ok=True)
        for index, frame in enumerate(frames):
            save_image(path / f"frame_{index:04d}.png", frame)
        return
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write = _write_gif if path.suffix.lower() == ".gif" else _write_mp4
        write(temporary, frames, fps)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_gif(path: Path, frames: Iterable[Tensor], fps: int) -> None:
    pictures = _quantized(frames)
    first = next(pictures, None)
    if first is None:
        raise InputError("frames", "at least one", "none")
    milliseconds = max(20, round(1000 / fps / 10) * 10)  # GIF counts hundredths; browsers slow down anything under 2
    first.save(path, "GIF", save_all=True, append_images=pictures, duration=milliseconds, loop=0, disposal=1)


def _quantized(frames: Iterable[Tensor]) -> Iterator[Image.Image]:
    from PIL import Image

    for frame in frames:
        picture = Image.fromarray(frame.cpu().numpy())
        yield picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.FLOYDSTEINBERG)


def _write_mp4(path: Path, frames: Iterable[Tensor], fps: int) -> None:
    import imageio_ffmpeg

    writer = None
    try:
        for frame in frames:
            even = _even(frame)
            if writer is None:
                size = (even.shape[1], even.shape[0])
                writer = imageio_ffmpeg.write_frames(
                    str(path), size, fps=fps, quality=8, macro_block_size=2, ffmpeg_log_level="error"
                )
                writer.send(None)
            writer.send(even.cpu().contiguous().numpy().tobytes())
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise InputError("frames", "at least one", "none")


def _even(frame: Tensor) -> Tensor:
    """Repeat the last row or column where the size is odd: the usual encoding halves the colour planes."""
    height, width = frame.shape[:2]
    if height % 2:
        frame = torch.cat([frame, frame[-1:]], dim=0)
    return torch.cat([frame, frame[:, -1:]], dim=1) if width % 2 else frame
