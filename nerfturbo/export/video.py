"""Frames to files: GIF with Pillow, MP4 with imageio-ffmpeg."""

import contextlib
import functools
import importlib.util
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..errors import InputError, refuse
from ..files import replacing

AHEAD = 8  # frames that wait for the encoder at most
PRESET = "veryfast"  # of x264: a third of the default's time, files no larger, 0.2 dB worse at this quality


def can_write_mp4() -> bool:
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def check_video_path(path: Path) -> None:
    """Refuse a file that could not be written, before any frame is rendered."""
    if path.suffix.lower() not in ("", ".gif", ".mp4"):
        raise InputError(str(path), "a file ending in .gif or .mp4, or a folder", repr(path.suffix))
    if path.suffix.lower() == ".mp4" and not can_write_mp4():
        raise InputError(str(path), "imageio-ffmpeg for MP4", "none", "pip install imageio-ffmpeg, or write a .gif")
    refuse(bool(path.suffix and path.is_dir()), str(path), "a file", "a folder of that name")
    refuse(not path.suffix and path.exists() and not path.is_dir(), str(path), "a folder", "a file of that name")


@contextlib.contextmanager
def video_writer(path: Path, *, fps: float = 24) -> Iterator[Callable[[Tensor], None]]:
    """A function that takes the frames of a .gif or .mp4 one by one; the file appears, whole, at the end. Frames are
    encoded in a thread behind the caller, so they must not be written to again."""
    check_video_path(path)
    refuse(not fps > 0.0, "fps", "a number > 0", fps)
    with replacing(path) as temporary:
        video = (_Gif if path.suffix.lower() == ".gif" else _Mp4)(temporary, fps)
        try:
            with WriterPool(1, ahead=AHEAD) as pool:
                yield lambda frame: pool.submit(lambda: video.add(frame))
            refuse(video.n_frames == 0, "frames", "at least one", "none")
            video.finish()
        finally:
            video.close()


class _Gif:
    """Frames are reduced to 256 colours as they come and written at the end."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self.n_frames = path, 0
        # GIF counts hundredths of a second; browsers slow down anything under 2.
        self._milliseconds = max(20, round(1000 / fps / 10) * 10)
        self._frames: list[Image.Image] = []

    def add(self, frame: Tensor) -> None:
        self.n_frames += 1
        self._frames.append(Image.fromarray(frame.cpu().numpy()).quantize(256))

    def finish(self) -> None:
        first, *rest = self._frames
        timing = {"duration": self._milliseconds, "loop": 0, "disposal": 1}
        first.save(self._path, "GIF", save_all=True, append_images=rest, **timing)

    def close(self) -> None:
        self._frames = []


class _Mp4:
    """Frames go to an ffmpeg process as they come."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps, self.n_frames, self._writer = path, fps, 0, None

    def add(self, frame: Tensor) -> None:
        import imageio_ffmpeg

        # The last row or column twice where the size is odd: the usual encoding halves the colour planes.
        rows, columns = (torch.arange(n + n % 2).clamp(max=n - 1) for n in frame.shape[:2])
        even, self.n_frames = frame[rows][:, columns], self.n_frames + 1
        if self._writer is None:
            how: dict[str, Any] = {"fps": self._fps, "quality": 8, "macro_block_size": 2, "ffmpeg_log_level": "error"}
            how |= {"codec": "libx264", "output_params": ["-preset", PRESET]} if _has_x264() else {}
            self._writer = imageio_ffmpeg.write_frames(str(self._path), (even.shape[1], even.shape[0]), **how)
            self._writer.send(None)
        self._writer.send(even.cpu().contiguous().numpy())

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    close = finish  # twice is harmless


@functools.cache
def _has_x264() -> bool:
    """Whether ffmpeg has the usual encoder; without it, imageio-ffmpeg looks for another."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-encoders"]
    return " libx264 " in subprocess.run(command, capture_output=True, text=True, check=False).stdout


class WriterPool:
    """Runs what it is given in `threads` threads, in order where there is one, never more than `ahead` calls behind.

    What a call raises comes out of a later `submit`, or at the end of the context, which waits for all that is queued;
    after an error only for what has begun, where that is to `drop` the rest.

    >>> done = []
    >>> with WriterPool(1, ahead=2) as work:
    ...     for word in ("a", "b", "c"):
    ...         work.submit(lambda word=word: done.append(word))
    >>> done
    ['a', 'b', 'c']
    """

    def __init__(self, threads: int, *, ahead: int, drop: bool = True) -> None:
        self._pool, self._ahead, self._drop = ThreadPoolExecutor(threads, "nerfturbo-behind"), ahead, drop
        self._pending: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a call; waits where too many are queued."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= self._ahead):
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(work))

    def __enter__(self) -> "WriterPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._pending:
                self._pending.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=self._drop)
