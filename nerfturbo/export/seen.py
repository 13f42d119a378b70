"""Which points the cameras of training see: what they never saw, the field was free to fill with anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..evaluation.evaluate import choose_views
from ..rendering.image import RenderedImage
from ..rendering.model import NerfModel

MAX_CAMERAS = 64
MAX_PIXELS = 400  # of the longer side
SOLID = 0.5
CHUNK = 1 << 20


@dataclass(frozen=True)
class SeenDepths:
    """Cameras, evenly chosen and made small, with the picture each of them sees."""

    cameras: Cameras
    images: tuple[RenderedImage, ...]

    @classmethod
    def render(cls, model: NerfModel, cameras: Cameras, progress: Callable[[float], None] | None = None) -> SeenDepths:
        chosen = torch.tensor(choose_views(len(cameras), MAX_CAMERAS))
        small = cameras[chosen]
        small = small.scaled(min(1.0, MAX_PIXELS / int(small.size.max())))
        images = []
        for index in range(len(small)):
            images.append(model.render_image(small, index))
            if progress is not None:
                progress((index + 1) / len(small))
        return cls(small.to(model.device), tuple(images))

    @torch.no_grad()
    def sees(self, points: Tensor, margin: float) -> Tensor:
        """(n,) bool: whether points (n, 3) lie before, or less than `margin` behind, what some camera sees there."""
        parts = [self._part(points[start : start + CHUNK], margin) for start in range(0, points.shape[0], CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=points.device)

    def _part(self, points: Tensor, margin: float) -> Tensor:
        seen = torch.zeros(points.shape[0], dtype=torch.bool, device=points.device)
        for index, image in enumerate(self.images):
            which = torch.full((points.shape[0],), index, dtype=torch.int64, device=points.device)
            pixels, ahead = self.cameras.project(which, points)
            height, width = image.depth.shape
            x, y = pixels.nan_to_num(-1.0).clamp(-1.0, 1e6).floor().long().unbind(-1)
            inside = (ahead > 0.0) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
            surface = torch.where(image.opacity > SOLID, image.depth, torch.inf)
            reach = surface[y.clamp(0, height - 1), x.clamp(0, width - 1)] + margin
            seen |= inside & ((points - self.cameras.positions[index]).norm(dim=-1) < reach)
        return seen
