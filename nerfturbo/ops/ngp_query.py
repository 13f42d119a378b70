"""Instant-NGP at points with directions, from the hash table to colours and densities, as one op.

    rgb = sigmoid(c), density = exp(min(y_0, 15))      c and y_0 as `ngp_field` gives them for `hash_encode`

For loops that ask a field point by point: one node of autograd and five launches forward and back, not three nodes with
activations between them. The gradient of a saturated density is that of the exponential, not zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation
from .hash_encode import HashLayout
from .ngp_field import MAX_LOGIT, NgpWeights, check_weights


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        rgb, density = torch.sigmoid(logits[:, :3]), torch.exp(logits[:, 3].clamp(max=MAX_LOGIT))
        ctx.save_for_backward(rgb, density)
        ctx.by_column = logits.stride(0) == 1
        return rgb, density

    @staticmethod
    def backward(ctx: Any, grad_rgb: Tensor, grad_density: Tensor) -> Tensor:  # type: ignore[override]
        rgb, density = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are wanted
            return torch.cat([grad_rgb * rgb * (1.0 - rgb), (grad_density * density)[:, None]], dim=-1)
        n = rgb.shape[0]
        grad = torch.empty((4, n) if ctx.by_column else (n, 4), dtype=rgb.dtype, device=rgb.device)
        grad = grad.t() if ctx.by_column else grad  # as the logits lie in memory
        torch.ops.aten.sigmoid_backward.grad_input(grad_rgb, rgb, grad_input=grad[:, :3])
        torch.mul(grad_density, density, out=grad[:, 3])
        return grad


def activate(logits: Tensor) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) and density (n,) of fp32 or fp64 logits (n, 4), as one node of autograd.

    >>> rgb, density = activate(torch.zeros(1, 4))
    >>> rgb.tolist(), density.tolist()
    ([[0.5, 0.5, 0.5]], [1.0])
    """
    return _Activate.apply(logits)  # type: ignore[no-any-return]


def ngp_query(
    positions: Tensor,
    directions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    *,
    half: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) and density (n,), fp32, at `positions` (n, 3) in [0, 1] seen along encoded `directions` (n, ...).

    Differentiable to positions, directions, table and weights. `half`, a half copy of the table, is read in its place.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> weights = NgpWeights(*(torch.zeros(s) for s in ((2, 4), (2, 2), (2, 4), (2, 2), (3, 2))))
    >>> rgb, density = ngp_query(torch.rand(5, 3), torch.ones(5, 2), torch.ones(layout.n_entries, 2), layout, weights)
    >>> rgb.mean().item(), density.tolist()
    (0.5, [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    check_shape("positions", positions, ("n", 3))
    check_float("positions", positions)
    check_shape("directions", directions, (positions.shape[0], "directions"))
    check_float("directions", directions)
    check_shape("table", table, (layout.n_entries, layout.n_features))
    check_float("table", table)
    if half is not None:
        check_shape("half", half, (layout.n_entries, layout.n_features))
        check_float("half", half)
    check_weights(weights, layout.n_outputs, directions.shape[1])
    check_device(positions=positions, directions=directions, table=table, half=half, **weights._asdict())
    query = implementation("ngp_query", "ngp_query", positions)
    return query(positions, directions, table, layout, weights, half=half)
