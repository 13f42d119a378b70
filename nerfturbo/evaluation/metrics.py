"""How close two images are, in floats, and what a score is worth: what a constant image or a blurred truth gets."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data.images import composite_over
from ..data.scene import Scene
from ..errors import InputError, refuse


def psnr_from_mse(mse: float) -> float:
    """-10 log10(mse), for colours in [0, 1]; infinite for equal images.

    >>> psnr_from_mse(0.01)
    20.0
    """
    return -10.0 * math.log10(mse) if mse > 0.0 else math.inf


def psnr(image: Tensor, truth: Tensor, counts: Tensor | None = None) -> float:
    """Peak signal-to-noise ratio in dB of two images (height, width, channels) in [0, 1].

    With `counts` (height, width) bool only those pixels are compared.

    >>> import torch
    >>> round(psnr(torch.full((4, 4, 3), 0.6), torch.full((4, 4, 3), 0.5)), 3)
    20.0
    """
    _check_same_shape(image, truth)
    square = (image.double() - truth.double()).square()
    return psnr_from_mse(float((square if counts is None else square[counts]).mean()))


def ssim(image: Tensor, truth: Tensor, counts: Tensor | None = None) -> float:
    """Structural similarity (Gaussian window of 11 pixels, sigma 1.5) of two images (height, width, channels). With
    `counts` (height, width) bool it is the mean over windows around those pixels, in which the others agree."""
    _check_same_shape(image, truth)
    if min(image.shape[:2]) < 11:
        raise InputError("image", "at least 11 x 11 pixels, the window of SSIM", f"{tuple(image.shape[:2])}")
    if counts is not None:
        image = torch.where(counts[..., None], image, truth)
    x, y = (each.permute(2, 0, 1).float() for each in (image, truth))
    planes = torch.nn.functional.pad(torch.stack([x, y, x * x, y * y, x * y]), (5,) * 4, mode="reflect")
    x, y, xx, yy, xy = _weighted_sum(_weighted_sum(planes, _gaussian(1.5, 5), 3), _gaussian(1.5, 5), 2)  # (C, H, W)
    variances = (xx - x * x).clamp(min=0.0) + (yy - y * y).clamp(min=0.0)
    found = (2 * x * y + 1e-4) * (2 * (xy - x * y) + 9e-4) / ((x * x + y * y + 1e-4) * (variances + 9e-4))
    return float(found.mean() if counts is None else found.permute(1, 2, 0)[counts].mean())


class MissingWeightsError(InputError):
    """LPIPS is installed, but the weights of its network are not here and could not be fetched."""


class Perceptual:
    """LPIPS (AlexNet) of two images, for who has installed it: `pip install lpips`. Lower is closer."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        try:
            import lpips  # type: ignore[import-not-found]
        except ImportError as error:
            hint = "pip install lpips torchvision"
            raise InputError("--lpips", "the package lpips, installed", str(error), hint) from None
        except RuntimeError as error:  # torchvision is built for one version of torch
            hint = "install the torchvision that belongs to the torch that is here"
            raise InputError("--lpips", "a torchvision that fits torch", str(error), hint) from None
        try:
            network = lpips.LPIPS(net="alex", verbose=False)
        except Exception as error:  # weights are fetched at first use: no network, half a file, a wrong checksum, ...
            place = Path(torch.hub.get_dir()) / "checkpoints"
            hint = f"run it once with a network, or copy torchvision's alexnet-owt-7be5be79.pth into {place}"
            found = str(error) or type(error).__name__
            raise MissingWeightsError("--lpips", "the weights of AlexNet, which lpips builds on", found, hint) from None
        self._network = network.to(device).eval()

    @torch.no_grad()
    def __call__(self, image: Tensor, truth: Tensor) -> float:
        _check_same_shape(image, truth)
        batches = [each.permute(2, 0, 1)[None].float() * 2.0 - 1.0 for each in (image, truth)]
        return float(self._network(batches[0], batches[1]))


def mean_psnr(values: Sequence[float]) -> float:
    """The mean of per-image values, the usual way to score a test set."""
    return sum(values) / len(values) if values else math.nan


def _check_same_shape(image: Tensor, truth: Tensor) -> None:
    got = f"{tuple(image.shape)} and {tuple(truth.shape)}"
    refuse(image.shape != truth.shape or image.dim() != 3, "image, truth", "one shape (height, width, channels)", got)


def constant_baseline_psnr(scene: Scene, device: torch.device | str | None = None) -> float:
    """Mean PSNR, on white, of one flat colour for all pictures: the mean over all pixels, the best there is. The
    pictures' own device computes it unless one is given."""
    sums = [truth.sum((0, 1), dtype=torch.float64) for truth in _on_white(scene, device)]
    mean = (torch.stack(sums).sum(0) / scene.images.n_pixels).float()
    return _psnr_of([((truth - mean) ** 2).mean() for truth in _on_white(scene, device)])


def blur_baseline_psnr(scene: Scene, sigma: float = 3.0, device: torch.device | str | None = None) -> float:
    """Mean PSNR, on white, of the true pictures blurred by a Gaussian of `sigma` pixels; `device` as above."""
    return _psnr_of([((gaussian_blur(truth, sigma) - truth) ** 2).mean() for truth in _on_white(scene, device)])


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """(H, W, C) blurred over H and W; beyond its edges the picture goes on with the colour of the edge."""
    radius = math.ceil(4.0 * sigma)
    planes = torch.nn.functional.pad(image.permute(2, 0, 1), (radius,) * 4, mode="replicate")  # (C, H, W)
    planes = _weighted_sum(planes, _gaussian(sigma, radius), 2)
    return _weighted_sum(planes, _gaussian(sigma, radius), 1).permute(1, 2, 0)


def _gaussian(sigma: float, radius: int) -> list[float]:
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma) ** 2)
    return (kernel / kernel.sum()).tolist()


def _weighted_sum(values: Tensor, kernel: list[float], dim: int) -> Tensor:
    """Neighbours along `dim`, weighed: a torch convolution takes ten times as long on a CPU and may round on a GPU."""
    length = values.shape[dim] - len(kernel) + 1
    total = values.narrow(dim, 0, length) * kernel[0]
    for place, weight in enumerate(kernel[1:], 1):
        total.add_(values.narrow(dim, place, length), alpha=weight)
    return total


def _on_white(scene: Scene, device: torch.device | str | None) -> Iterator[Tensor]:
    return (composite_over(scene.images.image(index, device), 1.0) for index in range(len(scene)))


def _psnr_of(errors: list[Tensor]) -> float:
    """The mean over images, of the mean squared error () of each."""
    return mean_psnr([psnr_from_mse(max(error, 1e-12)) for error in torch.stack(errors).tolist()])
