"""The two networks behind a hash grid, as one op: Instant-NGP's density and colour.

    y   = W_2 relu(W_1 encoding)                        density network; y_0 is the density logit
    c   = W_5 relu(W_4 relu(W_3 [direction, y]))        colour network on the direction's encoding and all of y
    raw = (c_0, c_1, c_2, y_0)                          logits: density = exp(y_0), colour = sigmoid(c)

Fused because the networks are so small that writing and reading their hidden layers would cost more than computing
them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_float, check_int, check_shape
from ._dispatch import implementation, optimized
from ._sink import GradientSink, check_count, redirect_all, zero_tail
from .hash_encode import HashLayout

MAX_LOGIT = 15.0  # density = exp(min(y_0, 15)), so that it stays finite


class NgpWeights(NamedTuple):
    """The five matrices, each (outputs, inputs) as in torch.nn.Linear; fp32 masters or halves."""

    density_in: Tensor  # (hidden, encoding)
    density_out: Tensor  # (features, hidden); row 0 gives the density logit
    colour_in: Tensor  # (hidden, directions + features): first the direction's columns
    colour_mid: Tensor  # (hidden, hidden)
    colour_out: Tensor  # (3, hidden)


def ngp_field(
    encoding: Tensor,
    directions: Tensor,
    ray_indices: Tensor | None,
    weights: NgpWeights,
    *,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, 4) fp32 logits: three of colour, one of density.

    `encoding` (n, encoding) of the samples' positions, fp16 or bf16 for speed; `directions` (n_rays, directions), the
    encoded view directions, one row per ray; `ray_indices` (n,) int32 says which row is a sample's (None: every sample
    has its own). Differentiable to encoding, directions and weights. A `sink` with five buffers takes the weights'
    gradients in place of autograd. `n_used`, a count on the device, says how many rows count: the others come out as
    zero and receive no gradient; their ray index must be a valid one.

    >>> weights = NgpWeights(*(torch.ones(s) for s in ((2, 3), (2, 2), (2, 4), (2, 2), (3, 2))))
    >>> ngp_field(torch.ones(1, 3), torch.ones(1, 2), torch.zeros(1, dtype=torch.int32), weights).tolist()
    [[56.0, 56.0, 56.0, 6.0]]
    """
    check_shape("encoding", encoding, ("n", "encoding"))
    check_float("encoding", encoding)
    check_float("directions", directions)
    if ray_indices is None:
        check_shape("directions", directions, (encoding.shape[0], "directions"))
    else:
        check_shape("directions", directions, ("n_rays", "directions"))
        check_shape("ray_indices", ray_indices, (encoding.shape[0],))
        check_int("ray_indices", ray_indices, torch.int32)
    check_count(n_used, encoding.device)
    weights = NgpWeights(*weights)
    check_weights(weights, encoding.shape[1], directions.shape[1])
    check_device(encoding=encoding, directions=directions, ray_indices=ray_indices, **weights._asdict())
    if directions.shape[0] == 0 and encoding.shape[0] > 0:
        raise InputError("directions", "at least one row for the samples to point at", "(0, ...)")
    if sink is not None:
        sink.check(NgpWeights._fields, weights)
    field = optimized("ngp_field", "ngp_field", encoding)
    if field is not None:
        return field(encoding, directions, ray_indices, weights, sink=sink, n_used=n_used)
    field = implementation("ngp_field", "ngp_field", encoding)
    own = NgpWeights(*redirect_all(weights, sink))
    return zero_tail(field(zero_tail(encoding, n_used), directions, ray_indices, own), n_used)


def ngp_density(
    positions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: tuple[Tensor, Tensor],
    *,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n,) fp32 density logits at `positions` (n, 3) in [0, 1]: encoding and density network in one, no gradient.

    For looking ahead: which samples are visible, which cells of a grid are occupied. `weights` are density_in and
    density_out; `table` (n_entries, n_features) sets the precision (pass the half copy). Rows past the device count
    `n_used` come out as zero.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> table = torch.ones(layout.n_entries, 2)
    >>> ngp_density(torch.rand(1, 3), table, layout, (torch.ones(3, 4), torch.ones(2, 3))).round().tolist()
    [12.0]
    """
    _check_look_up(positions, table, layout, weights)
    check_count(n_used, positions.device)
    density = optimized("ngp_field", "ngp_density", positions)
    with torch.no_grad():
        if density is not None:
            return density(positions, table, layout, weights, n_used=n_used)
        density = implementation("ngp_field", "ngp_density", positions)
        return zero_tail(density(zero_tail(positions, n_used), table, layout, weights), n_used)


def ngp_densities(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> Tensor:
    """(n,) fp32 densities, exp(min(logit, 15)) of `ngp_density`; no gradient.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> ngp_densities(torch.rand(1, 3), torch.ones(layout.n_entries, 2), layout, (torch.zeros(3, 4), torch.ones(2, 3)))
    tensor([1.])
    """
    _check_look_up(positions, table, layout, weights)
    densities = implementation("ngp_field", "ngp_densities", positions)
    if not torch.is_grad_enabled():
        return densities(positions, table, layout, weights)
    with torch.no_grad():
        return densities(positions, table, layout, weights)


def _check_look_up(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> None:
    check_shape("positions", positions, ("n", 3))
    check_float("positions", positions)
    check_shape("table", table, (layout.n_entries, layout.n_features))
    check_float("table", table)
    density_in, density_out = weights
    check_shape("weights[0]", density_in, ("hidden", layout.n_outputs))
    check_shape("weights[1]", density_out, ("features", density_in.shape[0]))
    check_device(positions=positions, table=table, density_in=density_in, density_out=density_out)


def check_weights(weights: NgpWeights, encoding: int, directions: int) -> None:
    """That the matrices fit each other, an encoding and directions of these widths."""
    if all(isinstance(w, Tensor) for w in weights) and _fit(tuple(w.shape for w in weights), encoding, directions):
        return
    check_shape("density_in", weights.density_in, ("hidden", encoding))
    hidden = weights.density_in.shape[0]
    check_shape("density_out", weights.density_out, ("features", hidden))
    check_shape("colour_in", weights.colour_in, (hidden, directions + weights.density_out.shape[0]))
    check_shape("colour_mid", weights.colour_mid, (hidden, hidden))
    check_shape("colour_out", weights.colour_out, (3, hidden))


@functools.lru_cache(maxsize=64)
def _fit(shapes: tuple[tuple[int, ...], ...], encoding: int, directions: int) -> bool:
    """Known from the last time, as a loop asks at every step; which matrix is wrong, `check_weights` finds out."""
    hidden, features = shapes[0][:1], shapes[1][:1]
    if not hidden or not features:
        return False
    width = directions + features[0]
    return shapes == ((*hidden, encoding), (*features, *hidden), (*hidden, width), hidden * 2, (3, *hidden))
