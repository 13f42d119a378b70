"""Score a model on views it never saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..data.cameras import PIXEL_CENTER
from ..data.images import composite_over, save_image
from ..data.scene import Scene
from ..files import replacing
from ..rendering.image import RenderedImage, compile_image, render_image
from ..rendering.model import NerfModel
from ..types import Rays
from .metrics import Perceptual, mean_psnr, psnr, ssim

WHITE = (1.0, 1.0, 1.0)
SSIM_WINDOW = 11

# (views done, views in all, the last view's scores, its render, its truth)
ViewCallback = Callable[[int, int, "ViewScore", RenderedImage, Tensor], None]


@dataclass(frozen=True)
class ViewScore:
    """One view; `index` counts within its split."""

    index: int
    psnr: float
    ssim: float | None  # None where the picture is smaller than SSIM's window
    seconds: float  # of rendering
    lpips: float | None = None  # only where it was asked for


@dataclass(frozen=True)
class Evaluation:
    """Scores of a test set: means over pictures, and each picture."""

    psnr: float
    ssim: float | None
    views: tuple[ViewScore, ...]
    lpips: float | None = None

    @property
    def worst_first(self) -> list[ViewScore]:
        return sorted(self.views, key=lambda view: view.psnr)


def choose_views(n_views: int, limit: int | None = None) -> list[int]:
    """All views, or `limit` of them at even distances, the first always among them.

    >>> choose_views(20, 4)
    [0, 5, 10, 15]
    """
    if limit is None or limit >= n_views:
        return list(range(n_views))
    return [index * n_views // limit for index in range(limit)]


def truth_image(
    scene: Scene,
    index: int,
    background: tuple[float, float, float] = WHITE,
    device: torch.device | str | None = None,
) -> Tensor:
    """(height, width, 3): the picture with the background behind its transparent part, on the pictures' device unless
    another is given."""
    image = scene.images.image(index, device)
    return composite_over(image, torch.tensor(background, device=image.device))


def evaluate(
    model: NerfModel,
    scene: Scene,
    *,
    views: list[int] | None = None,
    background: tuple[float, float, float] = WHITE,
    with_ssim: bool = True,
    perceptual: Perceptual | None = None,
    on_view: ViewCallback | None = None,
) -> Evaluation:
    """Render the views (all of them unless given) over the background and compare them with the truth, in floats.

    Pixels outside a picture's mask, and those that no ray leads to, do not count.
    """
    chosen = choose_views(len(scene)) if views is None else views
    scores = []
    for score, image, truth in _score_views(model, scene, chosen, background, with_ssim=with_ssim):
        if perceptual is not None:
            score = replace(score, lpips=perceptual(image.rgb, truth))
        scores.append(score)
        if on_view is not None:
            on_view(len(scores), len(chosen), score, image, truth)
    similarities = [score.ssim for score in scores if score.ssim is not None]
    distances = [score.lpips for score in scores if score.lpips is not None]
    return Evaluation(
        psnr=mean_psnr([score.psnr for score in scores]),
        ssim=sum(similarities) / len(similarities) if similarities else None,
        views=tuple(scores),
        lpips=sum(distances) / len(distances) if distances else None,
    )


def _score_views(
    model: NerfModel, scene: Scene, views: list[int], background: tuple[float, float, float], *, with_ssim: bool
) -> Iterator[tuple[ViewScore, RenderedImage, Tensor]]:
    behind = torch.tensor(background, device=model.device)
    for index in views:
        start = time.perf_counter()
        image = model.render_image(scene.cameras, index, behind)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - start
        truth = truth_image(scene, index, background, model.device)
        counts = scene.used_pixels(index, model.device)
        if counts is not None and not bool(counts.any()):
            continue  # a picture that its mask covers whole says nothing
        similarity = ssim(image.rgb, truth, counts) if with_ssim and min(truth.shape[:2]) >= SSIM_WINDOW else None
        yield ViewScore(index, psnr(image.rgb, truth, counts), similarity, seconds), image, truth


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
