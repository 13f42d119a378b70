"""How close pictures of an export come to the field's own and to the photos."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.scene import Scene, downscaled
from ..evaluation.evaluate import choose_views, truth_image
from ..evaluation.metrics import mean_psnr, psnr
from ..rendering.model import NerfModel
from . import Progress, quiet

SCORED_PIXELS = 1 << 16  # of a view that a CPU compares
SAME_TIME = 0.01


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
    draw: Callable[[Cameras, int], Tensor],
    *,
    views: int = 10,
    time: float | None = None,
    photos: bool = True,
    progress: Progress = quiet,
) -> Comparison:
    """Of test views, what `draw` gives over white (height, width, 3), as rounded to bytes. Without `photos`, which may
    show what the export leaves out, the field alone is compared with."""
    chosen, cameras = choose_views(len(scene), views), scene.cameras
    if cameras.times is not None and time is not None:  # the export's moment: photos of others do not count
        cameras = replace(cameras, times=torch.full_like(cameras.times, time))
    ours, theirs, fields = [], [], []
    for done, index in enumerate(chosen):
        rgb = (draw(cameras, index) * 255.0).round() / 255.0
        field = model.render_image(cameras, index).rgb.clamp(0.0, 1.0)
        counts = scene.used_pixels(index, model.device)
        ours.append(psnr(rgb, field, counts))
        same = scene.cameras.times is None or time is None or abs(float(scene.cameras.times[index]) - time) < SAME_TIME
        if photos and same:
            truth = truth_image(scene, index, device=model.device)
            theirs.append(psnr(rgb, truth, counts))
            fields.append(psnr(field, truth, counts))
        progress((done + 1) / len(chosen))
    photo, field_photo = (mean_psnr(values) if values else None for values in (theirs, fields))
    return Comparison(mean_psnr(ours), photo, field_photo, len(chosen))


def views_to_score(scene: Scene, device: torch.device) -> tuple[Scene, int]:
    """Ten views; on a CPU two of at most SCORED_PIXELS, shrunk by a whole number where they are larger."""
    if device.type != "cpu":
        return scene, 10
    pixels = int(scene.cameras.size[0].prod())
    divisor = max(1, math.ceil(math.sqrt(pixels / SCORED_PIXELS) - 0.1))
    views = max(1, min(10, 2 * SCORED_PIXELS * divisor**2 // pixels))
    return downscaled(scene.select(choose_views(len(scene), views)), divisor), views
