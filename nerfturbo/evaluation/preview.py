"""A quick look at one view while training runs: every k-th pixel of it, so that the look is cheap."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from ..data.conventions import PIXEL_CENTER
from ..data.images import save_image
from ..data.scene import Scene
from ..files import replacing
from ..rendering.image import RenderedImage, compile_image, render_image
from ..rendering.model import NerfModel
from ..types import Rays
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

    def _rays(self, device: torch.device) -> Rays:
        """Of the pixels that are looked at alone, made where they are rendered: others cost as much, for a lens."""
        y, x = torch.meshgrid(*(side.to(device) + PIXEL_CENTER for side in self._pixels()), indexing="ij")
        index = torch.full((x.numel(),), self._index, device=device)
        return self._scene.cameras.to(device).rays(index, x.reshape(-1), y.reshape(-1))

    def _picture(self, model: NerfModel) -> RenderedImage:
        rows, columns = self._pixels()
        return render_image(
            model.field,
            model.estimator,
            self._rays(model.device),
            height=len(rows),
            width=len(columns),
            settings=model.settings,
            background=torch.tensor(WHITE, device=model.device),
        )

    def _pixels(self) -> tuple[Tensor, Tensor]:
        half = self._stride // 2
        return torch.arange(half, self._height, self._stride), torch.arange(half, self._width, self._stride)

    @torch.no_grad()
    def compile(self, model: NerfModel) -> None:
        """Compile what a picture needs, where that can be done ahead."""
        compile_image(model.field, model.estimator, self._rays(model.device), model.settings)

    @torch.no_grad()
    def render(self, model: NerfModel, path: Path) -> float:
        """Write the picture (truth left, render right) and return its PSNR over the rendered pixels."""
        start = time.perf_counter()
        stride, (rows, columns) = self._stride, self._pixels()
        render = self._picture(model).rgb.cpu()
        truth = truth_image(self._scene, self._index).cpu()[rows[:, None], columns]
        self._stride = self._stride_for(len(rows) * len(columns) * AIM_SECONDS / (time.perf_counter() - start))
        both = torch.cat([truth, render], dim=1)
        large = both.repeat_interleave(stride, 0).repeat_interleave(stride, 1)
        with replacing(path) as temporary:  # whoever watches the file never sees half of it
            save_image(temporary, large)
        counts = self._scene.used_pixels(self._index)
        counts = None if counts is None else counts.cpu()[rows[:, None], columns]
        return psnr(render, truth, None if counts is None or not bool(counts.any()) else counts)
