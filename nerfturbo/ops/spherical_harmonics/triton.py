"""Spherical harmonics up to degree 4: one program evaluates BLOCK directions, all basis functions of each. Values (n,
degree^2) fp32 row by row; directions fp16/bf16/fp32 with any strides. See docs/ops/spherical_harmonics.md."""

import torch
import triton.language as tl
from torch import Tensor

from .._sink import Node
from .._triton import cdiv, check_kernel_float, empty_in_layout_of, launchable, load_point, own_block
from . import SLOPES

BLOCK = 128
PARTS, COUNT = tl.constexpr(sum(SLOPES, ())), tl.constexpr(4 * len(SLOPES))  # slope after slope


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["stride_axis"])
def _forward_kernel(p_directions, p_out, n, stride_row, stride_axis, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    i, m = own_block(n, BLOCK)
    x, y, z = load_point(p_directions, i, m, stride_row, stride_axis)
    p = p_out + i.to(tl.int64) * (DEGREE * DEGREE)
    tl.store(p, tl.full([BLOCK], 0.28209479177387814, tl.float32), mask=m)
    if DEGREE > 1:
        tl.store(p + 1, -0.4886025119029199 * y, mask=m)
        tl.store(p + 2, 0.4886025119029199 * z, mask=m)
        tl.store(p + 3, -0.4886025119029199 * x, mask=m)
    if DEGREE > 2:
        tl.store(p + 4, 1.0925484305920792 * x * y, mask=m)
        tl.store(p + 5, -1.0925484305920792 * y * z, mask=m)
        tl.store(p + 6, 0.31539156525252005 * (3.0 * z * z - 1.0), mask=m)
        tl.store(p + 7, -1.0925484305920792 * x * z, mask=m)
        tl.store(p + 8, 0.5462742152960396 * (x * x - y * y), mask=m)
    if DEGREE > 3:
        tl.store(p + 9, -0.5900435899266435 * y * (3.0 * x * x - y * y), mask=m)
        tl.store(p + 10, 2.890611442640554 * x * y * z, mask=m)
        tl.store(p + 11, -0.4570457994644658 * y * (5.0 * z * z - 1.0), mask=m)
        tl.store(p + 12, 0.3731763325901154 * z * (5.0 * z * z - 3.0), mask=m)
        tl.store(p + 13, -0.4570457994644658 * x * (5.0 * z * z - 1.0), mask=m)
        tl.store(p + 14, 1.445305721320277 * z * (x * x - y * y), mask=m)
        tl.store(p + 15, -0.5900435899266435 * x * (x * x - 3.0 * y * y), mask=m)


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["stride_axis"])
def _backward_kernel(
    p_values, p_grad_out, p_grad, n, stride_row, stride_axis, DEGREE: tl.constexpr, BLOCK: tl.constexpr
):
    i, m = own_block(n, BLOCK)
    p_values += i.to(tl.int64) * (DEGREE * DEGREE)
    p_grad_out += i.to(tl.int64) * (DEGREE * DEGREE)
    for axis in tl.static_range(3):
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(0, COUNT, 4):
            if PARTS[k] == axis and PARTS[k + 1] < DEGREE * DEGREE:
                value = tl.load(p_values + PARTS[k + 2], mask=m, other=0.0)
                total += PARTS[k + 3] * value * tl.load(p_grad_out + PARTS[k + 1], mask=m, other=0.0)
        tl.store(p_grad + i.to(tl.int64) * stride_row + axis * stride_axis, total, mask=m)


def _forward(directions: Tensor, degree: int) -> Tensor:
    n = directions.shape[0]
    out = torch.empty(n, degree * degree, dtype=torch.float32, device=directions.device)
    if n:
        _forward_kernel[(cdiv(n, BLOCK),)](directions, out, n, *directions.stride(), DEGREE=degree, BLOCK=BLOCK)
    return out


class _SphericalHarmonics(Node):
    @staticmethod
    def forward(ctx, directions: Tensor, degree: int) -> Tensor:
        out, ctx.degree = _forward(directions, degree), degree
        ctx.save_for_backward(directions, out)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        directions, values = ctx.saved_tensors
        grad, n = empty_in_layout_of(directions), directions.shape[0]
        if n:
            _backward_kernel[(cdiv(n, BLOCK),)](
                values, grad_out.contiguous(), grad, n, *grad.stride(), DEGREE=ctx.degree, BLOCK=BLOCK
            )
        return (grad,)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    check_kernel_float(directions=directions)
    if not directions.requires_grad or not torch.is_grad_enabled():
        return _forward(directions, degree)
    return _SphericalHarmonics.apply(directions, degree)
