"""Spacing, box and contraction one after the other; weights by sums along the rays, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contraction import unit_positions
from ..intervals import Space, Spacing
from ..spacing import spread
from .packed import widen


def place_intervals(
    places: Tensor,
    origins: Tensor,
    directions: Tensor,
    *,
    near: Tensor,
    far: Tensor,
    spacing: Spacing,
    space: Space,
) -> tuple[Tensor, Tensor]:
    unit = spacing.unit
    distances = spread(widen(places), widen(near) / unit, widen(far) / unit, kind=spacing.warp) * unit
    middle = (distances[:, 1:] + distances[:, :-1]) * 0.5
    positions = (widen(origins)[:, None, :] + widen(directions)[:, None, :] * middle[..., None]).reshape(-1, 3)
    return distances, positions if space.aabb is None else unit_positions(positions, space.aabb, space.contraction)


def interval_weights(density: Tensor, distances: Tensor) -> Tensor:
    density, distances = widen(density), widen(distances)
    optical = density * (distances[:, 1:] - distances[:, :-1])
    before = torch.nn.functional.pad(optical.cumsum(-1)[:, :-1], (1, 0))
    return torch.exp(-before) * -torch.expm1(-optical)
