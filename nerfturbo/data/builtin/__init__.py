"""Procedural scenes, rendered exactly by the project itself at any resolution and number of views.

>>> scene = builtin_scene("toybox", "test", resolution=50, n_views=2)
>>> len(scene), scene.images.image(0).shape, scene.source
(2, torch.Size([50, 50, 4]), 'builtin:toybox')
"""

import contextlib
import functools
import hashlib
import logging
import math
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...errors import BackendError, InputError, refuse
from ...files import cache_folder, replacing
from ...ops._dispatch import available
from ...types import Aabb
from ..cameras import Cameras, look_at
from ..images import ImagePool
from ..scene import BUILTIN_PREFIX, SPLITS, Scene, Split, farthest_distance
from .scenes import MOVING, Tables, check_name, pack, scene_at

_MAX_BYTES = 1 << 30  # larger sets are rendered each time rather than left on the user's disk


def cached_pictures(key: str, shape: tuple[int, ...], render: Callable[[], np.ndarray]) -> np.ndarray:
    """uint8 pictures of this shape, from the cache if a good copy is there, else rendered and kept."""
    if int(np.prod(shape)) > _MAX_BYTES:
        return render()
    try:
        path = cache_folder() / "scenes" / f"{key}.npz"
    except RuntimeError:  # no home folder
        return render()
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError):
        with np.load(path, allow_pickle=False) as archive:  # a zip file: reading checks a checksum
            pictures = archive["pictures"]
        if pictures.shape == shape and pictures.dtype == np.uint8:
            return pictures
    pictures = render()
    try:
        with replacing(path) as temporary:
            np.savez(temporary, pictures=pictures)
    except OSError as error:
        _warn_once(str(path.parent), error.strerror or str(error))
    return pictures


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    hint = "set NERFTURBO_CACHE to a folder that can be written"
    warnings.warn(f"cannot keep rendered images in {folder} ({reason}); {hint}", RuntimeWarning, stacklevel=2)


DEFAULT_SCENE = "toybox"
DEFAULT_RESOLUTION = 200
DEFAULT_VIEWS = {"train": 60, "val": 10, "test": 20}
CAMERA_DISTANCE = 4.0
FIELD_OF_VIEW = 0.6911112  # radians, that of the NeRF paper's Blender scenes
_RENDERER_VERSION = 1  # part of the cache key: raise it when the renderer's pictures change
_GOLDEN_ANGLE = math.pi * (3.0 - math.sqrt(5.0))
_LOWEST, _HIGHEST = 0.08, 0.94  # sine of the cameras' elevation
_log = logging.getLogger(__name__)


def builtin_scene(
    name: str = DEFAULT_SCENE,
    split: Split = "train",
    *,
    resolution: int = DEFAULT_RESOLUTION,
    n_views: int | None = None,
    seed: int = 0,
    all_around: bool = False,
) -> Scene:
    """One split of a built-in scene: RGBA pictures from cameras on the upper hemisphere, or `all_around`, the same ones
    every time. They are kept in the cache folder (NERFTURBO_CACHE), so that only the first call renders."""
    name = check_name(name)
    refuse(split not in SPLITS, "split", "one of " + ", ".join(SPLITS), repr(split))
    n_views = DEFAULT_VIEWS[split] if n_views is None else n_views
    for what, value in (("resolution", resolution), ("n_views", n_views)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            raise InputError(what, "an integer from 1 to 65536", repr(value))
    poses = view_poses(split, n_views, seed=seed, all_around=all_around)
    cameras = Cameras.pinhole(poses, width=resolution, height=resolution, field_of_view_x=FIELD_OF_VIEW)
    if name in MOVING:
        cameras = replace(cameras, times=view_times(split, n_views))
    images, aabb = ImagePool.from_images(torch.from_numpy(_pictures(name, cameras))), Aabb.cube(1.5)
    far = farthest_distance(cameras.positions, aabb)
    return Scene(name, cameras, images, aabb, near=0.0, far=far, split=split, source=BUILTIN_PREFIX + name)


def view_poses(split: Split, n_views: int, *, seed: int = 0, all_around: bool = False) -> Tensor:
    """(n, 3, 4): cameras on a golden-angle spiral over the upper hemisphere, or all around, looking at the middle. Each
    split turns its spiral by the one of several angles that stays farthest from the training views."""
    phase, lowest = _phase("train", seed, 0), -_HIGHEST if all_around else _LOWEST
    directions = _spiral(n_views, phase, lowest)
    if split != "train":
        training = _spiral(DEFAULT_VIEWS["train"], phase, lowest)
        candidates = [_spiral(n_views, _phase(split, seed, k), lowest) for k in range(32)]
        nearest = [float((candidate @ training.T).max()) for candidate in candidates]
        directions = candidates[nearest.index(min(nearest))]
    return look_at(CAMERA_DISTANCE * directions, directions.new_zeros(3)).float()


def view_times(split: Split, n_views: int) -> Tensor:
    """(n,): one moment per view, evenly over [0, 1] and in no order that the cameras follow; other splits see moments
    between those of training.

    >>> view_times("train", 5).sort().values.tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    ranks = (torch.arange(n_views, dtype=torch.float64) * math.sqrt(2.0)).frac().argsort().argsort().float()
    return ranks / max(1, n_views - 1) if split == "train" else (ranks + 0.5) / n_views


def _spiral(n: int, phase: float, lowest: float) -> Tensor:
    k = torch.arange(n, dtype=torch.float64)
    height = lowest + (_HIGHEST - lowest) * (k + 0.5) / n
    ring, angle = (1.0 - height * height).sqrt(), _GOLDEN_ANGLE * k + phase
    return torch.stack([ring * angle.cos(), ring * angle.sin(), height], dim=-1)


def _phase(split: str, seed: int, candidate: int) -> float:
    """An angle that no two splits, seeds or candidates share."""
    digest = hashlib.sha256(f"{split} {seed} {candidate}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2.0**48 * 2.0 * math.pi


def _pictures(name: str, cameras: Cameras) -> np.ndarray:
    key = hashlib.sha256(str(_RENDERER_VERSION).encode())
    tables = [array for one in _tables(name, cameras) for array in one]
    for array in (*tables, cameras.camera_to_world.numpy(), cameras.focal.numpy(), cameras.size.numpy()):
        key.update(np.ascontiguousarray(array).tobytes())
    shape = (len(cameras), *cameras.size[0].tolist(), 4)
    return cached_pictures(f"{name}-{key.hexdigest()[:24]}", shape, lambda: _render(name, cameras))


def _render(name: str, cameras: Cameras) -> np.ndarray:
    if not available("numba"):
        raise BackendError("built-in scenes are rendered with numba, which is not installed; pip install numba")
    size = int(cameras.size[0, 0])
    _log.info("rendering %d views of %s at %dx%d (compiles for seconds the first time)", len(cameras), name, size, size)
    from .render import render_views

    poses, focal = cameras.camera_to_world.double().numpy(), float(cameras.focal[0, 0])
    return render_views(_tables(name, cameras), poses, focal, size)


def _tables(name: str, cameras: Cameras) -> list[Tables]:
    """The packed scene: one for all views, or one for each where it moves."""
    if name not in MOVING or cameras.times is None:
        return [pack(scene_at(name))]
    return [pack(scene_at(name, time)) for time in cameras.times.tolist()]
