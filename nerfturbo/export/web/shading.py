"""What a pixel's colour is made of: base colour, and a small network that adds what depends on the direction.

Along a ray, weights w_i = T_i (1 - exp(-density_i dt)) sum up base colour c = sum w_i c_i, features f = sum w_i f_i and
opacity a = sum w_i. The network sees [c, f, basis(direction), 1], once per pixel (deferred), and its three outputs,
times the opacity, are added to c. Sixteen inputs and two hidden layers of sixteen fit a GPU's 4 x 4 matrices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

N_BASE = 4  # red, green, blue, density
DENSITY = 3  # its place among them
N_FEATURES = 4
N_DIRECTION = 8
WIDTH = 16  # inputs and hidden neurons
FEATURE_SCALE = 4.0  # stored in [0, 1], meant in [-2, 2]


def direction_basis(directions: Tensor) -> Tensor:
    """(n, 8): the spherical harmonics of degree 1 and 2 but for their constants, of unit directions (n, 3)."""
    x, y, z = directions.unbind(-1)
    return torch.stack([x, y, z, 2.0 * x * y, 2.0 * y * z, 2.0 * x * z, x * x - y * y, 1.5 * z * z - 0.5], dim=-1)


class DeferredNetwork(nn.Module):
    """Sixteen inputs, two hidden layers with ReLU, three outputs; no biases, for one input is always 1."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (3, WIDTH))
        bounds = (math.sqrt(6.0 / WIDTH), math.sqrt(6.0 / WIDTH), 1e-2)
        made = [
            (torch.rand(shape, generator=generator) * 2.0 - 1.0) * b for shape, b in zip(shapes, bounds, strict=True)
        ]
        self.weights = nn.ParameterList([nn.Parameter(value) for value in made])

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, 3) for inputs (n, 16)."""
        hidden = inputs
        for weight in self.weights[:-1]:
            hidden = torch.relu(hidden @ weight.T)
        return hidden @ self.weights[-1].T


def shade(summed: Tensor, opacity: Tensor, directions: Tensor, network: DeferredNetwork | None) -> Tensor:
    """(n, 3) colours before the background, of what rays summed up: (n, 3) base colour or (n, 7) with features in
    their meant range."""
    base = summed[:, :3]
    if network is None:
        return base
    basis = direction_basis(directions)
    inputs = torch.cat([summed, basis, torch.ones_like(opacity)[:, None]], dim=-1)
    return base + opacity[:, None] * network(inputs)


def meant_features(stored: Tensor) -> Tensor:
    """[0, 1] to [-2, 2]."""
    return (stored - 0.5) * FEATURE_SCALE
