"""Frames to files: each format comes back with its frames, and nothing half-written stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.export import video
from nerfturbo.export.video import can_write_mp4

from ..tiny import write_video


def frames(n: int = 3, height: int = 9, width: int = 7) -> Iterator[Tensor]:
    for index in range(n):
        frame = torch.zeros(height, width, 3, dtype=torch.uint8)
        frame[..., index % 3] = 255
        yield frame


def test_gif(tmp_path: Path) -> None:
    from PIL import Image

    write_video(tmp_path / "new" / "a.gif", frames(), fps=10)
    with Image.open(tmp_path / "new" / "a.gif") as image:
        assert image.n_frames == 3 and image.size == (7, 9) and image.info["duration"] == 100  # type: ignore[attr-defined]
        colors = []
        for index in range(3):
            image.seek(index)
            colors.append(image.convert("RGB").getpixel((3, 3)))
    assert colors == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.mark.skipif(not can_write_mp4(), reason="imageio-ffmpeg is not installed")
def test_mp4_with_odd_sizes(tmp_path: Path) -> None:
    import imageio_ffmpeg

    write_video(tmp_path / "a.mp4", frames(n=5, height=33, width=49), fps=5)
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "a.mp4"))
    meta = next(reader)
    assert meta["size"] == (50, 34) and sum(1 for _ in reader) == 5


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield from frames(2)
        raise RuntimeError("no more")

    for name in ("a.gif", "a.mp4") if can_write_mp4() else ("a.gif",):
        with pytest.raises(RuntimeError, match="no more"):
            write_video(tmp_path / name, broken())
    assert list(tmp_path.iterdir()) == []


def test_bad_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.gif").mkdir()
    for name, says in (("a.avi", "gif or .mp4"), ("file", "a file of that name"), ("folder.gif", "a folder of that")):
        with pytest.raises(InputError, match=says):
            write_video(tmp_path / name, frames())
    monkeypatch.setattr(video, "can_write_mp4", lambda: False)
    with pytest.raises(InputError, match="pip install imageio-ffmpeg"):
        write_video(tmp_path / "a.mp4", frames())
    with pytest.raises(InputError, match="frames: expected at least one"):
        write_video(tmp_path / "a.gif", iter(()))
    with pytest.raises(InputError, match="fps"):
        write_video(tmp_path / "a.gif", frames(), fps=0)


def test_frames_are_encoded_in_order_behind_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    threads: set[int] = set()

    def slow(self: object, frame: Tensor) -> None:
        time.sleep(0.002)
        seen.append(int(frame[0, 0, 0]))
        threads.add(threading.get_ident())
        add(self, frame)

    add = video._Gif.add
    monkeypatch.setattr(video._Gif, "add", slow)
    n = 3 * video.AHEAD
    with video.video_writer(tmp_path / "a.gif") as take:
        for index in range(n):
            take(torch.full((2, 2, 3), index, dtype=torch.uint8))
            assert index - len(seen) <= video.AHEAD
    assert seen == list(range(n)) and len(threads) == 1 and threading.get_ident() not in threads
    assert (tmp_path / "a.gif").is_file()


def test_what_the_encoder_says_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, frame: Tensor) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(video._Gif, "add", full)
    for n in (1, 50):  # told at the end, and in the middle
        with pytest.raises(OSError, match="No space"):
            write_video(tmp_path / "a.gif", frames(n))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not can_write_mp4(), reason="imageio-ffmpeg is not installed")
@pytest.mark.parametrize("has_x264", [True, False])
def test_mp4_keeps_the_pictures_with_any_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_x264: bool
) -> None:
    import imageio_ffmpeg

    if not has_x264:
        monkeypatch.setattr(video, "_has_x264", lambda: False)
    x, y = torch.meshgrid(torch.arange(64), torch.arange(48), indexing="xy")
    soft = torch.stack([2 * x + 40, 3 * y + 40, x + y + 40], dim=-1)
    wanted = [(soft + 5 * index).to(torch.uint8) for index in range(4)]
    write_video(tmp_path / "a.mp4", iter(wanted))
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "a.mp4"))
    next(reader)
    found = [torch.frombuffer(bytearray(frame), dtype=torch.uint8).view(48, 64, 3) for frame in reader]
    assert len(found) == 4
    for frame, truth in zip(found, wanted, strict=True):
        assert float((frame.float() - truth.float()).abs().mean()) < 3.0
