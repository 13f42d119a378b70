"""What loaders share in reading other people's JSON: values are checked, and errors name the file and the place."""

from __future__ import annotations

import functools
import json
import math
import posixpath
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, refuse

_ENDINGS = ("png", "jpg", "jpeg", "webp", "tif", "tiff", "bmp", "avif", "heic", "heif", "hif")
IMAGE_FOLDERS = ("images", "", "input", "rgb", "image", "photos", "images_2", "images_4", "images_8")
_MAX_TAILS = 8  # folders in front of a picture that may be missing


def natural(name: str | Path) -> tuple[list[str | int], str]:
    """What names are sorted by: numbers in them count as numbers.

    >>> sorted(["f10.png", "f2.png", "f1/2.png"], key=natural)
    ['f1/2.png', 'f2.png', 'f10.png']
    """
    text = name.as_posix() if isinstance(name, Path) else name
    parts = re.split(r"([0-9]{1,18})", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], text


def read_json(file: Path, what: str = "a file", kind: type = dict) -> Any:
    """A JSON object from a file, or another `kind` of value; `what` says what should have been there."""
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))  # Windows puts a mark before it
    except FileNotFoundError:
        raise InputError(str(file), what, "no such file") from None
    except OSError as error:
        raise InputError(str(file), "a file that can be read", error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), "valid JSON", str(error) or type(error).__name__) from None
    refuse(not isinstance(document, kind), str(file), "a JSON object", type(document).__name__)
    return document


def read_frames(document: dict[str, Any], file: Path) -> list[tuple[dict[str, Any], str]]:
    """The frames of a transforms file, each with the words that say where it stands."""
    frames: Any = document.get("frames")
    got, expected = type(frames).__name__ if frames else "none", "an object with file_path and transform_matrix"
    refuse(not isinstance(frames, list) or not frames, f"{file}: frames", "a list of at least one frame", got)
    for index, frame in enumerate(frames):
        refuse(not isinstance(frame, dict), f"{file}: frame {index}", expected, type(frame).__name__)
    return [(frame, str(frame.get("where", f"{file}: frame {index}"))) for index, frame in enumerate(frames)]


def number(value: object, what: str) -> float:
    """A finite number."""
    try:
        result = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON allows integers of any length
        result = math.inf
    if not math.isfinite(result):
        raise InputError(what, "a finite number", shown(value))
    return result


def calibration(value: list, what: str) -> dict[str, float]:
    """fl_x, fl_y, cx and cy of a camera matrix, 3x3 or 4x4, nested or flat, by rows or columns; or of these four."""
    flat = [number(one, what) for row in value for one in (row if isinstance(row, list) else [row])]
    side = {9: 3, 12: 4, 16: 4}.get(len(flat), 0)
    refuse(not side and len(flat) != 4, what, "a 3x3 matrix, or fx, fy, cx and cy", f"{len(flat)} numbers")
    below = flat[2 * side : 2 * side + 2]  # where by columns the principal point stands
    center = flat[2:4] if not side else below if any(below) and not flat[2] else [flat[2], flat[side + 2]]
    return dict(zip(("fl_x", "fl_y", "cx", "cy"), (flat[0], flat[side + 1], *center), strict=True))


def shown(value: object) -> str:
    """A value from a file as it may appear in a message: short, and printable whatever it holds."""
    return "nothing" if value is None else ascii(value)[:60]


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
    refuse(not skew <= 1e-2, what, "a rotation in the first three columns", f"axes off a right angle by {skew:.2g}")
    return matrix


def image_path(folder: Path, value: object, what: str, *, allow_outside: bool = False) -> Path:
    """The image a file names, with or without its extension; inside the scene's folder, unless `allow_outside`."""
    if (found := find_image(folder, value, what, allow_outside=allow_outside)) is None:
        raise missing(value, what, allow_outside)
    return found


def missing(value: object, what: str, allow_outside: bool) -> InputError:
    """What is said of a path without an image."""
    if leads_out(value) and not allow_outside:
        hint = "move the images there, or allow it by --allow-outside (allow_outside=True)"
        return InputError(what, "a path inside the scene's folder", shown(value), hint)
    return InputError(what, "the path of an image", f"no such file {shown(value)}")


def leads_out(value: object) -> bool:
    """Whether a path is absolute, as Linux or Windows write it, or leaves its folder."""
    relative = posixpath.normpath(str(value).replace("\\", "/"))
    return relative.startswith(("/", "../")) or relative in ("..", ".") or ":" in relative.split("/")[0]


def find_image(
    folder: Path, value: object, what: str, *, allow_outside: bool = False, places: Sequence[str] | None = ()
) -> Path | None:
    """As `image_path`, but None where there is no such picture. Exporters write paths from where they were called, or
    absolute ones: folders that are not there are taken off the front, unless `places` is None and the path leads
    nowhere else. Another extension, other capitals, and the name in one of `places` are found too, after exact ones."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise InputError(what, "a path", shown(value))
    relative, outside = posixpath.normpath(value.replace("\\", "/")), leads_out(value)
    whole = [part for part in relative.split("/") if part not in ("", "..", ".")]
    parts = (whole[1:] if whole and whole[0].endswith(":") else whole)[-_MAX_TAILS:]
    tails = ["/".join(parts[first:]) for first in range(len(parts) if places is not None or outside else 1)]
    rest = "/".join(parts[-1:] if outside or len(parts) < 2 else parts[1:])
    tails += [f"{place}/{rest}".lstrip("/") for place in places or () if rest]
    try:
        paths = [folder / tail for tail in ([relative] if outside and allow_outside else []) + tails]
        return next((path for path in paths if path.is_file()), None) or next(filter(None, map(_alike, paths)), None)
    except (OSError, ValueError) as error:  # a name that is too long, say
        raise InputError(what, "the path of an image", getattr(error, "strerror", None) or str(error)) from None


def _alike(path: Path) -> Path | None:
    """The image in the same folder whose name has other capitals, another extension, or one at all."""
    if not path.parent.is_dir():
        return None
    names, name = _listed(str(path.parent), path.parent.stat().st_mtime_ns), _plain(path.name)
    stem, _, ending = name.rpartition(".")
    same = names.get(name) or names.get(f"{name}.") or (names.get(f"{stem}.") if ending in _ENDINGS else None)
    return path.parent / same if same is not None and (path.parent / same).is_file() else None


@functools.lru_cache(maxsize=16)
def _listed(folder: str, changed: int) -> dict[str, str]:
    """The images of a folder by name and by stem with a dot, without capitals; `changed`: when it was."""
    kept = [path.name for path in Path(folder).iterdir() if path.suffix.lower()[1:] in _ENDINGS]
    kept.sort(key=lambda name: (-_ENDINGS.index(name.lower().rpartition(".")[2]), name))  # PNG last: it is kept
    return {f"{_plain(name).rpartition('.')[0]}.": name for name in kept} | {_plain(name): name for name in kept}


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).lower()  # macOS takes letters apart
