"""Instant-NGP as rendering needs it: positions to colour and density logits, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_float, check_int, check_shape
from ._dispatch import implementation
from ._sink import check_count
from .hash_encode import HashLayout
from .ngp_field import NgpWeights, check_weights


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    """Whether unused rows cost `ngp_logits` nothing here, so that it may be called with many more than are in use.

    Otherwise (fp32 on a GPU without TF32, networks too large to fuse) all rows are computed.
    """
    return implementation("ngp_logits", "skips_unused", table)(table, weights)


def ngp_logits(
    positions: Tensor,
    directions: Tensor,
    ray_indices: Tensor,
    *,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, 4) fp32: `ngp_field` of `hash_encode`, in one pass where that is faster. Not differentiable.

    `positions` (n, 3) in [0, 1]; `directions` (n_rays, directions), the encoded view directions; `ray_indices` (n,)
    int32 says which row is a sample's; `table` (n_entries, n_features) sets the precision (pass the half copy). Rows
    from the device count `n_used` on, whatever they hold, come out as anything at all and cost nothing.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> weights = NgpWeights(*(torch.ones(s) for s in ((2, 4), (2, 2), (2, 4), (2, 2), (3, 2))))
    >>> rays, table = torch.zeros(1, dtype=torch.int32), torch.ones(layout.n_entries, 2)
    >>> ngp_logits(torch.rand(1, 3), torch.ones(1, 2), rays, table=table, layout=layout, weights=weights).round()
    tensor([[72., 72., 72.,  8.]])
    """
    n = positions.shape[0]
    check_shape("positions", positions, ("n", 3))
    check_float("positions", positions)
    check_shape("directions", directions, ("n_rays", "directions"))
    check_float("directions", directions)
    check_shape("ray_indices", ray_indices, (n,))
    check_int("ray_indices", ray_indices, torch.int32)
    check_shape("table", table, (layout.n_entries, layout.n_features))
    check_float("table", table)
    check_count(n_used, positions.device)
    weights = NgpWeights(*weights)
    check_weights(weights, layout.n_outputs, directions.shape[1])
    check_device(positions=positions, directions=directions, ray_indices=ray_indices, table=table, **weights._asdict())
    if directions.shape[0] == 0 and n > 0:
        raise InputError("directions", "at least one row for the samples to point at", "(0, ...)")
    logits = implementation("ngp_logits", "ngp_logits", positions)
    with torch.no_grad():
        return logits(positions, directions, ray_indices, table=table, layout=layout, weights=weights, n_used=n_used)
