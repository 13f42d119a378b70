"""Whole images: the budget does not show in the pixels, and no size or grid is too large for it."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.rendering import render_image, render_rays

from .test_render import Ball, full_grid, make_rays


@pytest.mark.parametrize("max_memory", [1, 1 << 22, None])
def test_the_budget_does_not_show(max_memory: int | None):
    rays, background = make_rays(63), torch.tensor([0.1, 0.9, 0.4])
    image = render_image(Ball(), full_grid(), rays, height=7, width=9, background=background, max_memory=max_memory)
    want = render_rays(Ball(), rays, full_grid(), background=background)
    assert image.rgb.shape == (7, 9, 3) and image.depth.shape == (7, 9)
    assert torch.allclose(image.rgb.flatten(0, 1), want.rgb, atol=1e-5)
    assert torch.allclose(image.depth.flatten(), want.depth, atol=1e-4)


def test_a_picture_without_pixels():
    assert render_image(Ball(), full_grid(), make_rays(0), height=0, width=5).rgb.shape == (0, 5, 3)


def test_a_budget_of_nothing_is_named():
    with pytest.raises(InputError, match="max_memory: expected a number of bytes > 0, got 0"):
        render_image(Ball(), full_grid(), make_rays(4), height=2, width=2, max_memory=0)
