"""Truncated and bit-flipped files: a scene or an error that names the file, never a crash or a huge allocation."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from nerfturbo.data.colmap_files import read_images, read_points
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from . import folders

MUTATIONS = 50
FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cameras.bin": (folders.write_colmap, "sparse/0/cameras.bin"),
    "images.bin": (folders.write_colmap, "sparse/0/images.bin"),
    "points3D.bin": (folders.write_colmap, "sparse/0/points3D.bin"),
    "cameras.txt": (lambda folder: folders.write_colmap(folder, text=True), "sparse/0/cameras.txt"),
    "images.txt": (lambda folder: folders.write_colmap(folder, text=True), "sparse/0/images.txt"),
    "transforms.json": (folders.write_transforms, "transforms.json"),
    "poses_bounds.npy": (folders.write_llff, "poses_bounds.npy"),
    "view_01.png": (folders.write_transforms, "images/view_01.png"),
}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Cut off, or with up to four bits flipped, most of them in the header."""
    if draw.random() < 0.3:
        return content[: draw.randrange(len(content))]
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        end = len(damaged) if draw.random() < 0.6 else min(64, len(damaged))
        damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(damaged)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    write, relative = FILES[name]
    folder = write(tmp_path / "scene")
    file, draw = folder / relative, random.Random(name)
    content = file.read_bytes()
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            file.write_bytes(mutated(content, draw))
            try:
                load_scene(folder)
            except InputError as error:
                assert str(folder) in str(error), error
                refused += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused >= MUTATIONS // 5
    assert peak < 64 << 20, peak


def test_a_count_beyond_the_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for name, read in (("images.bin", read_images), ("points3D.bin", read_points)):
        file = tmp_path / name
        file.write_bytes(struct.pack("<Q", 1 << 60) + b"\0" * 100)
        with pytest.raises(InputError, match=rf"{name}: byte 8: expected {1 << 60}"):
            read(file)


def test_a_numpy_header_that_promises_too_much(tmp_path: Path) -> None:
    folder = folders.write_llff(tmp_path / "scene")
    file = folder / "poses_bounds.npy"
    file.write_bytes(file.read_bytes().replace(b"(10, 17)", b"(99999, 17)".ljust(8))[:-3])
    with pytest.raises(InputError, match=r"poses_bounds\.npy"):
        load_scene(folder)
