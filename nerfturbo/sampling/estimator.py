"""What places samples along rays. Any object with these two methods can drive rendering and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..ops.positions import Contraction
from ..types import Aabb, PackedSamples, Rays

SigmaFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (t_starts, t_ends, ray_indices) -> density (n,)
# positions (n, 3) -> density (n,); of a scene that moves: positions, times (n,)
DensityFn = Callable[..., Tensor]


@runtime_checkable
class Estimator(Protocol):
    """`sample` gives the samples worth evaluating; `update` learns from the field as it trains."""

    def sample(self, rays: Rays, sigma_fn: SigmaFn | None = None) -> PackedSamples: ...

    def update(self, step: int | Tensor, density_fn: DensityFn) -> None: ...


@runtime_checkable
class UnitDensity(Protocol):
    """A density over a space of its own: positions (n, 3) in [0, 1]^3, the box or with a contraction all of space."""

    aabb: Aabb
    contraction: Contraction

    def unit_density(self, positions: Tensor) -> Tensor: ...
