"""OpenCV's lens models, of `data.lenses`, with nerfacc's Newton steps back; nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...data.lenses import fisheye_radius, opencv_points
from ...errors import InputError


@torch.no_grad()
def opencv_lens_undistortion(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """(..., 2) undistorted points on the plane at depth 1, for params (..., n) or (n,).

    n is 0 (nothing to undo), 1 (k1), 2 (k1 k2), 4 (k1 k2 p1 p2) or 8 (k1 k2 p1 p2 k3 k4 k5 k6). A step is left out
    where the Jacobian's determinant is below `eps`. Not differentiable.
    """
    _check(uv, params, (0, 1, 2, 4, 8))
    if params.shape[-1] == 0:
        return uv
    found = uv
    for _ in range(iters):
        moved, (xx, xy, yx, yy) = _distort(found, params)
        error_x, error_y = (moved - uv).unbind(-1)
        determinant = xx * yy - xy * yx
        step = torch.stack([yy * error_x - xy * error_y, xx * error_y - yx * error_x], dim=-1) / determinant[..., None]
        found = found - torch.where(determinant.abs()[..., None] > eps, step, torch.zeros_like(step))
    return found


@torch.no_grad()
def opencv_lens_undistortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """(..., 2) undistorted points for fisheye params (..., 4) or (4,): k1 k2 k3 k4. Not differentiable."""
    _check(uv, params, (4,))
    distorted = torch.linalg.vector_norm(uv, dim=-1)
    angle = distorted
    for _ in range(iters):
        value, slope = fisheye_radius(angle, params)
        step = torch.where(slope.abs() > eps, (value - distorted) / slope, torch.zeros_like(slope))
        angle = angle - step
    scale = torch.where(distorted > eps, torch.tan(angle) / distorted.clamp_min(eps), torch.ones_like(angle))
    return uv * scale[..., None]


_opencv_lens_undistortion = opencv_lens_undistortion


def _opencv_lens_distortion(uv: Tensor, params: Tensor) -> Tensor:
    """Where the lens puts undistorted points (..., 2)."""
    _check(uv, params, (0, 1, 2, 4, 8))
    return _distort(uv, params)[0]


def _opencv_lens_distortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-10) -> Tensor:
    """Where a fisheye lens puts undistorted points (..., 2)."""
    _check(uv, params, (4,))
    radius = torch.linalg.vector_norm(uv, dim=-1)
    moved = fisheye_radius(torch.atan(radius), params)[0]
    scale = torch.where(radius > eps, moved / radius.clamp_min(eps), torch.ones_like(radius))
    return uv * scale[..., None]


def _check(uv: Tensor, params: Tensor, sizes: tuple[int, ...]) -> None:
    if uv.shape[-1] != 2:
        raise InputError("uv", "shape (..., 2)", str(tuple(uv.shape)))
    if params.shape[-1] not in sizes:
        raise InputError("params", f"{', '.join(map(str, sizes))} coefficients", str(params.shape[-1]))


def _distort(uv: Tensor, params: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Distorted points, and the Jacobian's xx, xy, yx and yy."""
    return opencv_points(uv, torch.nn.functional.pad(params, (0, 8 - params.shape[-1])))
