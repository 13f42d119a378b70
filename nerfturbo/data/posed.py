"""What the loaders of posed photos share: views to cameras, splits, pictures of any size, a place for the scene."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .cameras import CameraModel, Cameras
from .images import load_images
from .masks import find_mask, mask_notes
from .placement import Placement, place, placed_poses
from .scene import MissingSplitError, Scene, Split

TEST_EVERY = 8
_NO_DISTORTION = (0.0,) * 8
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

    def checked(self, what: str) -> Lens:
        """Itself, if its numbers can belong to a camera; `what` is what the error names."""
        if not (1 <= self.width <= 1 << 20 and 1 <= self.height <= 1 << 20):
            raise InputError(what, "a picture of 1 to 2^20 pixels a side", f"{self.width} x {self.height}")
        if not all(_SMALLEST_FOCAL < focal < _LARGEST for focal in self.focal):
            raise InputError(what, "focal lengths > 0", f"{self.focal[0]:.6g}, {self.focal[1]:.6g}")
        for value in (*self.center, *self.distortion):
            if not abs(value) < _LARGEST:
                raise InputError(what, "a principal point and distortion that are finite", f"{value:.6g}")
        is_plain = self.model in ("opencv", "fov") and not any(self.distortion)
        return replace(self, model="pinhole") if is_plain else self


@dataclass(frozen=True)
class View:
    """One picture with its camera."""

    image: Path
    pose: Tensor  # (3, 4) float64, camera to world, OpenGL axes
    lens: Lens
    split: Split
    mask: Path | None = None  # the one the file names, if it names any
    time: float | None = None  # in [0, 1]


def every_nth_is_test(index: int, n_views: int) -> Split:
    """The rule where a format knows no splits: views 0, 8, 16, ... are the test views."""
    return "test" if n_views > 1 and index % TEST_EVERY == 0 else "train"


def posed_scene(
    folder: Path,
    views: Sequence[View],
    split: Split,
    *,
    downscale: int = 1,
    points: Tensor | None = None,
    placing: Callable[[Tensor], Placement] | None = None,
    notes: tuple[str, ...] = (),
) -> Scene:
    """One split of the views. All of them decide about the place, so that every split stands in the same one.

    `placing` overrides the automatic placement; it gets the poses (n, 3, 4).
    """
    chosen = [index for index, view in enumerate(views) if view.split == split]
    if not chosen:
        found = ", ".join(sorted({view.split for view in views})) or "none"
        raise MissingSplitError(str(folder), f"views of the {split} split", "none", f"it has {found}")
    cameras = cameras_of(views, folder)
    poses = torch.stack([view.pose for view in views])
    masks = [find_mask(folder, views[index].image, views[index].mask) for index in chosen]
    images = load_images([views[index].image for index in chosen], downscale=downscale, masks=masks)
    has_alpha = images.channels == 4
    if placing is None:
        placement = place(cameras, poses, points, is_object=has_alpha)
    else:
        placement = placing(poses)
    placed = replace(cameras, camera_to_world=placed_poses(poses, placement))[torch.tensor(chosen)]
    for index, size, expected in zip(chosen, images.sizes.tolist(), placed.size.tolist(), strict=True):
        _check_shape(views[index].image, size, expected)
    return Scene(
        name=folder.resolve().name,
        cameras=placed.resized(images.sizes),
        images=images,
        aabb=placement.aabb,
        near=placement.near,
        far=placement.far,
        split=split,
        has_alpha=has_alpha,
        source=str(folder),
        grid_levels=placement.grid_levels,
        to_original=placement.to_original,
        notes=notes + placement.notes + mask_notes(images, masks),
    )


def cameras_of(views: Sequence[View], folder: Path) -> Cameras:
    """One batch of cameras, at the poses of the file. Pinholes among distorted cameras get zeros as coefficients."""
    models: set[CameraModel] = {view.lens.model for view in views}
    if len(models) > 1 and models != {"pinhole", "opencv"}:
        raise InputError(str(folder), "cameras of one kind of lens", " and ".join(sorted(models)), "split the scene")
    model: CameraModel = "opencv" if len(models) > 1 else next(iter(models))
    return Cameras(
        camera_to_world=torch.stack([view.pose for view in views]).float(),
        focal=torch.tensor([view.lens.focal for view in views], dtype=torch.float32),
        center=torch.tensor([view.lens.center for view in views], dtype=torch.float32),
        size=torch.tensor([(view.lens.width, view.lens.height) for view in views]),
        times=_times_of(views, folder),
        model=model,
        distortion=None if model == "pinhole" else torch.tensor([view.lens.distortion for view in views]),
    )


def _times_of(views: Sequence[View], folder: Path) -> Tensor | None:
    times = [view.time for view in views if view.time is not None]
    if not times:
        return None
    if len(times) != len(views):
        raise InputError(str(folder), "a time in every frame or in none", f"{len(times)} of {len(views)}")
    return torch.tensor(times, dtype=torch.float32)


def _check_shape(image: Path, size: list[int], expected: list[int]) -> None:
    """Pictures may be smaller or larger than their camera says, but of the same shape."""
    ratio, wanted = size[0] / size[1], expected[0] / expected[1]
    if abs(math.log(ratio / wanted)) > 0.02 + 1.0 / min(size):
        turned = abs(math.log(ratio * wanted)) < 0.02 + 1.0 / min(size)
        hint = "the picture is turned by 90 degrees" if turned else "its camera belongs to another picture"
        raise InputError(str(image), "a picture of its camera's shape, {} x {}".format(*expected), _times(size), hint)


def _times(size: list[int]) -> str:
    return "{} x {}".format(*size)
