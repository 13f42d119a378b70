"""Structure from motion by COLMAP, the program where it is installed, else its Python package; and what came of it.

Both run as a process of their own: Ctrl-C ends them at once, a crash of theirs is an error message of ours, and what
they print says how far they are. Names of options moved between versions of COLMAP: the program is asked for them.
"""

import codecs
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import InputError, NerfturboError
from ..formats.colmap import pose_of, read_cloud, read_images
from ..formats.posed import jump_notes

ToolName = Literal["auto", "colmap", "pycolmap"]
Matcher = Literal["exhaustive", "sequential"]
Advance = Callable[[float], None]
INSTALL = (
    "install COLMAP (`apt install colmap`, `brew install colmap`, `conda install -c conda-forge colmap`) "
    "or its Python package (`pip install pycolmap`)"
)
PAIRS = 2147483647  # COLMAP stores the numbers of two pictures as one: first * this + second
OVERLAP = 10  # neighbours on each side that a video frame is matched with, beside those 16, 32, 64, ... away
_PYCOLMAP_STAGE = Path(__file__).with_name("sfm_pycolmap.py")
_PATIENCE = 5.0  # seconds that an interrupted process gets to end by itself
GOOD_SHARE, USABLE_SHARE = 0.9, 0.6
LARGE_ERROR = 1.5  # pixels, of the size that features were found in
_MORE_PHOTOS = (
    "take more images: each should share at least half of what it shows with its neighbours, from places a step "
    "apart, sharp, and of things that stand still and are neither plain nor shiny"
)

# What COLMAP prints on the way, in its older and newer words.
_FILE = re.compile(r"Processed file \[(\d+)/(\d+)\]")
_BLOCK = re.compile(r"(?:Matching|Processing) block \[(\d+)/(\d+), (\d+)/(\d+)\]")
_IMAGE = re.compile(r"(?:Matching|Processing) image \[(\d+)/(\d+)\]")
_REGISTERED = re.compile(r"Registering image #\d+ \((?:num_reg_\w+=)?(\d+)\)")


class SfmError(NerfturboError, RuntimeError):
    """COLMAP ended with an error that is not about the input."""


@dataclass(frozen=True)
class Extraction:
    """How features are found."""

    images: Path
    camera_model: str
    one_camera: bool
    max_size: int  # pixels of the longer side that features are looked for in
    max_features: int


def open_tool(name: ToolName = "auto") -> "Tool":
    """The program `colmap`, else the package `pycolmap`; what was asked for by name must be there."""
    if name in ("auto", "colmap") and (program := shutil.which("colmap")) is not None:
        return ColmapProgram(program)
    if name in ("auto", "pycolmap") and importlib.util.find_spec("pycolmap") is not None:
        return PycolmapPackage()
    wanted = {"auto": "COLMAP", "colmap": "the program colmap", "pycolmap": "the package pycolmap"}[name]
    raise InputError("poses of photos", f"{wanted}, which finds them", "none installed", INSTALL)


class ColmapProgram:
    """The program `colmap`, from 3.6 on. A method runs one stage; `advance` hears how much is done, from 0 to 1."""

    def __init__(self, program: str) -> None:
        self.program = program
        banner = _asked((program, "help"))
        found = re.search(r"COLMAP (\d+\.\d+[\w.]*)", banner)
        has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
        self.uses_gpu = "with CUDA" in banner and has_gpu
        self.name = f"COLMAP {found.group(1) if found else ''} ({'GPU' if self.uses_gpu else 'CPU'})"

    def extract(self, database: Path, what: Extraction, log: Path, advance: Advance) -> None:
        """Features of every image of a folder into a new database."""
        verb = "feature_extractor"
        flags = ["--database_path", database, "--image_path", what.images]
        flags += ["--ImageReader.camera_model", what.camera_model]
        flags += ["--ImageReader.single_camera", int(what.one_camera)]
        flags += self._flag(verb, r"\w+Extraction\.use_gpu", int(self.uses_gpu))
        flags += self._flag(verb, r"\w+Extraction\.max_image_size", what.max_size)
        flags += self._flag(verb, r"SiftExtraction\.max_num_features", what.max_features)
        run([self.program, verb, *map(str, flags)], log, advance)

    def match(self, database: Path, how: Matcher, n: int, log: Path, advance: Advance) -> None:
        """Matches between images into the database; pairs that are in it already are not matched again."""
        verb = f"{how}_matcher"
        flags = ["--database_path", database, *self._flag(verb, r"\w+Matching\.use_gpu", int(self.uses_gpu))]
        if how == "exhaustive":
            flags += ["--ExhaustiveMatching.block_size", block_size(n)]
        else:
            flags += ["--SequentialMatching.overlap", OVERLAP, "--SequentialMatching.quadratic_overlap", 1]
        run([self.program, verb, *map(str, flags)], log, advance)

    def map(self, database: Path, images: Path, models: Path, log: Path, advance: Advance) -> None:
        """Models into folders 0, 1, ... of `models`, which stays empty where no two images fit together."""
        flags = ["--database_path", database, "--image_path", images, "--output_path", models]
        n_images = sum(1 for _ in images.iterdir())
        command = [self.program, "mapper", *map(str, flags)]
        run(command, log, advance, n_images=n_images, forgive="failed to create sparse model")

    def _flag(self, verb: str, pattern: str, value: int) -> list[str | int]:
        """The option of that name in this version; nothing where there is none."""
        found = re.search(rf"--({pattern})\b", _asked((self.program, verb, "-h")))
        return [] if found is None else [f"--{found.group(1)}", value]


class PycolmapPackage:
    """The package `pycolmap`, in a Python process of its own; the same methods."""

    name, uses_gpu = "pycolmap (CPU)", False  # its usual wheels have no CUDA

    def extract(self, database: Path, what: Extraction, log: Path, advance: Advance) -> None:
        words = [database, what.images, what.camera_model, int(what.one_camera), what.max_size, what.max_features]
        run(self._command("extract", *words), log, advance)

    def match(self, database: Path, how: Matcher, n: int, log: Path, advance: Advance) -> None:
        run(self._command("match", database, how, block_size(n), OVERLAP), log, advance)

    def map(self, database: Path, images: Path, models: Path, log: Path, advance: Advance) -> None:
        run(self._command("map", database, images, models), log, advance, n_images=sum(1 for _ in images.iterdir()))

    @staticmethod
    def _command(*words: object) -> list[str]:
        # By its path, for it needs nothing of our package; -P keeps its folder's names out of the way of others.
        return [sys.executable, "-P", str(_PYCOLMAP_STAGE), *map(str, words)]


Tool = ColmapProgram | PycolmapPackage


def block_size(n_images: int) -> int:
    """Of exhaustive matching: a database holds whole blocks, so small ones lose little when interrupted."""
    return max(4, min(50, -(-n_images // 6)))


def run(command: Sequence[str], log: Path, advance: Advance, *, n_images: int = 0, forgive: str = "") -> None:
    """Run a stage, with its words in a log file. A failure that says `forgive` is left to the caller to notice. The
    process stands in a group of its own: a Ctrl-C reaches us alone, and we end it."""
    text, last = "", -1.0  # a second attempt at a model begins anew; how much is done never shrinks
    with log.open("ab") as kept:
        kept.write(f"$ {' '.join(command)}\n".encode(errors="surrogateescape"))
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environ = os.environ | {"QT_QPA_PLATFORM": "offscreen", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, **pipes, start_new_session=True, env=environ)
        assert process.stdout is not None
        try:
            decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                kept.write(chunk)
                text = (text + decode(chunk))[-20_000:]
                if (done := _share(text, n_images)) is not None and done > last:
                    last = done
                    advance(done)
            code = process.wait()
        finally:
            process.stdout.close()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if code != 0 and not (forgive and forgive in text):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = ascii(" | ".join(lines[-2:]))[1:-1][-240:] if lines else "nothing"
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        hint = "; perhaps memory ran out: try a smaller --max-size or --max-features" if code == -signal.SIGKILL else ""
        verb = next((word for word in command[1:] if not word.startswith("-") and "/" not in word), "")
        raise SfmError(f"{Path(command[0]).name} {verb}: it ended with {how} and said: {said}; see {log}{hint}")
    advance(1.0)


def _share(text: str, n_images: int) -> float | None:
    """How much of a stage is done, from what it printed last."""
    for pattern in (_FILE, _IMAGE):
        if found := pattern.findall(text):
            return int(found[-1][0]) / int(found[-1][1])
    if found := _BLOCK.findall(text):
        row, rows, column, columns = map(int, found[-1])
        return ((row - 1) * columns + column - 1) / (rows * columns)  # printed before it is done
    if n_images and (found := _REGISTERED.findall(text)):
        return min(1.0, int(found[-1]) / n_images)
    return None


@functools.cache
def _asked(command: tuple[str, ...]) -> str:
    """What a quick question to a program is answered with."""
    try:
        environment = os.environ | {"QT_QPA_PLATFORM": "offscreen"}
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(command[0], "a program that runs", str(error), INSTALL) from None
    return answer.stdout + answer.stderr


def query(database: Path, text: str) -> list[tuple[Any, ...]]:
    """The rows that COLMAP's database answers with."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(text).fetchall()


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
            f"{self.quality}: {self.registered} of {self.pictures} images registered, {self.points} points, "
            f"mean reprojection error {self.mean_error:.2f} pixels"
        )


def largest_model(models: Path, source: str) -> tuple[Path, list[int]]:
    """The model with the most pictures, and how many each has, the largest first."""
    found = sorted(models.glob("*/images.bin"))
    counted = sorted(((len(read_images(file)), file.parent) for file in found), key=lambda pair: -pair[0])
    if not counted or counted[0][0] < 2:
        raise InputError(source, "images that show the same things", "no two that fit together", _MORE_PHOTOS)
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
    if not (images := read_images(model / "images.bin")):
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
            advice.append(f"{alone} of them match no other image: blurred, or showing what no other image shows")
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
        names = query(database, "SELECT image_id, name FROM images")
        pairs = query(database, "SELECT pair_id FROM two_view_geometries WHERE rows > 0")
    except sqlite3.DatabaseError:  # the words it serves are not worth an error
        return None
    numbers = {number for (pair,) in pairs for number in (pair % PAIRS, pair // PAIRS)}
    return {name for number, name in names if number in numbers}
