"""Level weights by torch's error function; gradients by autograd."""

from __future__ import annotations

from torch import Tensor

from .._sink import zero_tail
from ..fade_levels import level_weights
from ..hash_encode import HashLayout


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None) -> Tensor:
    weights = level_weights(zero_tail(footprints[:, None], n_used)[:, 0], layout)
    weights = weights.repeat_interleave(layout.n_features, dim=1)
    return (zero_tail(encoding, n_used) * weights).to(encoding.dtype)
