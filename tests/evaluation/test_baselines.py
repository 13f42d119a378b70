"""The scores of a flat colour and of a blurred truth, against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nerfturbo.data.images import ImagePool
from nerfturbo.evaluation.metrics import blur_baseline_psnr, constant_baseline_psnr, gaussian_blur

from ..data.test_scene import make_scene


def test_constant_is_the_variance() -> None:
    pictures = torch.zeros(7, 6, 8, 3, dtype=torch.uint8)
    pictures[:, :3] = 255
    scene = replace(make_scene(7, channels=3), images=ImagePool.from_images(pictures))
    assert constant_baseline_psnr(scene) == pytest.approx(-10.0 * math.log10(0.25))


def test_alpha_is_put_on_white() -> None:
    scene = replace(make_scene(7), images=ImagePool.from_images(torch.zeros(7, 6, 8, 4, dtype=torch.uint8)))
    assert constant_baseline_psnr(scene) == pytest.approx(120.0)  # all white, no error at all
    pictures = torch.zeros(7, 6, 8, 4, dtype=torch.uint8)
    pictures[:, :3, :, 3] = 255  # one half is black, the other shows what is behind
    scene = replace(scene, images=ImagePool.from_images(pictures))
    assert constant_baseline_psnr(scene) == pytest.approx(-10.0 * math.log10(0.25))


def test_blur_against_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    image = torch.rand(40, 31, 3)
    expected = ndimage.gaussian_filter(image.numpy(), (3, 3, 0), mode="nearest", truncate=4.0)
    assert np.allclose(gaussian_blur(image, 3.0).numpy(), expected, atol=1e-5)


def test_blur_keeps_flat_pictures() -> None:
    scene = make_scene(3)
    assert blur_baseline_psnr(scene) > 90.0
