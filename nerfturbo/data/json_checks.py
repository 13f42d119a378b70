"""What loaders share in reading other people's JSON: values are checked, and errors name the file and the place."""

from __future__ import annotations

import json
import math
import posixpath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

_EXTENSIONS = ("", ".png", ".jpg", ".jpeg", ".webp", ".JPG", ".PNG", ".JPEG")
_EXTENSIONS += (".tif", ".tiff", ".avif", ".heic", ".HEIC")
_MAX_TAILS = 8  # folders in front of a picture that may be missing


def read_json(file: Path, what: str = "a file") -> dict[str, Any]:
    """A JSON object from a file; `what` says what should have been there."""
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))  # Windows puts a mark before it
    except FileNotFoundError:
        raise InputError(str(file), what, "no such file") from None
    except OSError as error:
        raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), "valid JSON", str(error) or type(error).__name__) from None
    if not isinstance(document, dict):
        raise InputError(str(file), "a JSON object", type(document).__name__)
    return document


def read_frames(document: dict[str, Any], file: Path) -> list[tuple[dict[str, Any], str]]:
    """The frames of a transforms file, each with the words that say where it stands."""
    frames = document.get("frames")
    if not isinstance(frames, list) or not frames:
        got = "none" if not frames else type(frames).__name__
        raise InputError(f"{file}: frames", "a list of at least one frame", got)
    placed = [(frame, f"{file}: frame {index}") for index, frame in enumerate(frames)]
    for frame, place in placed:
        if not isinstance(frame, dict):
            raise InputError(place, "an object with file_path and transform_matrix", type(frame).__name__)
    return placed


def number(value: object, what: str) -> float:
    """A finite number."""
    try:
        result = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON allows integers of any length
        result = math.inf
    if not math.isfinite(result):
        raise InputError(what, "a finite number", shown(value))
    return result


def shown(value: object) -> str:
    """A value from a file as it may appear in a message: short, and printable whatever it holds."""
    return "nothing" if value is None else ascii(value)[:60]


def pose(value: object, where: str) -> Tensor:
    """(3, 4) float32 from the rows of a 4x4 matrix; a scale is divided out of the rotation."""
    what = f"{where}: transform_matrix"
    return rigid(three_rows(value, what, "a 4x4 matrix"), what).float()


def three_rows(value: object, what: str, expected: str) -> Tensor:
    """(3, 4) float64: the rows of a matrix that may have a fourth."""
    rows = value if isinstance(value, list) else []
    if len(rows) not in (3, 4) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise InputError(what, expected, shown(value))
    return torch.tensor([[number(entry, what) for entry in row] for row in rows[:3]], dtype=torch.float64)


def rigid(matrix: Tensor, what: str) -> Tensor:
    """The pose (3, 4) float64 without the scale some exporters leave in; anything but a rotation is refused."""
    determinant = float(torch.linalg.det(matrix[:, :3]))
    if not 0.0 < determinant < math.inf:
        raise InputError(what, "a rotation in the first three columns", f"determinant {determinant:.3g}")
    if abs(determinant - 1.0) > 1e-3:  # some exporters leave the camera object's scale in
        matrix = torch.cat([matrix[:, :3] / determinant ** (1.0 / 3.0), matrix[:, 3:]], dim=1)
    skew = float((matrix[:, :3].T @ matrix[:, :3] - torch.eye(3, dtype=torch.float64)).abs().max())
    if not skew <= 1e-2:
        raise InputError(what, "a rotation in the first three columns", f"axes off a right angle by {skew:.2g}")
    return matrix


def image_path(folder: Path, value: object, what: str, *, allow_outside: bool = False) -> Path:
    """The image a file names, with or without its extension; inside the scene's folder, unless `allow_outside`."""
    found = find_image(folder, value, what, allow_outside=allow_outside)
    if found is None:
        raise InputError(what, "the path of an image", f"no such file {shown(value)}")
    return found


def find_image(
    folder: Path, value: object, what: str, *, allow_outside: bool = False, shorten: bool = True
) -> Path | None:
    """As `image_path`, but None where there is no such picture. Some exporters write paths from where they were called:
    `shorten` takes folders off the front that are not there."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise InputError(what, "a path", shown(value))
    relative = posixpath.normpath(value.replace("\\", "/"))
    leaves = relative.startswith(("/", "../")) or relative in ("..", ".") or ":" in relative.split("/")[0]
    if leaves and not allow_outside:
        hint = "move the pictures there, or allow it by --allow-outside (allow_outside=True)"
        raise InputError(what, "a path inside the scene's folder", shown(value), hint)
    parts = relative.split("/")
    n_tails = min(len(parts), _MAX_TAILS) if shorten and not leaves else 1
    tails = [relative, *("/".join(parts[first:]) for first in range(1, n_tails))]
    try:
        return next((path for tail in tails for e in _EXTENSIONS if (path := folder / (tail + e)).is_file()), None)
    except (OSError, ValueError) as error:  # a name that is too long, say
        raise InputError(what, "the path of an image", getattr(error, "strerror", None) or str(error)) from None
