"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nerfturbo.files import remove, replacing, write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "note.txt"
    write_atomically(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    write_atomically(path, b"\0\1")
    assert path.read_bytes() == b"\0\1"
    assert [found.name for found in path.parent.iterdir()] == ["note.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        assert temporary.suffix == ".txt" and temporary.parent == tmp_path
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [found.name for found in tmp_path.iterdir()] == ["note.txt"]
    assert path.read_text() == "old"


def test_folders_are_replaced_too(tmp_path: Path) -> None:
    path = tmp_path / "scene"
    for name in ("first", "second"):
        with replacing(path) as temporary:
            temporary.mkdir()
            (temporary / name).touch()
        assert [found.name for found in path.iterdir()] == [name]
    assert [found.name for found in tmp_path.iterdir()] == ["scene"]


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    remove(tmp_path / "never")
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("named", [True, False])
def test_a_failure_names_the_file_that_was_asked_for(tmp_path: Path, named: bool) -> None:
    path = tmp_path / "mesh.glb"
    with pytest.raises(OSError, match="No space") as failure, replacing(path) as temporary:
        raise OSError(errno.ENOSPC, "No space left on device", *([str(temporary)] if named else []))
    assert failure.value.filename == str(path)


def test_a_failure_elsewhere_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failure, replacing(tmp_path / "mesh.glb"):
        (tmp_path / "missing").read_bytes()
    assert Path(failure.value.filename).name == "missing"
