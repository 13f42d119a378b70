"""What came of a reconstruction: how many pictures found their place, how well, and what to do about the rest."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import InputError
from ..formats.colmap import pose_of, read_cloud, read_images
from .pose_jumps import jump_notes
from .sfm import PAIRS

GOOD_SHARE, USABLE_SHARE = 0.9, 0.6
LARGE_ERROR = 1.5  # pixels, of the size that features were found in
_MORE_PHOTOS = (
    "take more pictures: each should share at least half of what it shows with its neighbours, from places a step "
    "apart, sharp, and of things that stand still and are neither plain nor shiny"
)


@dataclass(frozen=True)
class Verdict:
    """Of one finished reconstruction; `advice` is empty where there is nothing to improve."""

    registered: int
    pictures: int
    points: int
    mean_error: float  # pixels
    missing: tuple[str, ...]  # pictures without a pose
    quality: str  # good, usable or poor
    advice: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"{self.quality}: {self.registered} of {self.pictures} pictures registered, {self.points} points, "
            f"mean reprojection error {self.mean_error:.2f} pixels"
        )


def largest_model(models: Path, source: str) -> tuple[Path, list[int]]:
    """The model with the most pictures, and how many each has, the largest first."""
    found = [folder for folder in sorted(models.iterdir()) if (folder / "images.bin").is_file()]
    counted = sorted(((len(read_images(folder / "images.bin")), folder) for folder in found), key=lambda pair: -pair[0])
    if not counted or counted[0][0] < 2:
        raise InputError(source, "pictures that show the same things", "no two that fit together", _MORE_PHOTOS)
    return counted[0][1], [count for count, _ in counted]


def judge(model: Path, work: Path, names: list[str], matcher: str) -> Verdict:
    """Read a finished model; `names` are the pictures that went into it, `work` has the database of matches."""
    walk = model_jumps(model)
    registered = {image.name for image in read_images(model / "images.bin")}
    cloud = read_cloud(model / "points3D.bin")
    known = cloud.errors[cloud.errors > 0.0]
    error = float(known.mean()) if known.numel() else 0.0
    missing = tuple(name for name in names if name not in registered)
    share = len(registered) / len(names)
    quality = "good" if share >= GOOD_SHARE else ("usable" if share >= USABLE_SHARE else "poor")
    if quality == "good" and (error > LARGE_ERROR or walk):
        quality = "usable"
    advice = (*walk, *_advice(missing, error, share, matcher, _matched(work / "matches.db")))
    return Verdict(len(registered), len(names), cloud.positions.shape[0], error, missing, quality, advice)


def model_jumps(model: Path) -> tuple[str, ...]:
    """What is to be said where the cameras of a finished model jump, in the order of their pictures' names."""
    images = read_images(model / "images.bin")
    if not images:
        return ()
    poses = torch.stack([pose_of(image, f"{model / 'images.bin'}: image {image.number}") for image in images])
    return jump_notes(poses, [Path(image.name) for image in images])


def _advice(missing: tuple[str, ...], error: float, share: float, matcher: str, matched: set[str] | None) -> list[str]:
    advice = []
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        advice.append(f"without a pose, and left out: {shown}")
        alone = 0 if matched is None else len(set(missing) - matched)
        if alone:
            advice.append(f"{alone} of them match no other picture: blurred, or showing what no other picture shows")
    if share < GOOD_SHARE:
        if matcher == "sequential":
            advice.append("compare all pairs: run it again with --matcher exhaustive (finished work is kept)")
        advice.append("look for more features: run it again with --max-features 8192 --max-size 3200")
        advice.append(_MORE_PHOTOS)
    if error > LARGE_ERROR:
        advice.append(f"a mean error of {error:.1f} pixels is large: try --camera-model OPENCV, or OPENCV_FISHEYE")
    return advice


def _matched(database: Path) -> set[str] | None:
    """The images with verified matches; None where nothing says so any more."""
    if not database.is_file():
        return None
    try:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            names = dict(connection.execute("SELECT image_id, name FROM images"))
            pairs = connection.execute("SELECT pair_id FROM two_view_geometries WHERE rows > 0").fetchall()
    except sqlite3.DatabaseError:  # the words it serves are not worth an error
        return None
    numbers = {number for (pair,) in pairs for number in (pair % PAIRS, pair // PAIRS)}
    return {name for number, name in names.items() if number in numbers}
