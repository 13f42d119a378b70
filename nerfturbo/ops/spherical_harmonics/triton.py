"""Spherical harmonics up to degree 4: one program evaluates BLOCK directions, all basis functions of each. Values (n,
degree^2) fp32 row by row; directions fp16/bf16/fp32 with any strides. See docs/ops/spherical_harmonics.md."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._sink import Node
from .._triton import cdiv, check_kernel_float, empty_in_layout_of, launchable, load_point, own_block

BLOCK = 128


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


@triton.jit
def _degree_3(p, x, y, z, m):
    """The gradient's share of the five quadratic functions; p points at the first."""
    g4 = tl.load(p, mask=m, other=0.0) * 1.0925484305920792
    g5 = tl.load(p + 1, mask=m, other=0.0) * -1.0925484305920792
    g6 = tl.load(p + 2, mask=m, other=0.0) * (6.0 * 0.31539156525252005)
    g7 = tl.load(p + 3, mask=m, other=0.0) * -1.0925484305920792
    g8 = tl.load(p + 4, mask=m, other=0.0) * (2.0 * 0.5462742152960396)
    return g4 * y + g7 * z + g8 * x, g4 * x + g5 * z - g8 * y, g5 * y + g6 * z + g7 * x


@triton.jit
def _degree_4(p, x, y, z, m):
    """The gradient's share of the seven cubic functions; p points at the first."""
    xx, yy, zz = x * x, y * y, z * z
    g9 = tl.load(p, mask=m, other=0.0) * -0.5900435899266435
    g10 = tl.load(p + 1, mask=m, other=0.0) * 2.890611442640554
    g11 = tl.load(p + 2, mask=m, other=0.0) * -0.4570457994644658
    g12 = tl.load(p + 3, mask=m, other=0.0) * 0.3731763325901154
    g13 = tl.load(p + 4, mask=m, other=0.0) * -0.4570457994644658
    g14 = tl.load(p + 5, mask=m, other=0.0) * 1.445305721320277
    g15 = tl.load(p + 6, mask=m, other=0.0) * -0.5900435899266435
    five = 5.0 * zz - 1.0
    dx = 6.0 * g9 * x * y + g10 * y * z + g13 * five + 2.0 * g14 * x * z + 3.0 * g15 * (xx - yy)
    dy = 3.0 * g9 * (xx - yy) + g10 * x * z + g11 * five - 2.0 * g14 * y * z - 6.0 * g15 * x * y
    dz = g10 * x * y + 10.0 * z * (g11 * y + g13 * x) + g12 * (15.0 * zz - 3.0) + g14 * (xx - yy)
    return dx, dy, dz


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["stride_axis", "stride_grad_axis"])
def _backward_kernel(
    p_directions, p_grad_out, p_grad, n, stride_row, stride_axis, stride_grad, stride_grad_axis,
    DEGREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, m = own_block(n, BLOCK)
    x, y, z = load_point(p_directions, i, m, stride_row, stride_axis)
    p = p_grad_out + i.to(tl.int64) * (DEGREE * DEGREE)
    dx, dy, dz = x * 0.0, y * 0.0, z * 0.0
    if DEGREE > 1:
        dy = -0.4886025119029199 * tl.load(p + 1, mask=m, other=0.0)
        dz = 0.4886025119029199 * tl.load(p + 2, mask=m, other=0.0)
        dx = -0.4886025119029199 * tl.load(p + 3, mask=m, other=0.0)
    if DEGREE > 2:
        ax, ay, az = _degree_3(p + 4, x, y, z, m)
        dx, dy, dz = dx + ax, dy + ay, dz + az
    if DEGREE > 3:
        bx, by, bz = _degree_4(p + 9, x, y, z, m)
        dx, dy, dz = dx + bx, dy + by, dz + bz
    row = p_grad + i.to(tl.int64) * stride_grad
    tl.store(row, dx, mask=m)
    tl.store(row + stride_grad_axis, dy, mask=m)
    tl.store(row + 2 * stride_grad_axis, dz, mask=m)


def _forward(directions: Tensor, degree: int) -> Tensor:
    n = directions.shape[0]
    out = torch.empty(n, degree * degree, dtype=torch.float32, device=directions.device)
    if n:
        _forward_kernel[(cdiv(n, BLOCK),)](directions, out, n, *directions.stride(), DEGREE=degree, BLOCK=BLOCK)
    return out


class _SphericalHarmonics(Node):
    @staticmethod
    def forward(ctx, directions: Tensor, degree: int) -> Tensor:
        ctx.save_for_backward(directions)
        ctx.degree = degree
        return _forward(directions, degree)

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (directions,) = ctx.saved_tensors
        grad, n = empty_in_layout_of(directions), directions.shape[0]
        if n:
            _backward_kernel[(cdiv(n, BLOCK),)](
                directions, grad_out.contiguous(), grad, n, *directions.stride(), *grad.stride(),
                DEGREE=ctx.degree, BLOCK=BLOCK,
            )  # fmt: skip
        return (grad,)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    check_kernel_float(directions=directions)
    if not directions.requires_grad or not torch.is_grad_enabled():
        return _forward(directions, degree)
    return _SphericalHarmonics.apply(directions, degree)
