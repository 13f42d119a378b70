"""Gather and multiply-add; gradients by autograd."""

from __future__ import annotations

from torch import Tensor

from ...types import Aabb, PackedSamples
from ..contraction import Contraction, fold
from ..gather import take_rows


def sample_positions(
    origins: Tensor, directions: Tensor, samples: PackedSamples, *, aabb: Aabb | None, contraction: Contraction = "none"
) -> Tensor:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, 3)
    index = samples.ray_indices.long()
    middle = samples.midpoints().detach().to(origins.dtype)
    positions = take_rows(origins, index) + take_rows(directions, index) * middle[:, None]
    return positions if aabb is None else fold(aabb.normalize(positions), contraction)
