"""Spherical harmonics: orthonormal, and their gradient."""

from __future__ import annotations

import math

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import spherical_harmonics, use_backend

from .cases import Target, compare, generator, require


def _directions(n: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=generator(2)), dim=-1)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_matches_reference(sized: tuple[Target, int], degree: int, poisoned_empty: None):
    target, n = sized
    require(target)
    compare(
        target,
        lambda directions: spherical_harmonics(directions, degree),
        {"directions": _directions(n)},
        ["directions"] if degree > 1 else [],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_directions_are_widened(target: Target, dtype: torch.dtype):
    require(target)
    inputs = {"directions": _directions(33).to(dtype)}
    compare(target, spherical_harmonics, inputs, ["directions"])


def test_no_directions(target: Target):
    require(target)
    compare(target, spherical_harmonics, {"directions": torch.zeros(0, 3)}, ["directions"])


def test_orthonormal(target: Target):
    """The integral over the sphere of products is the identity: a Fibonacci lattice is a good quadrature."""
    require(target)
    n = target.pick(20_000, 500)
    index = torch.arange(n, dtype=torch.float64) + 0.5
    z, angle = 1.0 - 2.0 * index / n, index * math.pi * (3.0 - math.sqrt(5.0))
    radius = (1.0 - z * z).sqrt()
    directions = torch.stack([radius * angle.cos(), radius * angle.sin(), z], -1).float().to(target.device)
    with use_backend(target.backend):
        values = spherical_harmonics(directions, 4).double()
    gram = values.T @ values * (4.0 * math.pi / n)
    torch.testing.assert_close(gram.cpu(), torch.eye(16, dtype=torch.float64), atol=target.pick(1, 30) * 1e-3, rtol=0.0)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gradcheck(degree: int):
    directions = _directions(5).double().requires_grad_()
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda d: spherical_harmonics(d, degree), directions)


def test_errors_name_the_argument():
    with pytest.raises(InputError, match="degree: expected 1 to 4"):
        spherical_harmonics(torch.zeros(2, 3), 5)
    with pytest.raises(InputError, match="directions: expected shape"):
        spherical_harmonics(torch.zeros(2, 2))
