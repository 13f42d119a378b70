"""Where the samples lie in space."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..types import Aabb, PackedSamples
from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation
from .contraction import Contraction, fold


def sample_positions(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    *,
    aabb: Aabb | None = None,
    contraction: Contraction = "none",
) -> Tensor:
    """(capacity, 3): origin + t_mid * direction of each sample's ray; with `aabb`, mapped so that the box is [0, 1]^3,
    and with a `contraction` about the box so that all of space is (`contraction.fold`).

    Differentiable to origins and directions (n_rays, 3), not to t. The tail gets the origin of ray 0.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([3.0]))
    >>> sample_positions(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]), samples).tolist()
    [[0.0, 0.0, 2.0]]
    """
    check_shape("origins", origins, (samples.n_rays, 3))
    check_shape("directions", directions, (samples.n_rays, 3))
    check_float("origins", origins)
    check_device(origins=origins, directions=directions, t_starts=samples.t_starts)
    if aabb is None and contraction != "none":
        raise InputError("aabb", "a box to contract space about", "None")
    place = implementation("sample_positions", "sample_positions", origins)
    if contraction != "none" and torch.is_grad_enabled() and (origins.requires_grad or directions.requires_grad):
        return fold(place(origins, directions, samples, aabb=aabb, contraction="none"), contraction)
    return place(origins, directions, samples, aabb=aabb, contraction=contraction)
