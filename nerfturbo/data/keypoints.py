"""What a COLMAP reconstruction knows about depth: rays through the features of pictures, and how far their points are.

A feature's weight falls with the reprojection error of its point, exp(-(error / mean error)^2): points that COLMAP is
sure of count most. Training takes points that at least two of its photos show: what a held-out photo alone vouches for
would be known from the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..ops.random import Stream, random_uniform
from ..types import Rays
from .cameras import similarity_scale, transform_points
from .images import open_upright
from .placement import require_plain
from .scene import Scene

if TYPE_CHECKING:
    from .formats.colmap import ColmapPoints

HINT = "leave loss.depth at 0"
MOST_DEPTHS = 1 << 19  # rays that depth maps give, of all images together
TRAINED_PHOTOS = 2  # that must show a point which training is to know of


@dataclass(frozen=True)
class Keypoints:
    """Rays of the training cameras through features, with the distance of what they show. Whoever knows depths from
    elsewhere, a depth camera, say, makes these and gives them to the scene."""

    rays: Rays  # (n,) with camera_indices
    distances: Tensor  # (n,) along the rays, in the scene's units
    weights: Tensor  # (n,) in [0, 1]
    points: Tensor | None = None  # (n,) int64, which point each shows, where it is known: several may show one

    def __post_init__(self) -> None:
        refuse(len(self.rays) == 0, "keypoints", "at least one feature that shows a point", "none", HINT)
        for name in ("distances", "weights", "points"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (len(self.rays),):
                raise InputError(name, f"one per ray, ({len(self.rays)},)", str(tuple(value.shape)))

    def __len__(self) -> int:
        return len(self.rays)

    def to(self, device: torch.device | str) -> Keypoints:
        points = None if self.points is None else self.points.to(device)
        return Keypoints(self.rays.to(device), self.distances.to(device), self.weights.to(device), points)

    def __getitem__(self, index: Tensor) -> Keypoints:
        """Some of them, by number or by a mask."""
        points = None if self.points is None else self.points[index]
        return Keypoints(self.rays[index], self.distances[index], self.weights[index], points)

    def of_views(self, indices: list[int]) -> Keypoints | None:
        """Those of some of the views, numbered as `Scene.select` numbers them; None where these have none."""
        if (photos := self.rays.camera_indices) is None:
            raise InputError("keypoints", "rays with camera_indices", "none")
        number = torch.full((max(int(photos.max()), *indices) + 1,), -1, dtype=photos.dtype, device=photos.device)
        number[indices] = torch.arange(len(indices), dtype=photos.dtype, device=photos.device)
        photos = number[photos.long()]
        if not bool((photos >= 0).any()):
            return None
        chosen = self[photos >= 0]
        return replace(chosen, rays=replace(chosen.rays, camera_indices=photos[photos >= 0]))

    def draw(self, n: int, *, seed: int, step: int | Tensor, first: int = 0) -> Keypoints:
        """Random ones of them, numbers first ... first + n - 1 of this step; never waits for the device."""
        device, stream = self.distances.device, Stream.KEYPOINTS
        uniform = random_uniform(n, seed=seed, stream=stream, step=step, first=first, device=device)[:, 0]
        return self[(uniform.double() * len(self)).long()]


def load_keypoints(scene: Scene, *, min_photos: int = 1) -> Keypoints:
    """The scene's own keypoints; else those of its depth maps; else those of the COLMAP reconstruction that it, or the
    poses of its photos, came from, of the points that at least `min_photos` of its photos show."""
    if scene.keypoints is not None:
        return scene.keypoints
    from .formats import colmap  # imported here: whoever only holds keypoints needs no files

    require_plain(scene.cameras.ndc, "loss.depth")
    if any(scene.depths):
        return _of_maps(scene)
    folder, model = _model_folder(scene.source)
    if (points := colmap.points_file(model)) is None or not scene.files:
        raise InputError(str(model), "points3D.bin or points3D.txt", "neither", HINT)
    cameras_file, images_file = colmap.model_files(model)
    photos, cameras = colmap.image_files(folder, images_file), colmap.read_cameras(cameras_file)
    numbers: dict[int, int] = {}
    sizes = torch.ones(len(scene), 2, dtype=torch.float64)  # of the images that features were looked for in
    for index, file in enumerate(scene.files):
        if (photo := photos.get(file)) is not None:
            numbers[photo.number] = index
            sizes[index] = torch.tensor([cameras[photo.camera].width, cameras[photo.camera].height])
    cloud = colmap.read_cloud(points)
    row = {number: position for position, number in enumerate(cloud.numbers.tolist())}
    parts = [torch.zeros(0, 4, dtype=torch.float64)]
    for image, pixels, numbered in colmap.read_features(images_file):
        if image in numbers:
            rows = torch.tensor([row.get(number, -1) for number in numbered.tolist()], dtype=torch.int64)
            index = torch.full_like(rows, numbers[image])
            part = torch.cat([index[:, None].double(), pixels, rows[:, None].double()], dim=-1)
            parts.append(part[rows >= 0])
    found = torch.cat(parts)
    shown = torch.bincount(found[:, 3].long(), minlength=len(cloud.positions))
    return _keypoints(scene, sizes, found[shown[found[:, 3].long()] >= min_photos], cloud)


def _of_maps(scene: Scene) -> Keypoints:
    """Rays through evenly spread pixels of depth maps, which hold depths along the camera's axis; 0 is none."""
    from .formats.posed import reading

    scale, parts = 1.0 if scene.to_original is None else similarity_scale(scene.to_original), []
    for index, (name, unit) in ((index, one) for index, one in enumerate(scene.depths) if one is not None):
        with reading(file := Path(name), "a depth camera"):  # a 16-bit image or an array
            values = np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.array(open_upright(file, turn=False))
            depths = torch.from_numpy(values.astype(np.float32)).nan_to_num(0.0, 0.0, 0.0).view(values.shape[:2])
        depths = depths * (unit / scale)
        step = math.ceil(math.sqrt(depths.numel() * len(scene) / MOST_DEPTHS))
        y, x = torch.meshgrid(*(torch.arange(step // 2, side, step) for side in depths.shape), indexing="ij")
        pixel = scene.cameras.size[index].cpu() / torch.tensor(depths.shape[::-1])
        places = (torch.stack([x, y], -1) + 0.5) * pixel
        found = torch.cat([torch.full_like(places[..., :1], index), places, depths[y, x, None]], -1).view(-1, 4)
        parts.append(found[found[:, 3] > 0.0])
    index, x, y, depths = torch.cat(parts).unbind(-1)
    rays = scene.cameras.to("cpu").rays(index.long(), x, y)
    forward = scene.cameras.forward.cpu()[index.long()]
    distances = depths / (rays.directions * forward).sum(-1).clamp(min=1e-3)
    return _kept(scene, Keypoints(rays, distances, torch.ones_like(distances)), x, y)


def _model_folder(source: str) -> tuple[Path, Path]:
    """The scene's folder and that of its reconstruction."""
    from .capture.process import is_unposed, poses_folder
    from .formats.colmap import find_model

    folder = Path(source).expanduser()
    if folder.exists() and (folder.is_file() or find_model(folder) is None) and is_unposed(folder):
        folder = poses_folder(folder)
    model = find_model(folder) if folder.is_dir() else None
    if model is None:
        raise InputError(source, "a COLMAP reconstruction, which knows points", "none", HINT)
    return folder, model


def _keypoints(scene: Scene, sizes: Tensor, found: Tensor, cloud: ColmapPoints) -> Keypoints:
    """`found` (n, 4): photo, x and y in a picture of `sizes` (photos, 2), row of the point in the cloud."""
    cameras, index, rows = scene.cameras.to("cpu"), found[:, 0].long(), found[:, 3].long()
    forward = None if scene.to_original is None else torch.linalg.inv(scene.to_original)
    points, known = transform_points(cloud.positions[rows], forward), cloud.errors[rows].clamp(min=0.0)
    x, y = (found[:, 1:3] * (cameras.size.double() / sizes)[index]).float().unbind(-1)
    rays = cameras.rays(index, x, y)
    distances = ((points - rays.origins.double()) * rays.directions.double()).sum(-1).float()
    weights = torch.exp(-((known / known.mean().clamp(min=1e-6)) ** 2)).float()
    return _kept(scene, Keypoints(rays, distances, weights, rows), x, y)


def _kept(scene: Scene, found: Keypoints, x: Tensor, y: Tensor) -> Keypoints:
    """Those at x and y of an image, in front of the cameras and not beyond the scene."""
    cameras, index = scene.cameras.to("cpu"), found.rays.camera_indices
    assert index is not None
    width, height = cameras.size[index].unbind(-1)
    kept = cameras.is_valid(index, x, y) & (x >= 0) & (x <= width) & (y >= 0) & (y <= height)
    return found[kept & (found.distances > scene.near) & (found.distances < scene.far)]
