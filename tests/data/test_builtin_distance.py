"""The signed distance of built-in scenes."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.config import BUILTIN_SCENES
from nerfturbo.errors import InputError
from scene_distance import signed_distance


@pytest.mark.parametrize("name", BUILTIN_SCENES)
def test_it_is_exact_outside_and_changes_sign_at_the_surface(name: str) -> None:
    points = (torch.rand(20_000, 3, dtype=torch.float64) * 2.8 - 1.4).requires_grad_()
    distance = signed_distance(name, points)
    (gradient,) = torch.autograd.grad(distance.sum(), points)
    near = (distance > 1e-3) & (distance < 0.1)
    surface = (points - distance[:, None] * gradient).detach()[near]
    assert near.sum() > 300 and signed_distance(name, surface).abs().max() < 1e-7
    inwards = surface - 1e-4 * gradient[near]
    assert ((signed_distance(name, inwards) + 1e-4).abs() < 1e-6).double().mean() > 0.98


def test_single_precision_is_close() -> None:
    points = torch.rand(5000, 3) * 2.8 - 1.4
    exact = signed_distance("toybox", points.double())
    assert (signed_distance("toybox", points) - exact).abs().max() < 1e-5


def test_bad_input() -> None:
    with pytest.raises(InputError, match="built-in"):
        signed_distance("nothing", torch.zeros(1, 3))
    with pytest.raises(InputError, match="points"):
        signed_distance("toybox", torch.zeros(3))
    with pytest.raises(InputError, match="points"):
        signed_distance("toybox", torch.zeros(1, 3, dtype=torch.int64))
    assert signed_distance("toybox", torch.zeros(0, 3)).shape == (0,)
