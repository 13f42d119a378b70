"""What a score is worth: what a constant picture and a blurred truth would get. Printed beside every result."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .images import composite_over
from .scene import Scene


def constant_baseline_psnr(scene: Scene, device: torch.device | str | None = None) -> float:
    """Mean PSNR, on white, of one flat colour for all pictures: the mean over all pixels, the best there is.

    The pictures' own device computes it unless one is given.
    """
    views = range(len(scene))
    sums = [_on_white(scene, index, device).sum((0, 1), dtype=torch.float64) for index in views]
    mean = (torch.stack(sums).sum(0) / scene.images.n_pixels).float()
    return _mean_psnr([((_on_white(scene, index, device) - mean) ** 2).mean() for index in views])


def blur_baseline_psnr(scene: Scene, sigma: float = 3.0, device: torch.device | str | None = None) -> float:
    """Mean PSNR, on white, of the true pictures blurred by a Gaussian of `sigma` pixels; `device` as above."""
    errors = []
    for index in range(len(scene)):
        truth = _on_white(scene, index, device)
        errors.append(((gaussian_blur(truth, sigma) - truth) ** 2).mean())
    return _mean_psnr(errors)


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """(H, W, C) blurred over H and W; beyond its edges the picture goes on with the colour of the edge."""
    radius = math.ceil(4.0 * sigma)
    offsets = torch.arange(-radius, radius + 1, dtype=image.dtype, device=image.device)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = kernel / kernel.sum()
    planes = F.pad(image.permute(2, 0, 1), (radius, radius, radius, radius), mode="replicate")  # (C, H, W)
    planes = _weighted_sum(planes, kernel.tolist(), 2)
    return _weighted_sum(planes, kernel.tolist(), 1).permute(1, 2, 0)


def _weighted_sum(values: Tensor, kernel: list[float], dim: int) -> Tensor:
    """Neighbours along `dim`, weighed: a torch convolution takes ten times as long on a CPU and may round on a GPU."""
    length = values.shape[dim] - len(kernel) + 1
    total = values.narrow(dim, 0, length) * kernel[0]
    for place, weight in enumerate(kernel[1:], 1):
        total.add_(values.narrow(dim, place, length), alpha=weight)
    return total


def _on_white(scene: Scene, index: int, device: torch.device | str | None) -> Tensor:
    return composite_over(scene.images.image(index, device), 1.0)


def _mean_psnr(errors: list[Tensor]) -> float:
    """Of the mean squared error () of each picture."""
    values = [-10.0 * math.log10(max(error, 1e-12)) for error in torch.stack(errors).tolist()]
    return sum(values) / len(values)
