"""The picture cache: whatever is wrong with it, the pictures come out right."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from nerfturbo.data import builtin
from nerfturbo.data.builtin import cached_pictures
from nerfturbo.files import cache_folder

SHAPE = (2, 3, 3, 4)
PICTURES = np.arange(72, dtype=np.uint8).reshape(SHAPE)


class Renderer:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return PICTURES.copy()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "cache"))
    builtin._warn_once.cache_clear()
    return tmp_path / "cache"


def test_only_the_first_call_renders(folder: Path) -> None:
    render = Renderer()
    for _ in range(3):
        assert np.array_equal(cached_pictures("key", SHAPE, render), PICTURES)
    assert render.calls == 1
    cached_pictures("other", SHAPE, render)
    assert render.calls == 2
    assert sorted(path.suffix for path in (folder / "scenes").iterdir()) == [".npz", ".npz"]  # no temporary files left


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "shape", "dtype", "folder"])
def test_a_damaged_file_is_rendered_anew(folder: Path, damage: str) -> None:
    render = Renderer()
    cached_pictures("key", SHAPE, render)
    file = folder / "scenes" / "key.npz"
    content = bytearray(file.read_bytes())
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[content.index(bytes(range(20, 30)))] ^= 0xFF  # inside the pixels
        file.write_bytes(content)
    elif damage == "text":
        file.write_text("not an archive")
    elif damage == "shape":
        np.savez(file, pictures=PICTURES[:1])
    elif damage == "dtype":
        np.savez(file, pictures=PICTURES.astype(np.float32))
    else:
        file.unlink()
        file.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(cached_pictures("key", SHAPE, render), PICTURES)
    assert render.calls == 2
    if damage != "folder":
        cached_pictures("key", SHAPE, render)
        assert render.calls == 2  # and the good copy is there again


def test_an_unwritable_cache_warns_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "file"))
    builtin._warn_once.cache_clear()
    render = Renderer()
    with pytest.warns(RuntimeWarning, match="NERFTURBO_CACHE") as caught:
        for _ in range(2):
            assert np.array_equal(cached_pictures("key", SHAPE, render), PICTURES)
    assert render.calls == 2 and len(caught) == 1


def test_a_full_disk_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cached_pictures("key", SHAPE, Renderer())
    assert not list((folder / "scenes").iterdir())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("NERFTURBO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "nerfturbo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().name in ("nerfturbo", "cache")


def test_very_large_sets_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_MAX_BYTES", 10)
    cached_pictures("key", SHAPE, Renderer())
    assert not folder.exists()
