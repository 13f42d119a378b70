"""What a radiance field is here: two methods. Anything with them plugs in; nothing must be subclassed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


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
