"""A walk that jumps is noticed, named, and placed again by its neighbours."""

from __future__ import annotations

import math
import sqlite3
import struct
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from nerfturbo.data.capture.process import ProcessConfig, _Process, _Work, keep_neighbours
from nerfturbo.data.capture.sfm import OVERLAP, PAIRS, Tool, judge
from nerfturbo.data.formats.posed import camera_jumps, jump_notes
from nerfturbo.data.scene import load_scene

N = 30
WALK = [12.0 * index for index in range(N)]  # degrees: once around
FOLDED = [angle if angle < 180.0 else angle - 180.0 for angle in WALK]  # two sides taken for one


def looking(degrees: list[float]) -> Tensor:
    """Cameras on a circle that look inwards."""
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    poses = torch.eye(4, dtype=torch.float64).repeat(len(degrees), 1, 1)[:, :3]
    poses[:, 0, 2], poses[:, 1, 2], poses[:, 2, 2] = angle.cos(), angle.sin(), 0.0
    return poses


def names(n: int = N, folder: str = "") -> list[Path]:
    return [Path(folder) / f"frame_{index:04d}.jpg" for index in range(n)]


def test_a_fold_is_found_and_named():
    jumps, step = camera_jumps(looking(FOLDED))
    assert [jump.index for jump in jumps] == [14] and jumps[0].degrees == pytest.approx(168.0)
    assert step == pytest.approx(12.0)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist()
    files = names()
    (note,) = jump_notes(looking(FOLDED)[shuffled], [files[index] for index in shuffled])
    assert "168 degrees between frame_0014.jpg and frame_0015.jpg, elsewhere by 12" in note


@pytest.mark.parametrize(
    "degrees",
    [WALK, [77.0 * index for index in range(N)], FOLDED[:19], [angle * 1.6 for angle in FOLDED], [0.0, 120.0] * 15],
    ids=["a walk", "cameras all around", "too few", "large steps", "to and fro"],
)
def test_other_cameras_are_left_in_peace(degrees: list[float]):
    assert camera_jumps(looking(degrees))[0] == []


def test_every_folder_is_a_walk_of_its_own():
    poses = torch.cat([looking(WALK), looking([angle + 150.0 for angle in WALK])])
    assert jump_notes(poses, names(folder="left") + names(folder="right")) == ()
    assert len(jump_notes(poses, names(2 * N))) == 1


def test_matches_of_neighbours_are_kept(tmp_path: Path):
    database = tmp_path / "matches.db"
    order = [7, 3, 9, 1]  # numbers of the pictures in the order of their names
    pairs = [(first, second) for first in order for second in order if first < second]
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE images (image_id INTEGER, name TEXT)")
        connection.executemany("INSERT INTO images VALUES (?, ?)", [(n, f"{i}.jpg") for i, n in enumerate(order)])
        for table in ("matches", "two_view_geometries"):
            connection.execute(f"CREATE TABLE {table} (pair_id INTEGER, rows INTEGER)")
            connection.executemany(f"INSERT INTO {table} VALUES (?, 20)", [(a * PAIRS + b,) for a, b in pairs])
    keep_neighbours(database, 1)
    with sqlite3.connect(database) as connection:
        for table in ("matches", "two_view_geometries"):
            left = {divmod(pair, PAIRS) for (pair,) in connection.execute(f"SELECT pair_id FROM {table}")}
            assert left == {(3, 7), (3, 9), (1, 9)}


def write_model(folder: Path, degrees: list[float]) -> None:
    """A model as COLMAP writes it: cameras that turn about one axis, and no points."""
    folder.mkdir(parents=True)
    images = struct.pack("<Q", len(degrees))
    for index, angle in enumerate(degrees):
        half = math.radians(angle) / 2.0
        values = (index + 1, math.cos(half), 0.0, math.sin(half), 0.0, 0.0, 0.0, 4.0, 1)
        images += struct.pack("<I7dI", *values) + f"frame_{index:04d}.jpg".encode() + b"\0" + struct.pack("<Q", 0)
    (folder / "images.bin").write_bytes(images)
    (folder / "points3D.bin").write_bytes(struct.pack("<Q", 0))
    (folder / "cameras.bin").write_bytes(struct.pack("<QIiQQ4d", 1, 1, 1, 64, 48, 60.0, 60.0, 32.0, 24.0))


class Mapper:
    """Stands for COLMAP: what it places follows from whose matches it is given."""

    uses_gpu, name = False, "a stand-in"

    def __init__(self, models: dict[str, list[float]]) -> None:
        self.models, self.asked = models, []

    def map(self, database: Path, images: Path, models: Path, log: Path, advance: object) -> None:
        self.asked.append(database.name)
        with sqlite3.connect(database) as connection:
            pairs = [divmod(pair, PAIRS) for (pair,) in connection.execute("SELECT pair_id FROM two_view_geometries")]
        assert any(b - a > OVERLAP for a, b in pairs) == (database.name == "matches.db")
        if self.models[database.name]:
            write_model(models / "0", self.models[database.name])


class Quiet:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, text: str) -> None: ...

    def update(self, fraction: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("by_neighbours", "taken"),
    [(WALK, True), (FOLDED, False), (WALK[:20], False), ([], False)],
    ids=["smooth", "folded as well", "too few", "none"],
)
def test_frames_are_placed_again_by_their_neighbours(tmp_path: Path, by_neighbours: list[float], taken: bool):
    source = tmp_path / "walk.mp4"
    source.write_bytes(b"")
    work, words = _Work(tmp_path / "out", source), Quiet()
    tool = Mapper({"matches.db": FOLDED, "neighbours.db": by_neighbours})
    with work.locked():
        with sqlite3.connect(work.folder / "matches.db") as connection:
            connection.execute("CREATE TABLE images (image_id INTEGER, name TEXT)")
            frames = [(index + 1, name.name) for index, name in enumerate(names())]
            connection.executemany("INSERT INTO images VALUES (?, ?)", frames)
            for table in ("matches", "two_view_geometries"):
                connection.execute(f"CREATE TABLE {table} (pair_id INTEGER, rows INTEGER)")
                pairs = [(a * PAIRS + b, 20) for a in range(1, N) for b in range(a + 1, N + 1)]
                connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", pairs)
        _Process(source, [source], ProcessConfig(), cast(Tool, tool), work, words)._poses()
    verdict = judge(work.sparse / "0", work.folder, [name.name for name in names()], "sequential")
    assert tool.asked == ["matches.db", "neighbours.db"] and not (work.folder / "neighbours.db").exists()
    assert verdict.registered == N
    assert (verdict.quality == "good") == taken == (not verdict.advice)
    assert any("168 degrees between frame_0014.jpg" in note for note in words.notes)


def test_the_beer_capture_is_folded_and_the_others_are_not(scene_dir):
    found = {
        name: load_scene(scene_dir(name), downscale=16).notes for name in ("colmap/beer", "ngp/fruit", "llff/fern")
    }
    told = {name: [note for note in notes if "the camera turns" in note] for name, notes in found.items()}
    assert not told["ngp/fruit"] and not told["llff/fern"]
    assert "between 0013.jpg and 0014.jpg (and at 2 more places)" in told["colmap/beer"][0]
