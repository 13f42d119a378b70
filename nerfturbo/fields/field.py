"""What a radiance field is here: two methods. Anything with them plugs in; nothing must be subclassed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from ..types import PackedSamples, Rays


@runtime_checkable
class Field(Protocol):
    """Positions are in world coordinates; directions have unit length; density is per unit of world length."""

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        """(n,) >= 0 for positions (n, 3)."""
        ...

    def __call__(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """rgb (n, channels) in [0, 1] and density (n,) >= 0."""
        ...


@runtime_checkable
class RayField(Field, Protocol):
    """A field that takes packed samples whole, so that it can encode directions once per ray and fuse what follows.

    Rendering and training use these methods where a field has them; the results are those of `Field`.
    """

    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        """(capacity,) density of every sample, without gradient."""
        ...

    def sample_visibility(
        self, rays: Rays, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor
    ) -> Tensor:
        """(capacity,) bool: what `ops.visibility` says of `sample_density`; hidden samples need not be evaluated."""
        ...

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        """(capacity, 4): rgb = sigmoid of the first three, density = truncated exp of the last."""
        ...
