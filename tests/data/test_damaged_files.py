"""Truncated and bit-flipped files: a scene or an error that names the file, never a crash or a huge allocation."""

from __future__ import annotations

import re
import struct
import subprocess
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from nerfturbo.data.capture.process import MissingPosesError
from nerfturbo.data.formats.colmap import load_colmap, read_cloud, read_images
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from . import folders, fuzz

MUTATIONS = 40  # of each file; `python tests/data/fuzz.py` tries thousands
TRACED = 4  # of so many, one tells its memory: to count every object takes longer than to open a scene
MOST_BYTES = 64 << 20


@contextmanager
def traced_peak() -> Iterator[list[int]]:
    """The most bytes that Python and numpy held inside, once it is over."""
    peak = [0]
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", fuzz.FILES)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    write, relative = fuzz.FILES[name]
    folder = write(tmp_path / "scene")
    content, wrong, refused = (folder / relative).read_bytes(), {}, []
    for number in range(MUTATIONS):
        with traced_peak() if number % TRACED == 0 else nullcontext([0]) as peak:
            wrong[number] = fuzz.open_case(name, number, folder, content, refused)
        wrong[number] = wrong[number] or (f"{peak[0] >> 20} MiB" if peak[0] > MOST_BYTES else None)
    assert not any(wrong.values()), {number: text for number, text in wrong.items() if text}
    assert len(refused) >= 10  # mutations do damage


def test_the_command_notices_what_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz.main(["--mutations", "2", "--only", "cameras.bin"]) == 0
    assert "cameras.bin: 2 mutations, 0 failures" in capsys.readouterr().out
    said = iter(["", "Killed"])
    outcomes = iter([('["cameras.bin", 0]\n["cameras.bin", 1]\n', -9), ("", 0)])

    def crash(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
        out, code = next(outcomes)
        return subprocess.CompletedProcess([], code, out, next(said))

    monkeypatch.setattr(fuzz.subprocess, "run", crash)
    assert fuzz.main(["--mutations", "4", "--only", "cameras.bin"]) == 1
    assert "cameras.bin 1: the process ended with -9" in capsys.readouterr().out


def test_a_count_beyond_the_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for name, read in (("images.bin", read_images), ("points3D.bin", read_cloud)):
        file = tmp_path / name
        file.write_bytes(struct.pack("<Q", 1 << 60) + b"\0" * 100)
        with pytest.raises(InputError, match=rf"{name}: byte 8: expected {1 << 60}"):
            read(file)


@pytest.mark.parametrize("place", ["sparse/0", "sparse", ""])
@pytest.mark.parametrize(("missing", "left"), [("images", "cameras"), ("cameras", "images")])
@pytest.mark.parametrize("text", [False, True])
def test_half_of_a_reconstruction_does_not_pass_for_photos(
    tmp_path: Path, place: str, missing: str, left: str, text: bool
) -> None:
    folder, ending = folders.write_colmap(tmp_path / "scene", text=text), ".txt" if text else ".bin"
    for file in list((folder / "sparse" / "0").iterdir()):
        file.rename(folder / place / file.name)
    assert len(load_scene(folder)) == 14
    (folder / place / f"{missing}{ending}").unlink()
    expected = f"{folder / place / missing}{ending}: expected a file beside {left}{ending}"
    with pytest.raises(InputError, match=re.escape(expected) + ".* got no such file"):
        load_scene(folder)
    with pytest.raises(InputError, match=re.escape(expected)):
        load_colmap(folder)
    (folder / place / f"{left}{ending}").unlink()
    with pytest.raises(MissingPosesError):  # photos, and nothing else
        load_scene(folder)


def test_a_list_of_anyones_among_photos_is_no_half_of_a_reconstruction(tmp_path: Path) -> None:
    folders.write_pictures(tmp_path)
    (tmp_path / "images.txt").write_text("view_00.png\nview_01.png\n")
    with pytest.raises(MissingPosesError):
        load_scene(tmp_path)
    folder = folders.write_llff(tmp_path / "llff")  # and files that say enough by themselves need none of it
    (folder / "cameras.bin").write_bytes((folders.write_colmap(tmp_path / "c") / "sparse/0/cameras.bin").read_bytes())
    assert len(load_scene(folder)) == 14


def test_images_that_are_cut_short(tmp_path: Path) -> None:
    """images.txt as COLMAP writes it, cut at any byte: an error, unless every image and its points are whole."""
    folder = folders.write_colmap(tmp_path / "scene", text=True)
    file = folder / "sparse" / "0" / "images.txt"
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    assert len(read_images(file)) == folders.N_VIEWS == 16 and lines[-1] == b"\n"
    whole = len(content) - 2  # without the empty line of points of the last image
    for length in [*range(len(lines[0]), whole, 41), *range(whole - 120, whole)]:
        file.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"images\.txt.*(cut short|CAMERA_ID NAME|damaged)"):
            read_images(file)
    file.write_bytes(b"".join(lines[:21]))  # between two images
    with pytest.raises(
        InputError, match=r"images\.txt: expected 16 images, as its header says, got 10; the file is cut"
    ):
        load_scene(folder)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2].rstrip() + b"\n")
    with pytest.raises(InputError, match=r"line 32: expected a line of points .* got the end of the file; .*cut short"):
        load_scene(folder)
    file.write_bytes(b"".join(lines[:-1]) + b"1.0 2.0 -1 7.0")
    with pytest.raises(InputError, match=r"line 32: expected X Y POINT3D_ID .* got 4 numbers; the file is cut short"):
        load_scene(folder)


def test_images_that_are_whole_in_other_ways(tmp_path: Path) -> None:
    folder = folders.write_colmap(tmp_path / "scene", text=True)
    file = folder / "sparse" / "0" / "images.txt"
    lines = file.read_text().splitlines()
    poses_alone = [part for line in lines[1::2] for part in (line, "")]
    for text in (
        "\n".join(poses_alone),  # poses that someone knows, without features or a header
        "\n".join(poses_alone).rstrip(),  # saved by an editor that takes empty lines off the end
        "\n".join(["# Number of images: 3, from an older file", *lines[1:]]) + "\n",  # images were added
        "\n".join(["# Number of images: many", *lines[1:]]) + "\n",
    ):
        file.write_text(text)
        assert len(read_images(file)) == 16
        assert len(load_scene(folder)) == 14


def test_a_numpy_header_that_promises_too_much(tmp_path: Path) -> None:
    folder = folders.write_llff(tmp_path / "scene")
    file = folder / "poses_bounds.npy"
    file.write_bytes(file.read_bytes().replace(b"(10, 17)", b"(99999, 17)".ljust(8))[:-3])
    with pytest.raises(InputError, match=r"poses_bounds\.npy"):
        load_scene(folder)
