"""One client's image: small while the camera moves, finer when it rests; painted between two training steps."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras, rotations
from ..data.images import to_bytes
from ..data.scene import Scene
from ..errors import InputError, is_out_of_memory
from ..evaluation.camera_path import pose_distances, spread_of
from ..evaluation.evaluate import WHITE, truth_image
from ..evaluation.images import CHANNELS, SOLID, Channel, channel_image, depth_range, error_colors, pixels_of, seen_in
from ..rendering.image import RenderedImage, render_view
from ..rendering.model import NerfModel
from ..sampling.grid import cropped
from ..types import Aabb

FIRST_PIXELS = 48 * 48
LEAST_PIXELS = 24 * 24
MOVING_SECONDS = 0.08  # a picture while the camera moves may take this long
RESTING_SECONDS = {True: 0.7, False: 5.0}  # while training, and of a saved run
Shown = Channel | Literal["error"]
SHOWN: tuple[Shown, ...] = (*CHANNELS, "error")
PHOTO_SIDE = 64  # pixels of the longer side of the render that says what a photo sees
BEHIND = 0.05  # of the distance: points farther behind that are hidden from the photo
UNSEEN = 0.5  # grey of what the photo does not show


@dataclass(frozen=True)
class View:
    """What a client looks at: a pinhole camera and what it shows."""

    camera_to_world: Tensor  # (3, 4)
    field_of_view_y: float  # radians
    aspect: float  # width over height
    channel: Shown = "color"
    crop: Aabb | None = None
    time: float | None = None


def pose_of(wxyz: np.ndarray, position: np.ndarray) -> Tensor | None:
    """(3, 4) with our axes from viser's quaternion (OpenCV axes) and position; None where they are not a pose."""
    turn, place = torch.tensor(wxyz, dtype=torch.float64), torch.tensor(position, dtype=torch.float64)
    length = torch.linalg.vector_norm(turn)
    if turn.shape != (4,) or place.shape != (3,) or not (1e-6 <= length < math.inf and place.abs().max() <= 1e6):
        return None
    axes = rotations(turn[None] / length)[0] * torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    return torch.cat([axes, place[:, None]], dim=1).float()


def pinhole(poses: Tensor, width: int, height: int, field_of_view_y: float) -> Cameras:
    """Pinhole cameras by their vertical angle, as browsers have it."""
    angle = 2.0 * math.atan(math.tan(0.5 * field_of_view_y) * width / height)
    return Cameras.pinhole(poses, width=width, height=height, field_of_view_x=angle)


class TimeShare:
    """Lets work happen only so often that it takes no more than a share of the time."""

    def __init__(self) -> None:
        self._next = 0.0

    def ready(self, now: float) -> bool:
        return now >= self._next

    def spent(self, seconds: float, share: float, now: float, *, least: float = 0.0) -> None:
        """Work of `seconds` ended at `now`: wait until it is `share` of the time, and at least `least` seconds."""
        self._next = now + max(least, seconds * (1.0 / max(share, 1e-3) - 1.0))


class Painter:
    """Pictures for one client, coarse to fine. A new view starts again; the same view is refined up to `largest`.
    `photos`, training's first, are what errors are shown against; while it `trains`, their cameras may be learned."""

    def __init__(self, largest: int = 640, photos: tuple[Scene, ...] = (), *, trains: bool = False) -> None:
        self.largest, self.photos, self.trains = largest, photos, trains
        self._most, self._short = (largest, math.inf), ""  # pixels that memory is enough for, and what is said of it
        self.note = ""  # what there is to say about the last picture
        self._view: View | None = None
        self.is_new = False  # nothing of the view was painted yet
        self._pixels, self._rate = 0, FIRST_PIXELS / MOVING_SECONDS
        self._finished_at: int | None = None  # the step whose scene the finest picture shows
        self._depths: tuple[float, float] | None = None
        self._estimators: dict[tuple[Aabb | None, int], Any] = {}  # of the last crop and step
        self._photo: dict[tuple[int, int], Tensor] = {}  # the last, by split and index
        self._sight: dict[tuple[Any, ...], RenderedImage] = {}  # what it sees of a crop at a step

    def look(self, view: View, *, moving: bool) -> None:
        """The client looks elsewhere, or at something else."""
        self._view, self._finished_at, self.is_new = view, None, True
        if moving:
            self._pixels = 0

    def wants(self, step: int) -> bool:
        """Whether there is anything to paint: a view not yet fine enough, or a scene that has changed since."""
        return self._view is not None and self._finished_at != step

    def paint(self, model: NerfModel, step: int, *, training: bool) -> Tensor:
        """The next picture (height, width, 3) uint8."""
        view = self._view
        assert view is not None  # `wants` says so
        finer = min(self._rate * RESTING_SECONDS[training], 4.0 * self._pixels)
        wanted = finer if self._pixels else self._rate * MOVING_SECONDS
        if self._most[0] != self.largest:  # another size is asked for: memory may do now
            self._most, self._short = (self.largest, math.inf), ""
        full = min(self._most[1], self.largest**2 / max(view.aspect, 1.0 / view.aspect))
        pixels = min(full, max(LEAST_PIXELS, wanted))
        self.is_new, begun = False, time.perf_counter()
        height = max(4, round(math.sqrt(pixels / view.aspect)))
        size = max(4, round(height * view.aspect)), height
        try:
            picture = self.render(model, view, size, step)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            picture = None
        if picture is None:  # outside of `except`, whose error keeps what was computed alive
            self._estimators, self._photo, self._sight = {}, {}, {}
            torch.cuda.empty_cache()
            self._most, self._pixels = (self.largest, max(1.0, 0.25 * pixels)), 0
            self._short = f"Out of memory at {size[0]} x {height} pixels: smaller images."
            if pixels > LEAST_PIXELS:
                return self.paint(model, step, training=training)
            self.note, self._finished_at = self._short, step
            return torch.full((height, size[0], 3), 255, dtype=torch.uint8)
        self.note = f"{self.note} {self._short}".strip()
        seconds = max(time.perf_counter() - begun, 1e-4)
        self._rate = min(pixels / seconds, 0.5 * (self._rate + pixels / seconds))  # slower at once, faster with care
        if pixels >= full or pixels <= 1.2 * self._pixels:
            self._finished_at = step
        self._pixels = int(pixels)
        return picture

    @torch.no_grad()
    def render(self, model: NerfModel, view: View, size: tuple[int, int], step: int) -> Tensor:
        """A view as a picture (height, width, 3) uint8 of `size`, width and height; white where a crop is empty."""
        camera, self.note = pinhole(view.camera_to_world[None], *size, view.field_of_view_y), ""
        times = None if view.time is None else torch.tensor([view.time])
        ndc = self.photos[0].cameras.ndc if self.photos else None
        camera = replace(camera, times=times, ndc=None if ndc is None else ndc.to(camera.device))
        try:
            if (view.crop, step) not in self._estimators:
                self._estimators = {(view.crop, step): cropped(model.estimator, view.crop, what="crop")}
        except InputError as error:
            self.note = f"The crop box is empty: {error.hint}."
            return torch.full((size[1], size[0], 3), 255, dtype=torch.uint8)
        image = self._render(model, view, camera, step)
        if view.channel == "error":
            shown = self._error(model, view, camera, image, step)
        else:
            if view.channel == "depth":
                self._depths = depth_range(image.depth[image.opacity > SOLID]) or self._depths
            white, depths = torch.ones(3, device=model.device), self._depths or (model.bounds.near, model.bounds.far)
            shown = channel_image(view.channel, image, model, camera=camera, background=white, depths=depths)
        return to_bytes(shown).cpu()

    def _render(self, model: NerfModel, view: View, camera: Cameras, step: int) -> RenderedImage:
        options = {"settings": model.settings, "background": torch.ones(3, device=model.device)}
        return render_view(model.field, self._estimators[view.crop, step], camera, 0, **options)

    def _error(self, model: NerfModel, view: View, camera: Cameras, image: RenderedImage, step: int) -> Tensor:
        """(height, width, 3): each pixel against where its surface lies in the nearest photo; grey where hidden."""
        cameras = [scene.cameras for scene in self.photos]
        if self.trains and model.photos is not None:
            cameras = [model.photos.refined(cameras[0]), *map(model.photos.new_views, cameras[1:])]
        split, index = nearest_photo(cameras, view)
        scene, device = self.photos[split], model.device
        self.note = f"Error against {scene.split} photo {index}, the nearest; grey: not seen there."
        if (split, index) not in self._photo:
            self._photo = {(split, index): truth_image(scene, index, WHITE, device)}
        taken, key = cameras[split][index].to(device), (split, index, view.crop, step)
        small = replace(taken.scaled(min(1.0, PHOTO_SIDE / int(taken.size.max()))), times=camera.times)
        if key not in self._sight:
            self._sight = {key: self._render(model, view, small, step)}
        rays, solid = camera.to(device).image_rays(0), image.opacity.reshape(-1) > SOLID
        reach = torch.where(solid, image.depth.reshape(-1).float(), model.bounds.far)
        points = rays.origins + rays.directions * reach[:, None]
        # In a bent box distances are not those of the world: there nothing is hidden.
        margin = BEHIND * (points - taken.positions[0]).norm(dim=-1) if taken.ndc is None else torch.inf
        seen = seen_in(self._sight[key], small, points, margin)
        row, column, _ = pixels_of(taken, points)
        errors = error_colors(image.rgb, self._photo[split, index][row, column].view_as(image.rgb))
        return torch.where(seen.view(*image.depth.shape, 1), errors, UNSEEN)


def nearest_photo(splits: list[Cameras], view: View) -> tuple[int, int]:
    """Split and index of the camera nearest to a view. To turn by a radian is as far as to move by the spread of the
    cameras; a photo of another time is farther than one of another place."""
    best = []
    for split, cameras in enumerate(splits):
        poses, spread = cameras.camera_to_world.cpu(), spread_of(cameras.positions)
        distance = pose_distances(poses, view.camera_to_world[None], spread)
        if cameras.times is not None and view.time is not None:
            distance = distance + 100.0 * (cameras.times.cpu() - view.time).abs()
        best.append((float(distance.min()), split, int(distance.argmin())))
    return min(best)[1:]
