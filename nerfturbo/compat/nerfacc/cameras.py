"""OpenCV's lens models. The ways back are found by Newton's method; nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError


def opencv_lens_undistortion(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """(..., 2) undistorted points on the plane at depth 1, for params (..., n) or (n,).

    n is 0 (nothing to undo), 1 (k1), 2 (k1 k2), 4 (k1 k2 p1 p2) or 8 (k1 k2 p1 p2 k3 k4 k5 k6). A step is left out
    where the Jacobian's determinant is below `eps`. Not differentiable.
    """
    return _opencv_lens_undistortion(uv, params, eps, iters)


@torch.no_grad()
def opencv_lens_undistortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """(..., 2) undistorted points for fisheye params (..., 4) or (4,): k1 k2 k3 k4. Not differentiable."""
    _check(uv, params, (4,))
    k1, k2, k3, k4 = params.unbind(-1)
    distorted = torch.linalg.vector_norm(uv, dim=-1)
    angle = distorted
    for _ in range(iters):
        square = angle * angle
        value = angle * (1.0 + square * (k1 + square * (k2 + square * (k3 + square * k4))))
        slope = 1.0 + square * (3.0 * k1 + square * (5.0 * k2 + square * (7.0 * k3 + square * 9.0 * k4)))
        step = torch.where(slope.abs() > eps, (value - distorted) / slope, torch.zeros_like(slope))
        angle = angle - step
    scale = torch.where(distorted > eps, torch.tan(angle) / distorted.clamp_min(eps), torch.ones_like(angle))
    return uv * scale[..., None]


def _check(uv: Tensor, params: Tensor, sizes: tuple[int, ...]) -> None:
    if uv.shape[-1] != 2:
        raise InputError("uv", "shape (..., 2)", str(tuple(uv.shape)))
    if params.shape[-1] not in sizes:
        raise InputError("params", f"{', '.join(map(str, sizes))} coefficients", str(params.shape[-1]))


def _coefficients(params: Tensor) -> tuple[Tensor, ...]:
    padded = torch.nn.functional.pad(params, (0, 8 - params.shape[-1]))
    return padded.unbind(-1)


def _opencv_lens_distortion(uv: Tensor, params: Tensor) -> Tensor:
    """Where the lens puts undistorted points (..., 2)."""
    _check(uv, params, (0, 1, 2, 4, 8))
    k1, k2, p1, p2, k3, k4, k5, k6 = _coefficients(params)
    x, y = uv.unbind(-1)
    square = x * x + y * y
    above = 1.0 + square * (k1 + square * (k2 + square * k3))
    radial = above / (1.0 + square * (k4 + square * (k5 + square * k6)))
    moved_x = x * radial + 2.0 * p1 * x * y + p2 * (square + 2.0 * x * x)
    moved_y = y * radial + 2.0 * p2 * x * y + p1 * (square + 2.0 * y * y)
    return torch.stack([moved_x, moved_y], dim=-1)


def _opencv_lens_distortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-10) -> Tensor:
    """Where a fisheye lens puts undistorted points (..., 2)."""
    _check(uv, params, (4,))
    k1, k2, k3, k4 = params.unbind(-1)
    radius = torch.linalg.vector_norm(uv, dim=-1)
    angle = torch.atan(radius)
    square = angle * angle
    moved = angle * (1.0 + square * (k1 + square * (k2 + square * (k3 + square * k4))))
    scale = torch.where(radius > eps, moved / radius.clamp_min(eps), torch.ones_like(radius))
    return uv * scale[..., None]


@torch.no_grad()
def _opencv_lens_undistortion(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    _check(uv, params, (0, 1, 2, 4, 8))
    if params.shape[-1] == 0:
        return uv
    k1, k2, p1, p2, k3, k4, k5, k6 = _coefficients(params)
    x0, y0 = uv.unbind(-1)
    x, y = x0, y0
    for _ in range(iters):
        square = x * x + y * y
        above, below = (
            1.0 + square * (k1 + square * (k2 + square * k3)),
            1.0 + square * (k4 + square * (k5 + square * k6)),
        )
        d_above, d_below = k1 + square * (2 * k2 + square * 3 * k3), k4 + square * (2 * k5 + square * 3 * k6)
        radial, slope = above / below, (d_above * below - above * d_below) / (below * below)
        error_x = x * radial + 2.0 * p1 * x * y + p2 * (square + 2.0 * x * x) - x0
        error_y = y * radial + 2.0 * p2 * x * y + p1 * (square + 2.0 * y * y) - y0
        xx = radial + 2.0 * slope * x * x + 2.0 * p1 * y + 6.0 * p2 * x
        xy = 2.0 * slope * x * y + 2.0 * p1 * x + 2.0 * p2 * y
        yy = radial + 2.0 * slope * y * y + 2.0 * p2 * x + 6.0 * p1 * y
        determinant = xx * yy - xy * xy
        usable = determinant.abs() > eps
        safe = torch.where(usable, determinant, torch.ones_like(determinant))
        x = x - torch.where(usable, (yy * error_x - xy * error_y) / safe, torch.zeros_like(x))
        y = y - torch.where(usable, (xx * error_y - xy * error_x) / safe, torch.zeros_like(y))
    return torch.stack([x, y], dim=-1)
