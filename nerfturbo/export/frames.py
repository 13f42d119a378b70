"""Frames of a camera path: colour, depth, opacity and normals as pictures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..evaluation.channels import Channel, channel_picture, to_bytes
from ..evaluation.evaluate import choose_views
from ..rendering.frame import FrameRenderer
from ..rendering.image import RenderedImage, render_view, supersampled
from ..rendering.model import NerfModel
from ..sampling.crop import cropped
from ..sampling.occupancy_grid import OccupancyGrid
from ..types import Aabb

PROBE_PIXELS = 64  # of the longer side of the small pictures that decide the range of depths
SOLID = 0.5  # opacity from which a pixel has a depth worth showing


@dataclass(frozen=True)
class Look:
    """What frames show."""

    channels: tuple[Channel, ...] = ("color",)
    background: tuple[float, float, float] = (1.0, 1.0, 1.0)
    crop: Aabb | None = None
    depths: tuple[float, float] | None = None  # shown as light and as dark; None: those of the path


def recorded_size(cameras: Cameras) -> tuple[int, int] | None:
    """Width and height of the frames, where one recorded graph can make the rays of all of them: pinhole cameras of
    one size, in plain space."""
    sizes = {(width, height) for width, height in cameras.size.tolist()}
    return sizes.pop() if cameras.model == "pinhole" and cameras.ndc is None and len(sizes) == 1 else None


class FrameMaker:
    """Renders frames of a path one by one; on a GPU as one recorded graph where the cameras allow it."""

    def __init__(self, model: NerfModel, cameras: Cameras, look: Look) -> None:
        self.model, self.cameras, self.look = model, cameras, look
        self.estimator = cropped(model.estimator, look.crop, what="--crop")
        self._background = torch.tensor(look.background, device=model.device)
        self._depths = look.depths
        self._fast: FrameRenderer | None = None
        size = recorded_size(cameras)
        if size is not None and isinstance(self.estimator, OccupancyGrid) and model.device.type == "cuda":
            width, height = size
            self._fast = FrameRenderer(
                model.field,
                self.estimator,
                width=width,
                height=height,
                settings=model.settings,
                background=self._background,
            )

    def __len__(self) -> int:
        return len(self.cameras)

    def picture(self, index: int) -> RenderedImage:
        """Colours, opacity and depth of one frame, in floats."""
        return supersampled(lambda shift: self._shifted(index, shift), self.model.config.render.eval_rays)

    def _shifted(self, index: int, shift: tuple[float, float]) -> RenderedImage:
        """The frame through points a little beside the pixels' centres."""
        cameras, time = self.cameras, None if self.cameras.times is None else float(self.cameras.times[index])
        if shift != (0.0, 0.0):
            cameras = cameras.looking_past(shift)
        if self._fast is None:
            return self._render(cameras, index)
        return self._fast.render(cameras.camera_to_world[index], cameras.focal[index], cameras.center[index], time=time)

    def frame(self, index: int) -> dict[Channel, Tensor]:
        """One frame as pictures (height, width, 3) uint8 on the CPU, by channel."""
        image = self.picture(index)
        pictures: dict[Channel, Tensor] = {}
        for channel in self.look.channels:
            rays = self.cameras[index].to(self.model.device).image_rays(0) if channel == "normal" else None
            depths = self.depths if channel == "depth" else (0.0, 1.0)
            shown = channel_picture(
                channel, image, self._background, depths=depths, rays=rays, field=self.model.field, grid=self.model.grid
            )
            pictures[channel] = to_bytes(shown)
        return pictures

    @property
    def depths(self) -> tuple[float, float]:
        """The range of depths of the whole path, so that colours mean the same in every frame."""
        if self._depths is None:
            self._depths = self._measure_depths()
        return self._depths

    def _render(self, cameras: Cameras, index: int) -> RenderedImage:
        model = self.model
        return render_view(
            model.field, self.estimator, cameras, index, settings=model.settings, background=self._background
        )

    def _measure_depths(self) -> tuple[float, float]:
        found = []
        for index in choose_views(len(self.cameras), 8):
            camera = self.cameras[index]
            image = self._render(camera.scaled(min(1.0, PROBE_PIXELS / int(camera.size.max()))), 0)
            found.append(image.depth[image.opacity > SOLID].float().cpu())
        depths = torch.cat(found)
        if depths.numel() < 2:
            return 0.0, self.model.bounds.far
        low, high = depths.quantile(torch.tensor([0.01, 0.99])).tolist()
        return low, max(high, low + 1e-3)
