"""One call of an op to check and to time, and what the makers of such calls share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..types import Aabb, PackedSamples

BOX = Aabb.cube(1.0)


@dataclass(frozen=True)
class OpCase:
    """One call to check and to time. `inputs` are the tensors; those in `wanted` also get gradients."""

    op: str
    size: str  # in words
    function: Callable[..., Any]  # called with inputs by name
    inputs: dict[str, Tensor]
    wanted: tuple[str, ...] = ()
    tolerance: float = 1e-4  # of the largest value, for values and gradients
    outliers: float = 0.0  # share of values that may differ: those that rounding moves across a border


def unit_vectors(draw: torch.Generator, n: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=draw), dim=-1)


def some_samples(draw: torch.Generator, n_rays: int, n: int) -> dict[str, Tensor]:
    """About n samples on n_rays rays."""
    counts = torch.randint(0, 2 * n // n_rays + 1, (n_rays,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rays = torch.repeat_interleave(torch.arange(n_rays), counts)
    starts = (torch.arange(rays.shape[0]) - offsets[rays]).float() * 0.01
    return {"t_starts": starts, "t_ends": starts + 0.01, "ray_indices": rays.int(), "offsets": offsets.int()}


def packed_samples(inputs: dict[str, Tensor]) -> PackedSamples:
    return PackedSamples(inputs["t_starts"], inputs["t_ends"], inputs["ray_indices"], inputs["offsets"])
