"""Instant-NGP point by point as the ops it is made of, and the activations; gradients by autograd."""

from __future__ import annotations

from torch import Tensor

from ..hash_encode import HashLayout, hash_encode
from ..ngp_field import NgpWeights, ngp_field
from ..ngp_query import activate


def ngp_query(
    positions: Tensor,
    directions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    *,
    half: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return activate(ngp_field(hash_encode(positions, table, layout, half=half), directions, None, weights))
