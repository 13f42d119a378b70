"""Structure from motion by COLMAP: the program where it is installed, else its Python package.

Both run as a process of their own, so that Ctrl-C ends them at once, a crash of theirs is an error message of ours, and
what they print says how far they are. Names of options moved between versions of COLMAP: the program is asked for them.
"""

from __future__ import annotations

import codecs
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import InputError, NerfturboError

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


def open_tool(name: ToolName = "auto") -> Tool:
    """The program `colmap`, else the package `pycolmap`; what was asked for by name must be there."""
    program = shutil.which("colmap")
    if name in ("auto", "colmap") and program is not None:
        return ColmapProgram(program)
    if name in ("auto", "pycolmap") and importlib.util.find_spec("pycolmap") is not None:
        return PycolmapPackage()
    wanted = {"auto": "COLMAP", "colmap": "the program colmap", "pycolmap": "the package pycolmap"}[name]
    raise InputError("poses of photos", f"{wanted}, which finds them", "none installed", INSTALL)


class ColmapProgram:
    """The program `colmap`, any version from 3.6 on. A method runs one stage; `advance` hears how much of it is
    done, from 0 to 1."""

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
        n_images = sum(1 for _ in images.iterdir())
        run(self._command("map", database, images, models), log, advance, n_images=n_images)

    @staticmethod
    def _command(*words: object) -> list[str]:
        # By its path, for it needs nothing of our package; -P keeps its folder's names out of the way of others.
        return [sys.executable, "-P", str(_PYCOLMAP_STAGE), *map(str, words)]


Tool = ColmapProgram | PycolmapPackage


def block_size(n_images: int) -> int:
    """Of exhaustive matching: a database holds whole blocks, so small ones lose little when interrupted."""
    return max(4, min(50, -(-n_images // 6)))


def run(command: Sequence[str], log: Path, advance: Advance, *, n_images: int = 0, forgive: str = "") -> None:
    """Run a stage, with its words in a log file. A failure that says `forgive` is left to the caller to notice.

    The process stands in a group of its own: a Ctrl-C reaches us alone, and we end it. Should we be killed, it ends at
    its next word, which nobody reads any more.
    """
    text, last = "", None
    with log.open("ab") as kept:
        kept.write(f"$ {' '.join(command)}\n".encode(errors="surrogateescape"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"QT_QPA_PLATFORM": "offscreen", "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert process.stdout is not None
            decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                kept.write(chunk)
                text = (text + decode(chunk))[-20_000:]
                if (done := _share(text, n_images)) is not None and done != last:
                    last = done
                    advance(done)
            code = process.wait()
        finally:
            _end(process)
    if code != 0 and not (forgive and forgive in text):
        _fail(command, code, text, log)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _fail(command: Sequence[str], code: int, text: str, log: Path) -> None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = ascii(" | ".join(lines[-2:]))[1:-1][-240:] if lines else "nothing"
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    memory = "; perhaps memory ran out: try a smaller --max-size or --max-features" if code == -signal.SIGKILL else ""
    verb = next((word for word in command[1:] if not word.startswith("-") and "/" not in word), "")
    raise SfmError(f"{Path(command[0]).name} {verb}: it ended with {how} and said: {last}; see {log}{memory}")


@functools.cache
def _asked(command: tuple[str, ...]) -> str:
    """What a quick question to a program is answered with."""
    try:
        environment = os.environ | {"QT_QPA_PLATFORM": "offscreen"}
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(command[0], "a program that runs", str(error), INSTALL) from None
    return answer.stdout + answer.stderr
