"""What a score is worth: what a constant picture and a blurred truth would get. Printed beside every result."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .images import composite_over
from .scene import Scene


def constant_baseline_psnr(scene: Scene) -> float:
    """Mean PSNR, on white, of one flat colour for all pictures: the mean over all pixels, the best there is."""
    total = torch.zeros(3, dtype=torch.float64)
    for index in range(len(scene)):
        total += _on_white(scene, index).double().sum((0, 1)).cpu()
    mean = (total / scene.images.n_pixels).float()
    return _mean_psnr([((_on_white(scene, index) - mean.to(scene.images.device)) ** 2) for index in range(len(scene))])


def blur_baseline_psnr(scene: Scene, sigma: float = 3.0) -> float:
    """Mean PSNR, on white, of the true pictures blurred by a Gaussian of `sigma` pixels."""
    errors = []
    for index in range(len(scene)):
        truth = _on_white(scene, index)
        errors.append((gaussian_blur(truth, sigma) - truth) ** 2)
    return _mean_psnr(errors)


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """(H, W, C) blurred over H and W; beyond its edges the picture goes on with the colour of the edge."""
    radius = math.ceil(4.0 * sigma)
    offsets = torch.arange(-radius, radius + 1, dtype=image.dtype, device=image.device)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = kernel / kernel.sum()
    planes = image.permute(2, 0, 1)[:, None]  # (C, 1, H, W)
    planes = F.pad(planes, (radius, radius, radius, radius), mode="replicate")
    planes = F.conv2d(F.conv2d(planes, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))
    return planes[:, 0].permute(1, 2, 0)


def _on_white(scene: Scene, index: int) -> Tensor:
    return composite_over(scene.images.image(index), 1.0)


def _mean_psnr(squared_errors: list[Tensor]) -> float:
    values = [-10.0 * math.log10(max(float(error.mean()), 1e-12)) for error in squared_errors]
    return sum(values) / len(values)
