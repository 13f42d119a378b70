"""What a radiance field is here: two methods. Anything with them plugs in; nothing must be subclassed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
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


@runtime_checkable
class RegularizedField(Field, Protocol):
    """A field with a prior of its own, which the training step adds to the loss."""

    def regularization(self, step: int | Tensor) -> Tensor:
        """() differentiable; the same on every rank. `step` may live on the device: draws come from `ops.random`."""
        ...


# (name of a parameter in its field, a tensor of its old shape) -> the same in its new shape. Moments and running means
# have `.first`, `.second` or `.average` behind the name.
Carry = Callable[[str, Tensor], Tensor]


@runtime_checkable
class AdaptiveField(Field, Protocol):
    """A field whose parameters change their shapes while it trains: sparse voxels are pruned and subdivided.

    `nerfturbo.training.refine` measures what the training rays see, then lets the field change, carries the optimizer's
    state over and has the step recorded anew; all ranks do it at the same step. What shapes there are is part of the
    field's state: `load_state_dict` takes a state of other shapes.
    """

    def refinement_due(self, progress: float, step: int) -> bool:
        """Whether to change now: after `step` steps, and a share `progress` of the run."""
        ...

    def new_marks(self) -> Tensor:
        """Zeros, for `mark` to raise."""
        ...

    def mark(self, marks: Tensor, positions: Tensor, weights: Tensor) -> None:
        """Note in `marks` that samples at world positions (n, 3) had these rendering weights (n,) in a pixel."""
        ...

    def refine(self, marks: Tensor) -> Carry:
        """Change the parameters; the result does the same to tensors that belong to them."""
        ...

    def match_shapes(self, state: Mapping[str, Tensor]) -> bool:
        """Take the shapes of a state of this field, not its values; whether anything changed."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...


def field_part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


@runtime_checkable
class Connected(Protocol):
    """A field that reads half copies of its tables, and adds gradients to buffers, where a trainer hands them in."""

    def connect(
        self, halves: Mapping[Tensor, Tensor], grads: Mapping[Tensor, Tensor], found_inf: Tensor | None
    ) -> None:
        """By parameter: its half copy, where there is one, and the buffer of its gradient."""
        ...

    def read_as(self, dtype: torch.dtype) -> None:
        """Read copies in this precision from now on, without training."""
        ...
