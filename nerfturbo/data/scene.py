"""Scene = cameras + images + bounds: what every loader returns; opening one by folder or name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..config import BUILTIN_PREFIX, BUILTIN_SCENES
from ..errors import InputError, did_you_mean, refuse
from ..ops.pixels import PixelMask
from ..types import Aabb
from .cameras import Cameras
from .images import ImagePool, pack_flags
from .lenses import valid_pixels
from .options import DEFAULTS, LoadOptions

if TYPE_CHECKING:
    from .keypoints import Keypoints

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
HOLD_OUT_EVERY = 8
UNPOSED = "photos or video"  # the format whose poses are found by COLMAP


class MissingSplitError(InputError):
    """The scene is in order but has no views in the split asked for."""


class IncompleteSplitError(MissingSplitError):
    """A file lists views of this split, but none of their images is there."""


class Decision(str):
    """A note about something that was chosen for a scene: what, how, why, and the flag that chooses otherwise."""

    what = choice = why = flag = ""

    @classmethod
    def of(cls, what: str, choice: str, why: str, flag: str) -> Decision:
        made = cls(f"{choice}: {why} ({flag} overrides)")
        made.what, made.choice, made.why, made.flag = what, choice, why, flag
        return made


class Extent(NamedTuple):
    """How far a scene reaches."""

    aabb: Aabb
    near: float
    far: float
    grid_levels: int

    @property
    def kind(self) -> Literal["bounded", "unbounded"]:
        return "bounded" if self.grid_levels == 1 else "unbounded"


@dataclass(frozen=True)
class Scene:
    """One split of a scene. Picture i was taken by camera i; everything of interest lies inside `aabb`, or, where there
    is no end and `grid_levels` > 1, in the box scaled by 2^(grid_levels - 1). `near` and `far` bound the distance along
    every ray, on top of the box. `to_original` leads back to the file's coordinates; `notes` say what was chosen."""

    name: str
    cameras: Cameras
    images: ImagePool
    aabb: Aabb
    near: float
    far: float
    split: str
    source: str  # a folder, or "builtin:NAME": what `load_scene` opens again
    grid_levels: int = 1
    to_original: Tensor | None = None  # (4, 4) float64 on the CPU; None: the coordinates are the file's own
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # of the pictures, where they come from files
    depths: tuple[tuple[str, float] | None, ...] = ()  # files of depth maps, and their unit in the file's coordinates
    keypoints: Keypoints | None = None  # depths that are known from elsewhere than COLMAP's points: a depth camera, say
    other: Extent | None = None  # what may be right instead, where bounds are in doubt: `train` tries both

    def __post_init__(self) -> None:
        if len(self.cameras) != len(self.images):
            raise InputError("images", f"{len(self.cameras)}, one per camera", str(len(self.images)))
        refuse(len(self.cameras) == 0, self.source, "at least one view", "none")
        if not 0.0 <= self.near < self.far < float("inf"):
            raise InputError("near, far", "0 <= near < far, finite", f"{self.near}, {self.far}")
        if self.cameras.device.type == "cpu" and not torch.equal(self.cameras.size, self.images.sizes.cpu()):
            raise InputError("images", "the sizes the cameras have", "others", "use Cameras.resized(images.sizes)")

    def __len__(self) -> int:
        return len(self.cameras)

    @property
    def has_alpha(self) -> bool:
        return self.images.channels == 4

    @property
    def extent(self) -> Extent:
        return Extent(self.aabb, self.near, self.far, self.grid_levels)

    def within(self, extent: Extent) -> Scene:
        """The same scene with these bounds, no longer in doubt."""
        return replace(self, **extent._asdict(), other=None)

    def to(self, device: torch.device | str) -> Scene:
        return replace(self, cameras=self.cameras.to(device), images=self.images.to(device))

    def used_pixels(self, index: int, device: torch.device | str | None = None) -> Tensor | None:
        """(H, W) bool, on the pictures' device unless given: pixels that the mask leaves and a ray meets; None: all."""
        place = self.images.device if device is None else torch.device(device)
        used, valid = self.images.image_mask(index), valid_pixels(self.cameras, index, place)
        if used is None or valid is None:
            return valid if used is None else used.to(place)
        return used.to(place) & valid

    def select(self, indices: list[int]) -> Scene:
        """Some of the views, in the order given; the pictures are copied."""
        chosen = torch.tensor(indices, dtype=torch.int64, device=self.cameras.device)
        files, depths = (tuple(one[i] for i in indices) if one else () for one in (self.files, self.depths))
        keypoints = None if self.keypoints is None else self.keypoints.of_views(indices)
        kept = {"files": files, "depths": depths, "keypoints": keypoints}
        return replace(self, cameras=self.cameras[chosen], images=self.images.select(indices), **kept)


def hold_out(scene: Scene, every: int) -> tuple[Scene, Scene]:
    """Split off views 0, every, 2 every, ...: (the rest, the held-out ones). Settings are chosen on the second."""
    got = f"{every} for a scene of {len(scene)} views"
    refuse(every < 2 or len(scene) < 2, "every", "an integer >= 2 and a scene of at least 2 views", got)
    views = range(len(scene))
    return scene.select([i for i in views if i % every]), scene.select([i for i in views if i % every == 0])


def farthest_distance(positions: Tensor, aabb: Aabb) -> float:
    """From any of the positions (n, 3) to the farthest corner of the box: no ray needs to go further."""
    low, high = aabb.tensor(positions.device)
    return float(torch.maximum((positions - low).abs(), (positions - high).abs()).norm(dim=-1).max())


def load_scene(
    source: str | Path, split: Split = "train", *, downscale: int | None = None, options: LoadOptions = DEFAULTS
) -> Scene:
    """Open a folder in any of `scene_formats`, or a built-in scene by its name ("toybox" or "builtin:toybox").
    `downscale` is short for that of the options: divide width and height of the images by this."""
    refuse(split not in SPLITS, "split", "one of " + ", ".join(SPLITS), repr(split))
    options = options if downscale is None else replace(options, downscale=downscale)
    text = str(source)
    if is_builtin(text):
        for flag, kind in (("ndc", "whose cameras all look one way"), ("unbounded", "without an end")):
            refuse(options.bounds == flag, flag, f"a capture {kind}", "a built-in scene")
        from .builtin import DEFAULT_RESOLUTION, builtin_scene

        name = text.removeprefix(BUILTIN_PREFIX)
        return builtin_scene(name, split, resolution=max(1, round(DEFAULT_RESOLUTION / options.downscale)))
    folder = Path(source).expanduser()
    if (found := recognise(folder)) is not None:
        check_links(folder, options.allow_outside)
        return found.load(folder, split, options)
    from .capture.photos import what_else

    got, hint = what_else(folder)
    looked_for = "; ".join(f"{entry.name}: {entry.looked_for}" for entry in scene_formats())
    got, hint = (got, hint) if hint else ("none of them", f"looked for {looked_for}")
    raise InputError(str(folder), "a scene in a known format", got, hint)


def open_scenes(source: str | Path, options: LoadOptions = DEFAULTS) -> tuple[Scene, Scene]:
    """(training views, test views): the test split, else the val split, else every 8th training view held out."""
    said: list[str] = []
    train = load_scene(source, "train", options=options)
    test = find_split(source, "test", options, said) or find_split(source, "val", options, said)
    train = replace(train, notes=(*train.notes, *(note for note in said if note not in train.notes)))
    if test is not None:
        return train, test
    refuse(len(train) < 2, str(source), "at least 2 views, one of them to score", len(train))
    return hold_out(train, HOLD_OUT_EVERY)


def find_split(source: str | Path, split: Split, options: LoadOptions, said: list[str]) -> Scene | None:
    """As `load_scene`; None where the scene has no such split, or none of its images; `said` hears of that."""
    try:
        scene = load_scene(source, split, options=options)
    except MissingSplitError as error:
        said += [f"warning: {split} split left out: {error}"] if isinstance(error, IncompleteSplitError) else []
        return None
    said += [note for note in scene.notes if note.startswith("warning: ")]
    return scene


def recognise(folder: Path) -> SceneFormat | None:
    """The first format that knows this folder or video file; one that is empty or half a reconstruction is an error."""
    from .capture.photos import is_video  # imported here: the loaders import this file
    from .formats.colmap import check_whole
    from .formats.exports import check_known

    if not is_video(folder):
        _check_folder(folder)
    found = next((scene_format for scene_format in scene_formats() if scene_format.recognise(folder)), None)
    if found is None or found.name == UNPOSED:
        check_whole(folder)
        for place in sorted(folder.glob("*/")) if found is None else ():
            if any(one.recognise(place) for one in scene_formats()[:-1]):
                got, hint = f"one in {place.name}", f"name that folder: {place}"
                raise InputError(str(folder), "a scene in a known format", got, hint)
        check_known(folder)
    return found


@dataclass(frozen=True)
class SceneFormat:
    """A format of scene folders: how it is recognised and who loads it. `scene_formats` lists them."""

    name: str
    looked_for: str
    recognise: Callable[[Path], bool]
    load: Callable[[Path, Split, LoadOptions], Scene]


def scene_formats() -> tuple[SceneFormat, ...]:
    """All of them. The first that recognises a folder loads it, so the more telling ones come first."""
    from .capture import process  # imported here: the loaders import this file
    from .formats import colmap, exports, llff, transforms

    return transforms.BLENDER, transforms.FORMAT, colmap.FORMAT, llff.FORMAT, *exports.FORMATS, process.FORMAT


def is_builtin(source: str) -> bool:
    """Whether `load_scene` renders this source itself: "builtin:NAME", or a name that no file or folder has."""
    return source.startswith(BUILTIN_PREFIX) or (source in BUILTIN_SCENES and not Path(source).exists())


def check_links(folder: Path, allow_outside: bool) -> None:
    """Refuse links in a folder to what lies outside: whoever made it may name any file of whoever opens it."""
    root, expected = Path(os.path.realpath(folder)), "a file inside the scene's folder"
    for place, folders, files in () if allow_outside else os.walk(folder):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path) and os.path.exists(path):
                target = Path(os.path.realpath(path))
                hint = "copy it there, or allow it by --allow-outside (allow_outside=True)"
                refuse(not target.is_relative_to(root), path, expected, f"a link to {target}", hint)


def _check_folder(folder: Path) -> None:
    got = "an empty folder"
    try:
        if next(folder.iterdir(), None) is not None:
            return
    except OSError as error:
        if folder.is_dir():
            raise InputError(str(folder), "a folder that can be read", error.strerror or str(error)) from None
        got = "a file" if folder.exists() else "no such folder"
    around = folder.is_file() and any(one.recognise(folder.parent) for one in scene_formats())
    hint = f"name its folder: {folder.parent}" if around else did_you_mean(str(folder), BUILTIN_SCENES)
    hint = hint or f"give a scene folder, photos, a video, or a built-in scene: {', '.join(BUILTIN_SCENES)}"
    raise InputError(str(folder), "a folder with a scene", got, hint)


def downscaled(scene: Scene, divisor: int) -> Scene:
    """Width and height of every image over `divisor`, each new pixel the mean of the old ones, of what is visible."""
    refuse(divisor < 1, "divisor", "an integer >= 1", divisor)
    if divisor == 1:
        return scene
    views = range(len(scene))
    images = ImagePool.from_images([_downscale(scene.images.image(index), divisor) for index in views])
    if scene.images.mask is not None:
        masks = zip(map(scene.images.image_mask, views), images.sizes.tolist(), strict=True)
        shares = (adaptive_avg_pool2d(mask.float()[None], (h, w))[0] for mask, (w, h) in masks if mask is not None)
        flags = ((share > 0.999).cpu().numpy() for share in shares)  # a small pixel counts where all of it counted
        images = replace(images, mask=PixelMask.of_words(pack_flags(flags)))
    return replace(scene, images=images.to(scene.images.device), cameras=scene.cameras.resized(images.sizes))


def _downscale(image: Tensor, divisor: int) -> Tensor:
    """(height, width, channels) float -> uint8; colours are weighted by alpha, so that invisible ones never show."""
    height, width = (max(1, round(side / divisor)) for side in image.shape[:2])
    channels = image.permute(2, 0, 1)
    if channels.shape[0] == 4:
        channels = torch.cat([channels[:3] * channels[3:], channels[3:]])
    small = adaptive_avg_pool2d(channels, (height, width))
    if small.shape[0] == 4:
        small = torch.cat([small[:3] / small[3:].clamp(min=1e-6), small[3:]])
    return (small.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).permute(1, 2, 0).contiguous()
