"""Frames of a video, spread evenly and picked for sharpness. It is decoded twice: once small and grey, to see how sharp
each frame is, and once in full for the frames that were chosen."""

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ...errors import InputError, refuse

FRAMES_PER_SECOND = 3.0
FEWEST, MOST = 30, 200  # frames by default: few enough for COLMAP on a CPU, enough for neighbours to overlap
_LOOK_SIZE = 480  # of the longer side, where sharpness is measured
_RATE = r"(\d+(?:\.\d+)?) fps"


@dataclass(frozen=True)
class VideoFacts:
    """What a video's file says of itself; None where it does not."""

    frames: int | None
    size: tuple[int, int] | None  # width and height, upright
    fps: float | None
    seconds: float | None


def frame_count(n_frames: int, seconds: float) -> int:
    """How many frames are taken unless someone says: three a second, from 30 to 200, never more than there are.

    >>> frame_count(706, 23.5), frame_count(90, 3.0), frame_count(20, 0.7), frame_count(18000, 600.0)
    (70, 30, 20, 200)
    """
    return min(n_frames, max(FEWEST, min(MOST, round(FRAMES_PER_SECOND * seconds))))


def choose_frames(sharpness: Sequence[float], count: int) -> list[int]:
    """Indices of the sharpest frame of each of `count` windows of equal length.

    An eighth at both ends of a window is left out, so that no two frames are almost the same.

    >>> choose_frames([1.0, 3.0, 2.0, 5.0, 4.0, 0.0], 3)
    [1, 3, 4]
    """
    n_frames = len(sharpness)
    refuse(not 1 <= count <= n_frames, "--frames", f"1 to the {n_frames} the video has", count)
    edges = [index * n_frames // count for index in range(count + 1)]
    margin = n_frames // count // 8
    windows = [range(low + margin, high - margin) for low, high in itertools.pairwise(edges)]
    return [max(window, key=lambda index: sharpness[index]) for window in windows]


def sharpness_of(grey: np.ndarray) -> float:
    """Variance of the Laplacian of a grey picture (H, W), which blur by motion or focus takes away first."""
    values = grey.astype(np.float32)
    laplacian = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:] - 4.0 * values[1:-1, 1:-1]
    return float(laplacian.var()) if laplacian.size else 0.0


def look_through(video: Path, advance: Callable[[float], None]) -> tuple[list[float], float]:
    """(sharpness of every frame, seconds)."""
    decoder = open_decoder()
    seconds = decoder.duration(video)
    values: list[float] = []
    for grey, done in decoder.grey_frames(video, seconds):
        values.append(sharpness_of(grey))
        advance(done)
    refuse(len(values) < 2, str(video), "a video of at least 2 frames", f"{len(values)} that decode", decoder.complaint)
    return values, seconds


def write_frames(video: Path, indices: Sequence[int], folder: Path) -> list[str]:
    """Write the frames of these indices, upright and in full size, as JPEG files; returns their names."""
    names = [f"frame_{index:06d}.jpg" for index in indices]
    folder.mkdir(parents=True)
    decoder = open_decoder()
    decoder.write(video, indices, [folder / name for name in names])
    missing = [name for name in names if not (folder / name).is_file()]
    refuse(bool(missing), str(video), f"{len(names)} frames", f"{len(names) - len(missing)}", decoder.complaint)
    return names


def open_decoder() -> "FfmpegDecoder":
    """imageio-ffmpeg's program, else the program `ffmpeg`."""
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        import imageio_ffmpeg

        return FfmpegDecoder(imageio_ffmpeg.get_ffmpeg_exe())
    if program := shutil.which("ffmpeg"):
        return FfmpegDecoder(program)
    hint = "pip install imageio-ffmpeg, or install the program ffmpeg"
    raise InputError("video", "imageio-ffmpeg or ffmpeg to decode it", "neither of them", hint)


class FfmpegDecoder:
    """The program ffmpeg, which also turns frames upright by the video's tag; `complaint` is what it said last."""

    def __init__(self, program: str) -> None:
        self.program, self.complaint = program, ""
        version = subprocess.run([program, "-version"], capture_output=True, text=True).stdout
        found = re.search(r"version n?(\d+)", version)
        old = found is not None and int(found.group(1)) < 5
        self._every_frame = ["-vsync", "0"] if old else ["-fps_mode", "passthrough"]

    def _header(self, video: Path) -> str:
        """What ffmpeg says about the file; `file:`, because its name may begin like a flag or a protocol."""
        run = subprocess.run([self.program, "-hide_banner", "-i", f"file:{video}"], capture_output=True)
        return run.stderr.decode("utf-8", errors="replace")

    def _command(self, video: Path, *output: str) -> list[str]:
        return [self.program, "-v", "error", "-nostdin", "-i", f"file:{video}", "-map", "0:v:0", *output]

    def facts(self, video: Path) -> VideoFacts:
        seconds, text = self.duration(video), self._header(video)
        command = self._command(video, "-c", "copy", "-f", "framecrc", "-")  # packets are counted: a frame each
        packets = subprocess.run(command, capture_output=True).stdout.splitlines()
        frames = sum(not line.startswith(b"#") for line in packets)
        rate, size = re.search(_RATE, text), re.search(r"Video:.*?\b(\d{2,5})x(\d{2,5})\b", text)
        turned = re.search(r"rotat(?:ion of|e +:) *(-?\d+)", text)
        shape = None if size is None else (int(size[1]), int(size[2]))
        if shape is not None and turned is not None and int(turned[1]) % 180 == 90:
            shape = (shape[1], shape[0])
        return VideoFacts(frames or None, shape, None if rate is None else float(rate[1]), seconds or None)

    def duration(self, video: Path) -> float:
        text = self._header(video)
        self.complaint = _last_line(text.replace("At least one output file must be specified", ""))
        found = re.search(r"Duration: (\d+):(\d+):(\d+(?:\.\d+)?)", text)
        refuse("Video:" not in text, str(video), "a video", self.complaint or "a file without a picture track")
        if found is None:
            return 0.0
        hours, minutes, rest = found.groups()
        return 3600.0 * int(hours) + 60.0 * int(minutes) + float(rest)

    def grey_frames(self, video: Path, seconds: float) -> Iterator[tuple[np.ndarray, float]]:
        size = f"scale='if(gt(iw,ih),min(iw,{_LOOK_SIZE}),-2)':'if(gt(iw,ih),-2,min(ih,{_LOOK_SIZE}))',format=gray"
        command = self._command(video, "-vf", size, *self._every_frame, "-f", "image2pipe", "-c:v", "pgm", "-")
        found = re.search(_RATE, self._header(video))
        rate = float(found[1]) if found else 30.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                for index, picture in enumerate(_read_pgm(process.stdout)):
                    yield picture, min(1.0, (index + 1) / max(1.0, rate * seconds))
                self.complaint = _last_line(process.stderr.read().decode("utf-8", errors="replace"))
            finally:
                process.kill()

    def write(self, video: Path, indices: Sequence[int], files: Sequence[Path]) -> None:
        """ffmpeg numbers what it writes; the files are renamed to their own names."""
        folder = files[0].parent
        chosen = "+".join(f"eq(n,{index})" for index in indices)
        output = ["-vf", f"select='{chosen}'", *self._every_frame, "-q:v", "1", "-qmin", "1", str(folder / ".%06d.jpg")]
        run = subprocess.run(self._command(video, *output), capture_output=True)
        self.complaint = _last_line(run.stderr.decode("utf-8", errors="replace"))
        for number, file in enumerate(files, 1):
            with contextlib.suppress(FileNotFoundError):  # said by whoever misses the file
                os.replace(folder / f".{number:06d}.jpg", file)


def _read_pgm(stream: IO[bytes]) -> Iterator[np.ndarray]:
    """Grey pictures one after the other: `P5`, width and height, 255, then the bytes."""
    while stream.readline().strip() == b"P5":
        width, height = map(int, stream.readline().split())
        stream.readline()
        if len(content := stream.read(width * height)) < width * height:
            return
        yield np.frombuffer(content, dtype=np.uint8).reshape(height, width)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ascii(lines[-1])[1:-1][:160] if lines else ""
