"""Scale-aware hash features: a level counts less for a sample whose footprint is wider than the level's cells.

    weight_l = erf(1 / (sqrt(8) * footprint * s_l))        s_l: cells of level l per unit of position

`footprint` is the standard deviation of the region that a sample stands for, in the unit of positions; the weight is
that of a Gaussian within a cell about its middle (Zip-NeRF). A footprint of 0 leaves features as they are.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation
from ._sink import check_count
from .hash_encode import HashLayout


def level_weights(footprints: Tensor, layout: HashLayout) -> Tensor:
    """(n, n_levels): what each level counts at footprints (n,); 1 at footprint 0, where the argument is infinite."""
    wide = footprints if footprints.dtype == torch.float64 else footprints.float()
    return torch.erf(1.0 / (math.sqrt(8.0) * wide[:, None] * _scales(layout, wide.device).to(wide.dtype)))


@functools.lru_cache(maxsize=16)
def _scales(layout: HashLayout, device: torch.device) -> Tensor:
    """Made once: numbers of the host must not be copied while a CUDA graph is recorded."""
    return torch.tensor([level.scale for level in layout.levels], dtype=torch.float64, device=device)


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None = None) -> Tensor:
    """`encoding` (n, n_levels * n_features) of `hash_encode`, each level times its weight at `footprints` (n,) >= 0.

    Differentiable to the encoding alone. `n_used`, a count on the device, says how many rows count: the others come out
    as zero and receive no gradient, whatever they hold.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> fade_levels(torch.ones(2, 4), torch.tensor([0.0, 0.05]), layout).round(decimals=2)
    tensor([[1.0000, 1.0000, 1.0000, 1.0000],
            [0.9900, 0.9900, 0.1200, 0.1200]])
    """
    check_shape("encoding", encoding, ("n", layout.n_outputs))
    check_float("encoding", encoding)
    check_shape("footprints", footprints, (encoding.shape[0],))
    check_float("footprints", footprints)
    check_count(n_used, encoding.device)
    check_device(encoding=encoding, footprints=footprints)
    return implementation("fade_levels", "fade_levels", encoding)(encoding, footprints.detach(), layout, n_used=n_used)
