"""Scene = cameras + pictures + bounds: what every loader returns; and opening one by folder or name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Aabb
from .cameras import Cameras
from .documents import paths_outside
from .images import ImagePool
from .lens_table import valid_pixels
from .ndc import in_ndc
from .photos import VIDEO_ENDINGS, find_raw
from .picture_files import CONVERT_RAW

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
BUILTIN_PREFIX = "builtin:"
UNPOSED = "photos or video"  # the format whose poses are found by COLMAP


class MissingSplitError(InputError):
    """The scene is in order but has no views in the split asked for."""


@dataclass(frozen=True)
class Scene:
    """One split of a scene. Picture i was taken by camera i; everything of interest lies inside `aabb`.

    `near` and `far` bound the distance along every ray, on top of the box. A scene without an end has `grid_levels`
    > 1: everything lies inside the box scaled by 2^(grid_levels - 1). `to_original` leads back to the file's
    coordinates, and `notes` say what was recognised and chosen.
    """

    name: str
    cameras: Cameras
    images: ImagePool
    aabb: Aabb
    near: float
    far: float
    split: str
    has_alpha: bool
    source: str  # a folder, or "builtin:NAME": what `load_scene` opens again
    grid_levels: int = 1
    to_original: Tensor | None = None  # (4, 4) float64 on the CPU; None: the coordinates are the file's own
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # of the pictures, where they come from files

    def __post_init__(self) -> None:
        if len(self.cameras) != len(self.images):
            raise InputError("images", f"{len(self.cameras)}, one per camera", str(len(self.images)))
        if len(self.cameras) == 0:
            raise InputError(self.source, "at least one view", "none")
        if not 0.0 <= self.near < self.far < float("inf"):
            raise InputError("near, far", "0 <= near < far, finite", f"{self.near}, {self.far}")
        if self.cameras.device.type == "cpu" and not torch.equal(self.cameras.size, self.images.sizes.cpu()):
            raise InputError("images", "the sizes the cameras have", "others", "use Cameras.resized(images.sizes)")
        if self.has_alpha != (self.images.channels == 4):
            raise InputError("has_alpha", "True exactly for 4 channels", f"{self.has_alpha}, {self.images.channels}")

    def __len__(self) -> int:
        return len(self.cameras)

    def to(self, device: torch.device | str) -> Scene:
        return replace(self, cameras=self.cameras.to(device), images=self.images.to(device))

    def used_pixels(self, index: int, device: torch.device | str | None = None) -> Tensor | None:
        """(H, W) bool on a device (the pictures' own unless given): the pixels of a picture that its mask leaves and
        that a ray leads to; None where all are."""
        place = self.images.device if device is None else torch.device(device)
        used, valid = self.images.image_mask(index), valid_pixels(self.cameras, index, place)
        if used is None or valid is None:
            return valid if used is None else used.to(place)
        return used.to(place) & valid

    def select(self, indices: list[int]) -> Scene:
        """Some of the views, in the order given; the pictures are copied."""
        chosen = torch.tensor(indices, dtype=torch.int64, device=self.cameras.device)
        files = tuple(self.files[index] for index in indices) if self.files else ()
        return replace(self, cameras=self.cameras[chosen], images=self.images.select(indices), files=files)


def hold_out(scene: Scene, every: int) -> tuple[Scene, Scene]:
    """Split off views 0, every, 2 every, ...: (the rest, the held-out ones). Settings are chosen on the second."""
    if every < 2 or len(scene) < 2:
        got = f"{every} for a scene of {len(scene)} views"
        raise InputError("every", "an integer >= 2 and a scene of at least 2 views", got)
    views = range(len(scene))
    return scene.select([i for i in views if i % every]), scene.select([i for i in views if i % every == 0])


def farthest_distance(positions: Tensor, aabb: Aabb) -> float:
    """From any of the positions (n, 3) to the farthest corner of the box: no ray needs to go further."""
    low, high = aabb.tensor(positions.device)
    return float(torch.maximum((positions - low).abs(), (positions - high).abs()).norm(dim=-1).max())


def load_scene(
    source: str | Path,
    split: Split = "train",
    *,
    downscale: int = 1,
    allow_outside: bool = False,
    bounds: Literal["auto", "bounded", "unbounded"] = "auto",
    ndc: bool = False,
) -> Scene:
    """Open a folder in any format of `FORMATS`, or a built-in scene by its name ("toybox" or "builtin:toybox").

    `downscale` shrinks the pictures that many times, each new pixel the mean of the old ones. A file that names
    pictures outside its folder is refused unless `allow_outside`. `bounds` says whether the scene has an end, where
    its own signs (alpha, points, the file's box) are not to decide. `ndc` bends a capture whose cameras all look one
    way into normalised device coordinates.
    """
    if split not in SPLITS:
        raise InputError("split", "one of " + ", ".join(SPLITS), repr(split))
    if isinstance(downscale, bool) or not isinstance(downscale, int) or downscale < 1:
        raise InputError("downscale", "an integer >= 1", repr(downscale))
    text = str(source)
    if is_builtin(text):
        if ndc or bounds == "unbounded":
            what, expected = ("ndc", "whose cameras all look one way") if ndc else ("bounds", "without an end")
            raise InputError(what, f"a capture {expected}", "a built-in scene")
        from .builtin import DEFAULT_RESOLUTION, builtin_scene

        name = text.removeprefix(BUILTIN_PREFIX)
        return builtin_scene(name, split, resolution=max(1, round(DEFAULT_RESOLUTION / downscale)))
    folder = Path(source).expanduser()
    found = recognise(folder)
    if found is not None:
        from .placement import bounding  # imports this file

        with paths_outside(allow_outside), in_ndc(ndc), bounding(bounds):
            scene = found.load(folder, split, downscale)
        if ndc and scene.cameras.ndc is None:
            raise InputError("ndc", "a capture with depths, whose cameras look one way", f"a {found.name} scene")
        return scene
    if raw := find_raw(folder):
        raise InputError(str(folder), "a scene in a known format", f"{', '.join(raw)} files", CONVERT_RAW)
    looked_for = "; ".join(f"{scene_format.name}: {scene_format.looked_for}" for scene_format in FORMATS)
    raise InputError(str(folder), "a scene in a known format", "none of them", f"looked for {looked_for}")


def recognise(folder: Path) -> SceneFormat | None:
    """The first format that knows this folder, or this video file; one that holds nothing, or half of a reconstruction,
    is an error."""
    if folder.suffix.lower() not in VIDEO_ENDINGS or not folder.is_file():
        _check_folder(folder)
    found = next((scene_format for scene_format in FORMATS if scene_format.recognise(folder)), None)
    if found is None or found.name == UNPOSED:
        from .colmap import check_whole  # imported here: the loaders import this file

        check_whole(folder)
    return found


@dataclass(frozen=True)
class SceneFormat:
    """A format of scene folders: how it is recognised and who loads it."""

    name: str
    looked_for: str
    recognise: Callable[[Path], bool]
    load: Callable[[Path, Split, int], Scene]


def _load_blender(folder: Path, split: Split, downscale: int) -> Scene:
    from .blender import load_blender  # imported here: the loaders import this file

    return load_blender(folder, split, downscale=downscale)


def _load_transforms(folder: Path, split: Split, downscale: int) -> Scene:
    from .transforms import load_transforms

    return load_transforms(folder, split, downscale=downscale)


def _load_colmap(folder: Path, split: Split, downscale: int) -> Scene:
    from .colmap import load_colmap

    return load_colmap(folder, split, downscale=downscale)


def _is_colmap(folder: Path) -> bool:
    from .colmap import find_model

    return find_model(folder) is not None


def _load_llff(folder: Path, split: Split, downscale: int) -> Scene:
    from .llff import load_llff

    return load_llff(folder, split, downscale=downscale)


def _is_unposed(source: Path) -> bool:
    from .unposed import is_unposed

    return is_unposed(source)


def _load_unposed(source: Path, split: Split, downscale: int) -> Scene:
    from .unposed import load_unposed

    return load_unposed(source, split, downscale=downscale)


# The first that recognises the folder loads it, so the more telling ones come first.
FORMATS: tuple[SceneFormat, ...] = (
    SceneFormat(
        name="Blender",
        looked_for="transforms_train.json",
        recognise=lambda folder: any((folder / f"transforms_{split}.json").is_file() for split in SPLITS),
        load=_load_blender,
    ),
    SceneFormat(
        name="instant-ngp / nerfstudio",
        looked_for="transforms.json",
        recognise=lambda folder: (folder / "transforms.json").is_file(),
        load=_load_transforms,
    ),
    SceneFormat(
        name="COLMAP",
        looked_for="sparse/0/cameras.bin or .txt",
        recognise=_is_colmap,
        load=_load_colmap,
    ),
    SceneFormat(
        name="LLFF",
        looked_for="poses_bounds.npy",
        recognise=lambda folder: (folder / "poses_bounds.npy").is_file(),
        load=_load_llff,
    ),
    SceneFormat(
        name=UNPOSED,
        looked_for="JPEG, PNG or WebP files",
        recognise=_is_unposed,
        load=_load_unposed,
    ),
)


def is_builtin(source: str) -> bool:
    """Whether `load_scene` renders this source itself: "builtin:NAME", or a name that no file or folder has."""
    from .builtin import builtin_names

    return source.startswith(BUILTIN_PREFIX) or (source in builtin_names() and not Path(source).exists())


def _check_folder(folder: Path) -> None:
    from .builtin import builtin_names

    hint = "give a scene folder, a folder of photos, a video, or one of the built-in scenes: " + ", ".join(
        builtin_names()
    )
    if not folder.exists():
        raise InputError(str(folder), "a folder with a scene", "no such folder", hint)
    if not folder.is_dir():
        raise InputError(str(folder), "a folder with a scene", "a file", hint)
    try:
        empty = next(folder.iterdir(), None) is None
    except OSError as error:
        raise InputError(str(folder), "a folder that can be read", error.strerror or str(error)) from None
    if empty:
        raise InputError(str(folder), "a folder with a scene", "an empty folder", hint)
