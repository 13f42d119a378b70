"""Frames of a video: even, sharp and upright."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.data.capture import video as video_frames
from nerfturbo.errors import InputError

from ..tiny import write_video
from . import photo_scene

SHARP = (2, 7, 9, 15, 19)  # the others are smeared
N_FRAMES = 20


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("imageio_ffmpeg", reason="nothing to write an MP4 with")
    path = tmp_path_factory.mktemp("video") / "-walk $x.mp4"  # a name that looks like a flag
    eyes = photo_scene.eyes(N_FRAMES)
    frames = (torch.from_numpy(photo_scene.picture(eyes[i], 0 if i in SHARP else 12)) for i in range(N_FRAMES))
    write_video(path, frames, fps=10)
    return path


def test_the_sharpest_frame_of_each_window(video: Path, tmp_path: Path) -> None:
    done: list[float] = []
    sharpness, seconds = video_frames.look_through(video, done.append)
    assert len(sharpness) == N_FRAMES and seconds == pytest.approx(2.0, abs=0.11)
    assert done == sorted(done) and done[-1] == pytest.approx(1.0, abs=0.06)
    assert sorted(np.argsort(sharpness)[-5:]) == list(SHARP)
    chosen = video_frames.choose_frames(sharpness, 4)
    assert chosen == [2, 7 if sharpness[7] > sharpness[9] else 9, chosen[2], chosen[3]]
    assert [index // 5 for index in chosen] == [0, 1, 2, 3]
    names = video_frames.write_frames(video, chosen, tmp_path / "frames")
    assert names == sorted(path.name for path in (tmp_path / "frames").iterdir())
    for index, name in zip(chosen, names, strict=True):
        truth = photo_scene.picture(photo_scene.eyes(N_FRAMES)[index], 0 if index in SHARP else 12).astype(float)
        with Image.open(tmp_path / "frames" / name) as image:
            assert np.abs(np.asarray(image).astype(float) - truth).mean() < 25.0  # this noise compresses badly


def test_facts_are_those_of_the_file(video: Path) -> None:
    facts = video_frames.open_decoder().facts(video)
    assert (facts.frames, facts.size, facts.fps) == (N_FRAMES, (photo_scene.WIDTH, photo_scene.HEIGHT), 10.0)
    assert facts.seconds == pytest.approx(2.0, abs=0.11)


def test_windows_cover_the_video() -> None:
    values = [0.0] * 1000
    chosen = video_frames.choose_frames(values, 90)
    assert len(chosen) == 90 and min(np.diff(chosen)) > 5 and max(np.diff(chosen)) < 20
    assert video_frames.choose_frames(values[:3], 3) == [0, 1, 2]
    with pytest.raises(InputError, match="frames: expected 1 to the 5 the video has, got 6"):
        video_frames.choose_frames(values[:5], 6)


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"not a video" * 100)
    with pytest.raises(InputError, match=r"a\.mp4: expected a video"):
        video_frames.look_through(file, lambda done: None)


def test_without_a_decoder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(video_frames.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install imageio-ffmpeg"):
        video_frames.open_decoder()


def test_phones_that_were_held_upright(tmp_path: Path) -> None:
    """They store the frames lying and a tag beside them: what is written stands."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="nothing to write an MP4 with").get_ffmpeg_exe()
    lying = torch.zeros(96, 160, 3, dtype=torch.uint8)
    lying[:48, :80, 0] = 255  # red, top left
    write_video(tmp_path / "lying.mp4", [lying] * 4, fps=4)
    words = ["-display_rotation", "90", "-i", str(tmp_path / "lying.mp4"), "-c", "copy", str(tmp_path / "tagged.mp4")]
    if subprocess.run([ffmpeg, "-v", "error", *words], capture_output=True).returncode != 0:
        pytest.skip("this ffmpeg is too old to write the tag")
    sharpness, _ = video_frames.look_through(tmp_path / "tagged.mp4", lambda share: None)
    (name,) = video_frames.write_frames(tmp_path / "tagged.mp4", [1], tmp_path / "out")
    with Image.open(tmp_path / "out" / name) as image:
        pixels = np.asarray(image)
    assert len(sharpness) == 4 and pixels.shape[:2] == (160, 96)
    assert video_frames.open_decoder().facts(tmp_path / "tagged.mp4").size == (96, 160)
    assert pixels[120, 24, 0] > 200 and pixels[40, 24, 0] < 50 and pixels[120, 72, 0] < 50  # turned to the left
