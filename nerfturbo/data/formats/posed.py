"""What the loaders of posed photos share: views to cameras, splits, times, image sizes, a place for the scene."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError, refuse
from ..cameras import CameraModel, Cameras
from ..capture.photos import PHOTO_ENDINGS
from ..images import Backdrop, find_mask, load_images, mask_notes, same_shape, stored_turns
from ..json_checks import natural, shown
from ..options import LoadOptions
from ..placement import Placement, place, place_in_ndc, placed_poses
from ..scene import MissingSplitError, Scene, Split


def unit_times(times: Sequence[float], of_all: Sequence[float]) -> tuple[Tensor, tuple[str, ...]]:
    """Times (n,) in [0, 1] and, where they had to be changed for it, a note: the span of all pictures becomes 0 to 1.

    >>> unit_times([10.0, 30.0], [10.0, 30.0, 50.0])
    (tensor([0.0000, 0.5000]), ('times from 10 to 50 are told as 0 to 1',))
    >>> unit_times([0.2, 0.4], [0.2, 0.4])
    (tensor([0.2000, 0.4000]), ())
    """
    low, high = min(of_all), max(of_all)
    if low >= 0.0 and high <= 1.0:
        return torch.tensor(times, dtype=torch.float32), ()
    unit = [(time - low) / (high - low) if high > low else 0.0 for time in times]  # before rounding: seconds since 1970
    return torch.tensor(unit, dtype=torch.float32), (f"times from {low:g} to {high:g} are told as 0 to 1",)


TEST_EVERY = 8
FEW_VIEWS = 16  # of which one is enough to score
_NO_DISTORTION = (0.0,) * 8
_PLAIN_AT_ZERO: tuple[CameraModel, ...] = ("opencv", "fov", "division")  # lenses whose zeros make a pinhole
_SMALLEST_FOCAL = 1e-3  # in pixels: smaller ones are damage, and may vanish in float32
_LARGEST = 1e7  # of any number a lens may have: beyond, float32 loses whole pixels


@dataclass(frozen=True)
class Lens:
    """Intrinsics of one camera; `distortion` as in Cameras."""

    width: int
    height: int
    focal: tuple[float, float]
    center: tuple[float, float]
    model: CameraModel = "pinhole"
    distortion: tuple[float, ...] = _NO_DISTORTION

    @classmethod
    def sphere(cls, width: int, height: int) -> Lens:
        """A picture of everything around the camera: azimuth along x, from pole to pole along y."""
        focal = (width / (2.0 * math.pi), height / math.pi)
        return cls(width, height, focal, (0.5 * width, 0.5 * height), "equirectangular")

    def checked(self, what: str) -> Lens:
        """Itself, if its numbers can belong to a camera; `what` is what the error names."""
        if not (1 <= self.width <= 1 << 20 and 1 <= self.height <= 1 << 20):
            raise InputError(what, "a picture of 1 to 2^20 pixels a side", f"{self.width} x {self.height}")
        if not all(_SMALLEST_FOCAL < focal < _LARGEST for focal in self.focal):
            raise InputError(what, "focal lengths > 0", f"{self.focal[0]:.6g}, {self.focal[1]:.6g}")
        for value in (*self.center, *self.distortion):
            refuse(not abs(value) < _LARGEST, what, "a principal point and distortion that are finite", f"{value:.6g}")
        if self.model == "eucm" and not (0.0 <= self.distortion[0] <= 1.0 and self.distortion[1] > 0.0):
            got = f"{self.distortion[0]:.6g}, {self.distortion[1]:.6g}"
            raise InputError(what, "alpha from 0 to 1 and beta > 0", got)
        return replace(self, model="pinhole") if self.model in _PLAIN_AT_ZERO and not any(self.distortion) else self


@dataclass(frozen=True)
class View:
    """One picture with its camera."""

    image: Path
    pose: Tensor  # (3, 4) float64, camera to world, OpenGL axes
    lens: Lens
    split: Split = "train"
    mask: Path | None = None  # the one the file names, if it names any
    time: float | None = None  # in the file's unit
    depth: tuple[str, float] | None = None  # its depth map, and the map's unit in the scene's own coordinates


ONE_FOCAL = "one focal length for x and y: the file has no other"
_PLY_KINDS = {"char": "i1", "short": "i2", "int": "i4", "float": "f4", "float32": "f4", "double": "f8", "float64": "f8"}
_PLY_KINDS |= {f"int{8 * n}": f"i{n}" for n in (1, 2, 4)}
_PLY_KINDS |= {f"u{name}": f"u{kind[1]}" for name, kind in _PLY_KINDS.items() if kind[0] == "i"}
_PLY_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@contextlib.contextmanager
def reading(file: Path, writer: str) -> Iterator[None]:
    """Whatever goes wrong inside is told as damage of the file that `writer` wrote."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # parsers fail in as many ways as there are damaged files
        said = f"no {error}" if isinstance(error, KeyError) else str(getattr(error, "strerror", None) or error)
        inside = isinstance(error, TypeError | AttributeError | IndexError | StopIteration | RuntimeError)
        got = "something else" if inside or re.search(r"^$|\(\)|unpack", said) else ascii(said)[1:-1][:120]
        hint = "the file is damaged, or of a version that is not known here"
        raise InputError(str(file), f"what {writer} writes", got, hint) from None


def read_ply(file: Path) -> Tensor:
    """(n, 3) float64: the vertices of a PLY file, text or binary, which must be its first element."""
    with reading(file, "a PLY exporter"):
        head, _, body = file.read_bytes().partition(b"end_header")
        refuse(not head.startswith(b"ply"), str(file), "a PLY file", shown(head[:20].decode("latin-1")))
        lines = [line.split() for line in head.decode("latin-1").splitlines()]
        order = next(_PLY_ORDERS[line[1]] for line in lines if line[:1] == ["format"])
        first = next(i for i, line in enumerate(lines) if line[:2] == ["element", "vertex"])
        properties = itertools.takewhile(lambda line: line[0] == "property", lines[first + 1 :])
        names = {line[2]: line[1] for line in properties}
        body, count = body.partition(b"\n")[2], int(lines[first][2])
        if order:
            rows = np.frombuffer(body, [(name, order + _PLY_KINDS[kind]) for name, kind in names.items()], count)
            return torch.from_numpy(np.stack([rows[axis].astype(np.float64) for axis in "xyz"], -1))
        table = [line.split() for line in body.decode("ascii").splitlines()[:count]]
        columns = [list(names).index(axis) for axis in "xyz"]
        return torch.from_numpy(np.array([[float(row[i]) for i in columns] for row in table]).reshape(count, 3))


def held_out(views: Sequence[View]) -> tuple[list[View], str]:
    """The views with their splits, where a format knows none, and the words that say which were held out: views 0, 8,
    16, ... in the order given, as the published scores have it. Of fewer than 16 it is the most central one alone,
    whose place and direction are nearest to those of all others: the first is often at the rim."""
    chosen, note = set(range(0, len(views), TEST_EVERY)), "every 8th picture is a test view"
    if len(views) < 2:
        chosen, note = set(), "one picture: none is left to score"
    elif len(views) < FEW_VIEWS:
        poses = torch.stack([view.pose for view in views])
        positions, forward = poses[:, :, 3], -poses[:, :, 2]
        apart = torch.cdist(positions, positions)
        central = int((apart / apart.max().clamp_min(1e-12) + 1.0 - forward @ forward.T).sum(1).argmin())
        chosen = {central}
        note = f"{len(views)} images: only the most central one, {views[central].image.name}, is a test view"
    return [replace(view, split="test" if i in chosen else "train") for i, view in enumerate(views)], note


def posed_scene(
    folder: Path,
    views: Sequence[View],
    split: Split,
    options: LoadOptions,
    *,
    points: Tensor | None = None,
    placing: Callable[[Tensor], Placement] | None = None,
    notes: tuple[str, ...] = (),
) -> Scene:
    """One split of the views. All of them decide about the place, so that every split stands in the same one. `placing`
    overrides the automatic placement; it gets the poses (n, 3, 4)."""
    if not (chosen := [index for index, view in enumerate(views) if view.split == split]):
        found = ", ".join(sorted({view.split for view in views})) or "none"
        raise MissingSplitError(str(folder), f"views of the {split} split", "none", f"it has {found}")
    given = [view.time for view in views if view.time is not None]
    got = f"{len(given)} of {len(views)}"
    refuse(len(given) not in (0, len(views)), str(folder), "a time in every frame or in none", got)
    times, moments = unit_times(given, given) if given else (None, ())
    cameras = cameras_of(views, folder, times)
    poses = torch.stack([view.pose for view in views])
    all_masks = [find_mask(folder, view.image, view.mask) for view in views]
    own, masks = [views[index] for index in chosen], [all_masks[index] for index in chosen]
    shapes = [(view.lens.width, view.lens.height) for view in own]
    images = load_images([view.image for view in own], options, masks=masks, shapes=shapes)
    if options.bounds == "ndc":
        placement = place_in_ndc(cameras, poses, points, options)
    elif placing is not None:
        placement = placing(poses)
    else:  # a few of all views tell what stands behind, so that all splits hear the same
        backdrop = Backdrop.of([view.image for view in views], all_masks)
        placement = place(cameras, poses, points, options=options, backdrop=backdrop, shown=_as_shown(views))
    moved = replace(cameras, camera_to_world=placed_poses(poses, placement), ndc=placement.ndc)[torch.tensor(chosen)]
    for view, size, expected in zip(own, images.sizes.tolist(), moved.size.tolist(), strict=True):
        _check_shape(view.image, size, expected)
    notes += placement.notes + moments + jump_notes(poses, [view.image for view in views])
    return Scene(
        name=folder.resolve().name,
        cameras=moved.resized(images.sizes),
        images=images,
        **placement.extent._asdict(),
        other=placement.other,
        split=split,
        source=str(folder),
        to_original=placement.to_original,
        notes=notes + mask_notes(images, masks),
        files=tuple(str(view.image) for view in own),
        depths=tuple(view.depth for view in own) if any(view.depth for view in views) else (),
    )


def _as_shown(views: Sequence[View]) -> Tensor:
    """(n, 3, 4) poses of the images as a person looks at them: turned by EXIF where the camera takes them as stored."""
    poses = torch.stack([view.pose for view in views])
    for pose, view in zip(poses, views, strict=True):
        for _ in range(stored_turns(view.image, (view.lens.width, view.lens.height))):
            pose[:, :2] = torch.stack([pose[:, 1], -pose[:, 0]], dim=1)
    return poses


def unposed_note(images: Sequence[Path]) -> tuple[str, ...]:
    """How many images lie beside those that have poses."""
    beside = {path for place in {path.parent for path in images} for path in place.iterdir()} - set(images)
    left = sorted(path.name for path in beside if path.suffix.lower() in PHOTO_ENDINGS)
    left = [name for name in left if not re.search("mask|depth|normal", name.lower())]
    of = f"{len(left)} of {len(left) + len(set(images))} images"
    return (f"warning: {of} have no pose and are left out, as {left[0]}",) if left else ()


def cameras_of(views: Sequence[View], folder: Path, times: Tensor | None = None) -> Cameras:
    """One batch of cameras, at `times` (n,) from 0 to 1. Pinholes among distorted cameras get zeros as coefficients;
    fisheye lenses among others make a mixed batch."""
    models: set[CameraModel] = {view.lens.model for view in views}
    bent: set[CameraModel] = {model for model in models if model != "pinhole"}
    model: CameraModel = next(iter(bent)) if bent else "pinhole"
    distortion = [view.lens.distortion for view in views]
    if len(models) > 1 and bent <= {"opencv", "fisheye"} and "fisheye" in bent:
        model, distortion = "mixed", [(*v.lens.distortion[:8], float(v.lens.model == "fisheye")) for v in views]
    elif len(bent) > 1 or (len(models) > 1 and not bent <= set(_PLAIN_AT_ZERO)):
        expected = "one kind of lens, or fisheye beside pinhole and opencv"
        raise InputError(str(folder), expected, " and ".join(sorted(models)), "split the scene")
    return Cameras(
        camera_to_world=torch.stack([view.pose for view in views]).float(),
        focal=torch.tensor([view.lens.focal for view in views], dtype=torch.float32),
        center=torch.tensor([view.lens.center for view in views], dtype=torch.float32),
        size=torch.tensor([(view.lens.width, view.lens.height) for view in views]),
        times=times,
        model=model,
        distortion=None if model == "pinhole" else torch.tensor(distortion),
    )


def _check_shape(image: Path, size: list[int], expected: list[int]) -> None:
    """Pictures may be smaller or larger than their camera says, but of the same shape."""
    if not same_shape(size, expected):
        turned = same_shape(size, expected[::-1])
        hint = "the picture is turned by 90 degrees" if turned else "its camera belongs to another picture"
        shape, got = (f"{width} x {height}" for width, height in (expected, size))
        raise InputError(str(image), f"a picture of its camera's shape, {shape}", got, hint)


# Jumps of the cameras. Where a thing looks the same from several sides (a label that is printed twice, a chair),
# structure from motion may take one side for the other: every feature of the thing fits, what lies behind it does not,
# and no error of reprojection tells. But the walk of a video does, which turns by a few degrees elsewhere: it jumps.

LEAST_PICTURES = 20
SMOOTH = 15.0  # degrees between neighbours, in the median: otherwise there is no walk to speak of
LARGE = 60.0  # degrees
TIMES = 8.0  # the median
MOST = 0.1  # of all steps: a walk with more is not smooth


class Jump(NamedTuple):
    """Between pictures `index` and `index + 1`."""

    index: int
    degrees: float


def camera_jumps(poses: Tensor) -> tuple[list[Jump], float]:
    """Jumps of a walk that is smooth elsewhere, and its median step in degrees; `poses` (n, 3 or 4, 4), in its order.

    >>> angle = torch.tensor([0.1 * k + (2.5 if k >= 12 else 0.0) for k in range(24)])
    >>> poses = torch.eye(4).repeat(24, 1, 1)
    >>> poses[:, 0, 2], poses[:, 2, 2] = angle.sin(), angle.cos()
    >>> jumps, step = camera_jumps(poses)
    >>> [(jump.index, round(jump.degrees)) for jump in jumps], round(step)
    ([(11, 149)], 6)
    """
    if poses.shape[0] < LEAST_PICTURES:
        return [], 0.0
    forward = torch.nn.functional.normalize(poses[:, :3, 2].double(), dim=-1)
    steps = (forward[1:] * forward[:-1]).sum(-1).clamp(-1.0, 1.0).arccos().rad2deg()
    median = float(steps.median())
    large = (steps > max(LARGE, TIMES * median)).nonzero()[:, 0].tolist()
    found = [Jump(index, float(steps[index])) for index in large]
    return ([] if median > SMOOTH or len(found) > MOST * steps.shape[0] else found), median


def jump_notes(poses: Tensor, files: Sequence[Path]) -> tuple[str, ...]:
    """What to say about pictures whose cameras jump, each folder in the order of its names."""
    found: list[tuple[Jump, list[int], float]] = []
    for folder in sorted({file.parent for file in files}):
        inside = [index for index, file in enumerate(files) if file.parent == folder]
        order = sorted(inside, key=lambda index: natural(files[index].name))
        jumps, median = camera_jumps(poses[order])
        found += [(jump, order, median) for jump in jumps]
    if not found:
        return ()
    jump, order, median = max(found, key=lambda one: one[0].degrees)
    first, second = (files[order[jump.index + k]].name for k in (0, 1))
    more = f" (and at {len(found) - 1} more places)" if len(found) > 1 else ""
    return (
        f"warning: the camera turns by {jump.degrees:.0f} degrees between {first} and {second}{more}, "
        f"elsewhere by {median:.0f}: where these are frames of one video, two sides of something were taken for one, "
        "and what lies behind it will not fit (nerfturbo process VIDEO then places frames by their neighbours alone)",
    )
