"""One client's image: small while the camera moves, finer when it rests; painted between two training steps."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras, rotations
from ..data.images import to_bytes
from ..data.placement import Ndc
from ..errors import InputError
from ..evaluation.images import Channel, channel_image
from ..rendering.image import render_view
from ..rendering.model import NerfModel
from ..sampling.grid import cropped
from ..types import Aabb

FIRST_PIXELS = 48 * 48
LEAST_PIXELS = 24 * 24
MOVING_SECONDS = 0.08  # a picture while the camera moves may take this long
RESTING_SECONDS = {True: 0.7, False: 5.0}  # while training, and of a saved run


@dataclass(frozen=True)
class View:
    """What a client looks at: a pinhole camera and what it shows."""

    camera_to_world: Tensor  # (3, 4)
    field_of_view_y: float  # radians
    aspect: float  # width over height
    channel: Channel = "color"
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
    """Pictures for one client, coarse to fine. A new view starts again; the same view is refined up to `largest`."""

    def __init__(self, largest: int = 640, ndc: Ndc | None = None) -> None:
        self.largest, self._ndc = largest, ndc
        self._view: View | None = None
        self.is_new = False  # nothing of the view was painted yet
        self._pixels, self._rate = 0, FIRST_PIXELS / MOVING_SECONDS
        self._finished_at: int | None = None  # the step whose scene the finest picture shows
        self._depths: tuple[float, float] | None = None
        self._estimators: dict[tuple[Aabb | None, int], Any] = {}  # of the last crop and step

    def look(self, view: View, *, moving: bool) -> None:
        """The client looks elsewhere, or at something else."""
        self._view, self._finished_at, self.is_new = view, None, True
        if moving:
            self._pixels = 0

    def wants(self, step: int) -> bool:
        """Whether there is anything to paint: a view not yet fine enough, or a scene that has changed since."""
        return self._view is not None and self._finished_at != step

    @torch.no_grad()
    def paint(self, model: NerfModel, step: int, *, training: bool) -> Tensor | None:
        """The next picture (height, width, 3) uint8; None where a crop holds nothing."""
        view = self._view
        if view is None:
            return None
        if self._pixels == 0:
            wanted = self._rate * MOVING_SECONDS
        else:
            wanted = min(self._rate * RESTING_SECONDS[training], 4.0 * self._pixels)
        full = self.largest**2 / max(view.aspect, 1.0 / view.aspect)
        pixels = min(full, max(LEAST_PIXELS, wanted))
        self.is_new, begun = False, time.perf_counter()
        picture = self._render(model, view, pixels, step)
        seconds = max(time.perf_counter() - begun, 1e-4)
        self._rate = min(pixels / seconds, 0.5 * (self._rate + pixels / seconds))  # slower at once, faster with care
        if pixels >= full or pixels <= 1.2 * self._pixels:
            self._finished_at = step
        self._pixels = int(pixels)
        return picture

    def _render(self, model: NerfModel, view: View, pixels: float, step: int) -> Tensor | None:
        height = max(4, round(math.sqrt(pixels / view.aspect)))
        width = max(4, round(height * view.aspect))
        camera = pinhole(view.camera_to_world[None], width, height, view.field_of_view_y)
        times = None if view.time is None else torch.tensor([view.time])
        camera = replace(camera, times=times, ndc=None if self._ndc is None else self._ndc.to(camera.device))
        try:
            if (view.crop, step) not in self._estimators:
                self._estimators = {(view.crop, step): cropped(model.estimator, view.crop)}
        except InputError:
            return None
        estimator = self._estimators[view.crop, step]
        background = torch.ones(3, device=model.device)
        image = render_view(model.field, estimator, camera, 0, settings=model.settings, background=background)
        if view.channel == "depth":
            solid = image.depth[image.opacity > 0.5]
            if solid.numel() > 1:
                low, high = solid.float().quantile(torch.tensor([0.01, 0.99], device=solid.device)).tolist()
                self._depths = (low, max(high, low + 1e-3))
        depths = self._depths or (model.bounds.near, model.bounds.far)
        shown = channel_image(view.channel, image, model, camera=camera, background=background, depths=depths)
        return to_bytes(shown).cpu()
