"""A quick look at one view while training runs: every k-th pixel of it, so that the look is cheap."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ..data.images import save_image
from ..data.scene import Scene
from ..rendering.image import render_image
from ..rendering.model import NerfModel
from .evaluate import WHITE, truth_image
from .metrics import psnr

FIRST_RAYS = 4096
AIM_SECONDS = 0.5


class Preview:
    """Renders one view on demand, as finely as `AIM_SECONDS` allow, next to its truth."""

    def __init__(self, scene: Scene, index: int = 0) -> None:
        self._scene, self._index = scene, index
        self._width, self._height = (int(side) for side in scene.cameras.size[index])
        self._stride = self._stride_for(FIRST_RAYS)

    def _stride_for(self, n_rays: float) -> int:
        return max(1, round((self._width * self._height / max(n_rays, 64.0)) ** 0.5))

    @torch.no_grad()
    def render(self, model: NerfModel, path: Path) -> float:
        """Write the picture (truth left, render right) and return its PSNR over the rendered pixels."""
        start = time.perf_counter()
        stride = self._stride
        rows = torch.arange(stride // 2, self._height, stride)
        columns = torch.arange(stride // 2, self._width, stride)
        pixels = (rows[:, None] * self._width + columns).reshape(-1)
        rays = self._scene.cameras.image_rays(self._index)[pixels.to(self._scene.cameras.device)]
        image = render_image(
            model.field,
            model.grid,
            rays.to(model.device),
            height=len(rows),
            width=len(columns),
            settings=model.settings,
            background=torch.tensor(WHITE, device=model.device),
        )
        render = image.rgb.cpu()
        truth = truth_image(self._scene, self._index).cpu()[rows[:, None], columns]
        self._stride = self._stride_for(len(pixels) * AIM_SECONDS / (time.perf_counter() - start))
        both = torch.cat([truth, render], dim=1)
        large = both.repeat_interleave(stride, 0).repeat_interleave(stride, 1)
        temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")  # whoever watches the file never sees half of it
        save_image(temporary, large)
        temporary.replace(path)
        counts = self._scene.used_pixels(self._index)
        counts = None if counts is None else counts.cpu()[rows[:, None], columns]
        return psnr(render, truth, None if counts is None or not bool(counts.any()) else counts)
