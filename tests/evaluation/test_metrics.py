"""Scores against hand computation."""

from __future__ import annotations

import math
import sys
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.evaluation.metrics import MissingWeightsError, Perceptual, mean_psnr, psnr, psnr_from_mse, ssim


def test_psnr_by_hand() -> None:
    image, truth = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)
    image[0, 0, 0] = 0.6  # mse = 0.36 / 12 = 0.03
    assert psnr(image, truth) == pytest.approx(-10.0 * math.log10(0.03), abs=1e-5)
    assert psnr(truth, truth) == math.inf
    assert psnr_from_mse(1.0) == 0.0


def test_psnr_does_not_round_to_eight_bits() -> None:
    truth = torch.full((4, 4, 3), 100.0 / 255.0)
    error = 0.2 / 255.0  # would vanish in uint8
    assert psnr(truth + error, truth) == pytest.approx(-20.0 * math.log10(error), abs=1e-3)


def test_the_mean_is_of_decibels_not_of_errors() -> None:
    assert mean_psnr([20.0, 40.0]) == 30.0
    assert math.isnan(mean_psnr([]))


def ssim_by_hand(x: torch.Tensor, y: torch.Tensor) -> float:
    """Wang et al. 2004 with the usual constants, in double precision, over windows that lie inside the picture."""
    offsets = torch.arange(11, dtype=torch.float64) - 5
    line = torch.exp(-0.5 * (offsets / 1.5) ** 2)
    window = (line[:, None] * line)[None, None] / line.sum() ** 2

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(values.permute(2, 0, 1)[:, None], window)

    x, y = x.double(), y.double()
    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    values = ((2 * mx * my + c1) * (2 * cov + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return float(values.mean())


def test_psnr_of_the_pixels_that_count() -> None:
    truth, counts = torch.zeros(4, 6, 3), torch.zeros(4, 6, dtype=torch.bool)
    counts[:, :2] = True
    image = torch.where(counts[..., None], 0.1, 0.5) + truth
    assert psnr(image, truth, counts) == pytest.approx(20.0)
    assert psnr(image, truth) == pytest.approx(-10.0 * math.log10((0.01 + 2 * 0.25) / 3))


def test_ssim_against_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(24, 32, 3, generator=generator)
    image = (truth + 0.1 * torch.randn(truth.shape, generator=generator)).clamp(0.0, 1.0)
    assert ssim(truth, truth) == pytest.approx(1.0, abs=1e-5)
    assert ssim(image, truth) == pytest.approx(ssim_by_hand(image, truth), abs=2e-3)
    counts = torch.zeros(24, 32, dtype=torch.bool)
    counts[5:-5, 5:-5] = True  # the middles of all windows that lie inside the picture
    shown = torch.where(counts[..., None], image, truth)
    assert ssim(image, truth, counts) == pytest.approx(ssim_by_hand(shown, truth), abs=1e-4)


def test_ssim_is_that_of_torchmetrics() -> None:
    """Which pads by reflection; in double precision, as differences of squares lose digits in a flat picture."""
    image_scores = pytest.importorskip("torchmetrics.functional.image", reason="torchmetrics comes with lightning")
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(24, 32, 3, generator=generator)
    truth[:12] = 1.0
    image = (truth + 0.1 * torch.randn(truth.shape, generator=generator)).clamp(0.0, 1.0)
    one, other = (each.double().permute(2, 0, 1)[None] for each in (image, truth))
    expected = float(image_scores.structural_similarity_index_measure(one, other, data_range=1.0))
    assert 0.3 < expected < 0.9 and ssim(image, truth) == pytest.approx(expected, abs=5e-6)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="image, truth: expected one shape"):
        psnr(torch.zeros(2, 2, 3), torch.zeros(2, 3, 3))
    with pytest.raises(InputError, match="11 x 11"):
        ssim(torch.zeros(10, 20, 3), torch.zeros(10, 20, 3))


def test_lpips_gets_pictures_as_its_package_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, whose weights come from a network: batches of one, channels first, in [-1, 1]."""
    seen: list[torch.Tensor] = []

    class Network(torch.nn.Module):
        def __init__(self, net: str, verbose: bool) -> None:
            super().__init__()
            assert net == "alex"

        def forward(self, image: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
            seen.extend([image, truth])
            return (image - truth).abs().mean()

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Network))
    image = torch.stack([torch.zeros(4, 5), torch.full((4, 5), 0.5), torch.ones(4, 5)], dim=-1)
    assert Perceptual()(image, image.flip(-1)) == pytest.approx(4.0 / 3.0)
    assert [tuple(picture.shape) for picture in seen] == [(1, 3, 4, 5)] * 2
    assert seen[0][0, :, 0, 0].tolist() == [-1.0, 0.0, 1.0] and not seen[0].requires_grad


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("checksum"), EOFError(), UnpicklingError()])
def test_lpips_without_its_weights_is_said(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(net: str, verbose: bool) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=fetch))
    with pytest.raises(MissingWeightsError) as caught:
        Perceptual()
    said = str(caught.value)
    assert "the weights of AlexNet" in said and (str(error) or type(error).__name__) in said
    assert "alexnet-owt-7be5be79.pth" in said
