"""Score a model, and what was exported of it, on views it never saw."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import composite_over, save_image
from ..data.scene import Scene, downscaled
from ..rendering.image import RenderedImage, compile_image, render_image
from ..rendering.model import NerfModel
from ..types import Rays
from .metrics import Perceptual, mean_psnr, psnr, ssim

WHITE = (1.0, 1.0, 1.0)
SSIM_WINDOW = 11
FIRST_RAYS = 4096  # of a preview; then as many as fit into these seconds
AIM_SECONDS = 0.5
PREVIEW_WIDTH = 1600  # pixels of both images of a preview side by side, at most

SCORED_PIXELS = 1 << 16  # of a view that a CPU compares with an export
SAME_TIME = 0.01

Progress = Callable[[float], None]  # takes the share that is done
# A picture (height, width, 3) of one of the cameras, and which pixels (height, width) count; None: all.
Draw = Callable[[Cameras, int], tuple[Tensor, Tensor | None]]
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

    @classmethod
    def of(cls, scores: Sequence[ViewScore]) -> "Evaluation":
        similarities, distances = (_mean([getattr(score, name) for score in scores]) for name in ("ssim", "lpips"))
        return cls(mean_psnr([score.psnr for score in scores]), similarities, tuple(scores), distances)


def choose_views(n_views: int, limit: int | None = None) -> list[int]:
    """All views, or `limit` of them at even distances, the first always among them.

    >>> choose_views(20, 4)
    [0, 5, 10, 15]
    """
    if limit is None or limit >= n_views:
        return list(range(n_views))
    return [index * n_views // limit for index in range(limit)]


def truth_image(
    scene: Scene, index: int, background: Sequence[float] = WHITE, device: torch.device | str | None = None
) -> Tensor:
    """(height, width, 3): the image over the background, on the images' own device unless another is given."""
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
    Pixels outside a picture's mask, and those that no ray leads to, do not count. Where lenses were learned,
    views through the same lenses have them."""
    cameras = scene.cameras if model.photos is None else model.photos.new_views(scene.cameras)
    chosen = choose_views(len(scene)) if views is None else views
    behind, scores = torch.tensor(background, device=model.device), []
    for index in chosen:
        start = time.perf_counter()
        image = model.render_image(cameras, index, behind)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - start
        truth, counts = truth_image(scene, index, background, model.device), scene.used_pixels(index, model.device)
        if counts is not None and not bool(counts.any()):
            continue  # an image that its mask covers whole says nothing
        score = score_view(index, image.rgb, truth, counts, with_ssim=with_ssim, perceptual=perceptual)
        scores.append(replace(score, seconds=seconds))
        if on_view is not None:
            on_view(len(scores), len(chosen), scores[-1], image, truth)
    return Evaluation.of(scores)


def score_view(
    index: int,
    rgb: Tensor,
    truth: Tensor,
    counts: Tensor | None,
    *,
    with_ssim: bool = True,
    perceptual: Perceptual | None = None,
) -> ViewScore:
    """Of one picture, or a part of it, (height, width, 3), where `counts` (height, width) says which pixels do."""
    similarity = ssim(rgb, truth, counts) if with_ssim and min(truth.shape[:2]) >= SSIM_WINDOW else None
    distance = None if perceptual is None else perceptual(rgb, truth)
    return ViewScore(index, psnr(rgb, truth, counts), similarity, 0.0, distance)


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class Comparison:
    """Means over views, in dB; None where there was nothing to compare with."""

    against_field: float
    against_photos: float | None
    field_against_photos: float | None
    views: int


def compare(
    model: NerfModel,
    scene: Scene,
    draw: Draw,
    *,
    views: int = 10,
    time: float | None = None,
    photos: bool = True,
    progress: Progress = lambda share: None,
) -> Comparison:
    """Of test views, what `draw` gives over white, as rounded to bytes. Without `photos`, which may show what the
    export leaves out, the field alone is compared with."""
    chosen, cameras = choose_views(len(scene), views), scene.cameras
    if cameras.times is not None and time is not None:  # the export's moment: photos of others do not count
        cameras = replace(cameras, times=torch.full_like(cameras.times, time))
    ours, theirs, fields = [], [], []
    for done, index in enumerate(chosen):
        progress((done + 1) / len(chosen))
        (rgb, shown), counts = draw(cameras, index), scene.used_pixels(index, model.device)
        if shown is not None:
            counts = shown.to(model.device) if counts is None else counts & shown.to(model.device)
        if counts is not None and not bool(counts.any()):
            continue
        rgb = (rgb.to(model.device) * 255.0).round() / 255.0
        field = model.render_image(cameras, index).rgb.clamp(0.0, 1.0)
        ours.append(psnr(rgb, field, counts))
        same = scene.cameras.times is None or time is None or abs(float(scene.cameras.times[index]) - time) < SAME_TIME
        if photos and same:
            truth = truth_image(scene, index, device=model.device)
            theirs.append(psnr(rgb, truth, counts))
            fields.append(psnr(field, truth, counts))
    photo, field_photo = (mean_psnr(values) if values else None for values in (theirs, fields))
    return Comparison(mean_psnr(ours), photo, field_photo, len(ours))


def views_to_score(scene: Scene, device: torch.device) -> tuple[Scene, int]:
    """Ten views; on a CPU two of at most SCORED_PIXELS, shrunk by a whole number where they are larger."""
    if device.type != "cpu":
        return scene, 10
    pixels = int(scene.cameras.size[0].prod())
    divisor = max(1, math.ceil(math.sqrt(pixels / SCORED_PIXELS) - 0.1))
    views = max(1, min(10, 2 * SCORED_PIXELS * divisor**2 // pixels))
    return downscaled(scene.select(choose_views(len(scene), views)), divisor), views


class Preview:
    """Renders one view on demand, every k-th pixel of it, as finely as `AIM_SECONDS` allow, next to its truth."""

    def __init__(self, scene: Scene, index: int = 0) -> None:
        self._scene, self._index = scene, index
        self._width, self._height = (int(side) for side in scene.cameras.size[index])
        self._stride = self._stride_for(FIRST_RAYS)

    def _stride_for(self, n_rays: float) -> int:
        return max(1, round((self._width * self._height / max(n_rays, 64.0)) ** 0.5))

    def _pixels(self) -> tuple[Tensor, Tensor]:
        half = self._stride // 2
        return torch.arange(half, self._height, self._stride), torch.arange(half, self._width, self._stride)

    def _rays(self, device: torch.device) -> Rays:
        """Of the chosen pixels alone, made where they are rendered: others cost as much, for a lens."""
        rows, columns = (side.to(device) for side in self._pixels())
        pixels = (rows[:, None] * self._width + columns).reshape(-1)
        return self._scene.cameras.to(device).pixel_rays(torch.full_like(pixels, self._index), pixels)

    @torch.no_grad()
    def compile(self, model: NerfModel) -> None:
        """Compile what a picture needs, where that can be done ahead."""
        compile_image(model.field, model.estimator, self._rays(model.device), model.settings)

    @torch.no_grad()
    def render(self, model: NerfModel, path: Path) -> float:
        """Write the picture (truth left, render right) and return its PSNR over the rendered pixels."""
        start = time.perf_counter()
        stride, (rows, columns) = self._stride, self._pixels()
        white, rays = torch.tensor(WHITE, device=model.device), self._rays(model.device)
        height, width = len(rows), len(columns)
        image = render_image(model.field, model.estimator, rays, height=height, width=width, background=white)
        render = image.rgb.cpu()
        truth = truth_image(self._scene, self._index).cpu()[rows[:, None], columns]
        self._stride = self._stride_for(len(rows) * len(columns) * AIM_SECONDS / (time.perf_counter() - start))
        both = torch.cat([truth, render], dim=1)
        times = max(1, min(stride, PREVIEW_WIDTH // both.shape[1]))  # as large as the photo, or as a screen
        save_image(path, both.repeat_interleave(times, 0).repeat_interleave(times, 1))
        counts = self._scene.used_pixels(self._index)
        counts = None if counts is None else counts.cpu()[rows[:, None], columns]
        return psnr(render, truth, None if counts is None or not bool(counts.any()) else counts)
