"""Hash grid, both networks and their activations behind one node of autograd: the kernels of `hash_encode`, `ngp_field`
and `fused_mlp` in a row. dtypes and determinism are theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hash_encode import HashLayout
from ..ngp_field import NgpWeights
from ..ngp_query import activate
from . import fused_mlp, hash_encode, ngp_field
from ._common import check_kernel_float
from ._hash_backward import add_table_gradient
from ._mlp import fits


class _NgpQuery(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        positions: Tensor,
        directions: Tensor,
        table: Tensor,
        half: Tensor | None,
        layout: HashLayout,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        source = table if half is None else half
        x = hash_encode.encode_forward(positions, source, layout, None)
        values, features = ngp_field.forward(
            x, directions, None, NgpWeights(*weights), None, any(ctx.needs_input_grad), activated=True
        )
        read = source if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(positions, directions, read, x, features, values, *weights)
        ctx.layout, ctx.like = layout, (table.shape, table.dtype)
        return values[:, :3], values[:, 3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rgb: Tensor, grad_density: Tensor) -> tuple[Tensor | None, ...]:
        positions, directions, source, x, features, values, *weights = ctx.saved_tensors
        shape, dtype = ctx.like
        sums = ngp_field.zero_sums(weights)
        to_positions = to_directions = to_table = None
        if ctx.needs_input_grad[1]:
            to_directions = torch.zeros(directions.shape, dtype=torch.float32, device=x.device)
        if ctx.needs_input_grad[2]:
            to_table = torch.zeros(shape, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            dfeatures = ngp_field.colour_backward(
                x, directions, None, NgpWeights(*weights), features, grad_rgb, None, sums, to_directions,
                dlogit=grad_density, values=values,
            )  # fmt: skip
            needs_x = ctx.needs_input_grad[0] or to_table is not None
            dx = fused_mlp.backward(x, weights[:2], dfeatures, None, needs_x=needs_x, sums=sums[:2])
            if dx is not None and to_table is not None:
                add_table_gradient(to_table, positions, dx, ctx.layout, None, None)
            if dx is not None and ctx.needs_input_grad[0]:
                to_positions = hash_encode.positions_gradient(positions, source, dx, ctx.layout, None)
        elif ctx.needs_input_grad[0]:
            to_positions = torch.zeros_like(positions)
        if to_table is not None and dtype != torch.float32:
            to_table = to_table.to(dtype)
        if to_directions is not None and directions.dtype != torch.float32:
            to_directions = to_directions.to(directions.dtype)
        # positions, directions, table, half, layout, weights
        return to_positions, to_directions, to_table, None, None, *ngp_field.in_types_of(weights, sums)


def ngp_query(
    positions: Tensor,
    directions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: NgpWeights,
    *,
    half: Tensor | None,
) -> tuple[Tensor, Tensor]:
    source = table if half is None else half
    check_kernel_float(positions=positions, directions=directions, table=table, half=half, **weights._asdict())
    if not fits(weights, source.dtype, positions.device):
        encoding = hash_encode.hash_encode(positions, table, layout, half=half)
        return activate(ngp_field.ngp_field(encoding, directions, None, weights))
    ngp_field.check_widths(layout.n_outputs, directions.shape[1], weights)
    half = None if half is None else half.detach().contiguous()
    own = (w.contiguous() for w in weights)
    return _NgpQuery.apply(positions.float(), directions.contiguous(), table.contiguous(), half, layout, *own)
