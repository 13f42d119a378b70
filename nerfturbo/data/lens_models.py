"""Lens models that COLMAP writes and OpenCV does not have, both ways, on the image plane at depth 1 (y down).

FOV (Devernay and Faugeras), with the undistorted radius r and the angle w, the first coefficient:

    r_d = atan(2 r tan(w / 2)) / w

Thin prism fisheye, with (a, b) the direction's angle t to the axis, taken along its azimuth, t^2 = a^2 + b^2, and
coefficients k1 k2 p1 p2 k3 k4 s1 s2:

    R = 1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8
    x_d = a R + 2 p1 a b + p2 (t^2 + 2 a^2) + s1 t^2,    y_d = b R + p1 (t^2 + 2 b^2) + 2 p2 a b + s2 t^2

Radial, tangential and thin prism fisheye, with coefficients k0 to k5, p0 p1, s0 to s3: the radial part first, whose
result (x, y), r^2 = x^2 + y^2, goes through the rest.

    R = 1 + k0 t^2 + k1 t^4 + ... + k5 t^12,    x = a R,    y = b R
    x_d = x + p0 (r^2 + 2 x^2) + 2 p1 x y + s0 r^2 + s1 r^4,    y_d = y + 2 p0 x y + p1 (r^2 + 2 y^2) + s2 r^2 + s3 r^4

The way back of the first is a formula, of the others Newton's method with a fixed number of steps. Directions have
OpenCV's axes (z forward) and need not have unit length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .distortion import NEWTON_STEPS, has_arrived

_TINY = 1e-12
_FLAT = 1e-4  # an angle w below which the FOV model is a pinhole
_RESIDUAL = 1e-5
_SEARCH_STEPS = 4096


def distort_fov(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) to image-plane points (m, 2)."""
    angle = coefficients[..., 0]
    across = torch.linalg.vector_norm(directions[:, :2], dim=-1)
    radius = torch.atan2(2.0 * across * torch.tan(0.5 * angle), directions[:, 2]) / angle.clamp_min(_FLAT)
    factor = torch.where(across < _TINY, 1.0 / directions[:, 2], radius / across.clamp_min(_TINY))
    factor = torch.where(angle < _FLAT, 1.0 / directions[:, 2], factor)
    return directions[:, :2] * factor[:, None]


def undistort_fov(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to directions (m, 3); meaningless where `is_valid_fov` says no, but finite."""
    angle = coefficients[..., 0]
    radius = torch.linalg.vector_norm(points, dim=-1)
    turn = radius * angle
    along = 2.0 * torch.tan(0.5 * angle) * torch.cos(turn)
    across = torch.where(radius < _TINY, angle, torch.sin(turn) / radius.clamp_min(_TINY))
    flat = angle < _FLAT
    across, along = torch.where(flat, 1.0, across), torch.where(flat, 1.0, along)
    return torch.cat([points * across[:, None], along[:, None]], dim=-1)


def is_valid_fov(points: Tensor, coefficients: Tensor) -> Tensor:
    """(m,) bool: whether a ray in front of the camera leads to the distorted point."""
    return torch.linalg.vector_norm(points, dim=-1) * coefficients[..., 0] < 0.5 * math.pi - 1e-4


def distort_thin_prism(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) to image-plane points (m, 2); angles up to 180 degrees."""
    return _prism_with_jacobian(_angles(directions), coefficients)[0]


def undistort_thin_prism(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to unit directions (m, 3); meaningless where `is_valid_thin_prism` says no."""
    return _from_angles(_solve(_prism_with_jacobian, points, coefficients))


def is_valid_thin_prism(points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
    """(m,) bool: whether a ray leads to the distorted point, before the lens model folds over; `limits` (m,) are those
    of `thin_prism_limit`."""
    return _is_valid(_prism_with_jacobian, points, coefficients, limits)


def thin_prism_limit(coefficients: Tensor) -> Tensor:
    """(n,): the angle at which the radial part of n lenses stops growing; pi where it never does."""
    return _limit(coefficients, (0, 1, 4, 5))


def distort_rad_tan_prism(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) to image-plane points (m, 2); angles up to 180 degrees."""
    return _rad_tan_with_jacobian(_angles(directions), coefficients)[0]


def undistort_rad_tan_prism(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to unit directions (m, 3); meaningless where `is_valid_rad_tan_prism` says no."""
    return _from_angles(_solve(_rad_tan_with_jacobian, points, coefficients))


def is_valid_rad_tan_prism(points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
    """(m,) bool: whether a ray leads to the distorted point, before the lens model folds over; `limits` (m,) are those
    of `rad_tan_prism_limit`."""
    return _is_valid(_rad_tan_with_jacobian, points, coefficients, limits)


def rad_tan_prism_limit(coefficients: Tensor) -> Tensor:
    """(n,): the angle at which the radial part of n lenses stops growing; pi where it never does."""
    return _limit(coefficients, (0, 1, 2, 3, 4, 5))


_Jacobian = tuple[Tensor, Tensor, Tensor, Tensor]  # xx xy yx yy
_Model = Callable[[Tensor, Tensor], tuple[Tensor, _Jacobian]]  # angles along the azimuth (m, 2), coefficients


def _angles(directions: Tensor) -> Tensor:
    """(m, 2): the angle to the axis, taken along the azimuth."""
    across = torch.linalg.vector_norm(directions[:, :2], dim=-1)
    angle = torch.atan2(across, directions[:, 2])
    factor = torch.where(across < _TINY, 1.0 / directions[:, 2], angle / across.clamp_min(_TINY))
    return directions[:, :2] * factor[:, None]


def _from_angles(plane: Tensor) -> Tensor:
    angle = torch.linalg.vector_norm(plane, dim=-1)
    across = torch.where(angle < _TINY, torch.ones_like(angle), torch.sin(angle) / angle.clamp_min(_TINY))
    return torch.cat([plane * across[:, None], torch.cos(angle)[:, None]], dim=-1)


def _prism_with_jacobian(plane: Tensor, coefficients: Tensor) -> tuple[Tensor, _Jacobian]:
    a, b = plane.unbind(-1)
    k1, k2, p1, p2, k3, k4, s1, s2 = coefficients.unbind(-1)
    t2 = a * a + b * b
    scale = 1.0 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * k4)))
    slope = k1 + t2 * (2.0 * k2 + t2 * (3.0 * k3 + t2 * 4.0 * k4))
    x = scale * a + 2.0 * p1 * a * b + p2 * (t2 + 2.0 * a * a) + s1 * t2
    y = scale * b + p1 * (t2 + 2.0 * b * b) + 2.0 * p2 * a * b + s2 * t2
    mixed = 2.0 * slope * a * b + 2.0 * p1 * a + 2.0 * p2 * b
    xx = scale + 2.0 * slope * a * a + 2.0 * p1 * b + 6.0 * p2 * a + 2.0 * s1 * a
    yy = scale + 2.0 * slope * b * b + 6.0 * p1 * b + 2.0 * p2 * a + 2.0 * s2 * b
    return torch.stack([x, y], dim=-1), (xx, mixed + 2.0 * s1 * b, mixed + 2.0 * s2 * a, yy)


def _rad_tan_with_jacobian(plane: Tensor, coefficients: Tensor) -> tuple[Tensor, _Jacobian]:
    a, b = plane.unbind(-1)
    radial, (p0, p1, s0, s1, s2, s3) = coefficients[..., :6], coefficients[..., 6:].unbind(-1)
    t2 = a * a + b * b
    scale, slope = torch.zeros_like(t2), torch.zeros_like(t2)  # Horner, of the polynomial and of its derivative
    for k in reversed(radial.unbind(-1)):
        slope = slope * t2 + scale
        scale = scale * t2 + k
    scale, slope = 1.0 + t2 * scale, scale + t2 * slope
    x, y = scale * a, scale * b
    r2 = x * x + y * y
    along_x, along_y = s0 + s1 * r2, s2 + s3 * r2
    x_d = x + p0 * (r2 + 2.0 * x * x) + 2.0 * p1 * x * y + along_x * r2
    y_d = y + 2.0 * p0 * x * y + p1 * (r2 + 2.0 * y * y) + along_y * r2
    in_x, in_y = 2.0 * (s0 + 2.0 * s1 * r2), 2.0 * (s2 + 2.0 * s3 * r2)
    xx = 1.0 + 6.0 * p0 * x + 2.0 * p1 * y + in_x * x
    xy = 2.0 * p0 * y + 2.0 * p1 * x + in_x * y
    yx = 2.0 * p0 * y + 2.0 * p1 * x + in_y * x
    yy = 1.0 + 2.0 * p0 * x + 6.0 * p1 * y + in_y * y
    aa, ab, bb = scale + 2.0 * slope * a * a, 2.0 * slope * a * b, scale + 2.0 * slope * b * b
    jacobian = (xx * aa + xy * ab, xx * ab + xy * bb, yx * aa + yy * ab, yx * ab + yy * bb)
    return torch.stack([x_d, y_d], dim=-1), jacobian


def _solve(model: _Model, points: Tensor, coefficients: Tensor) -> Tensor:
    current = points
    for _ in range(NEWTON_STEPS):
        value, (xx, xy, yx, yy) = model(current, coefficients)
        error_x, error_y = (value - points).unbind(-1)
        determinant = xx * yy - xy * yx
        determinant = torch.where(determinant.abs() < 1e-4, torch.full_like(determinant, 1e-4), determinant)
        step = torch.stack([yy * error_x - xy * error_y, xx * error_y - yx * error_x], dim=-1) / determinant[:, None]
        current = (current - step.clamp(-0.5, 0.5)).clamp(-math.pi, math.pi)
        if has_arrived(step):
            break
    return current


def _is_valid(model: _Model, points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
    plane = _solve(model, points, coefficients)
    again, (xx, xy, yx, yy) = model(plane, coefficients)
    residual = (again - points).abs().amax(-1)
    unfolded = torch.linalg.vector_norm(plane, dim=-1) < limits
    return (residual < _RESIDUAL * (1.0 + points.abs().amax(-1))) & (xx * yy - xy * yx > 0.0) & unfolded


def _limit(coefficients: Tensor, radial: Sequence[int]) -> Tensor:
    """(n,): the angle at which the radial part stops growing; pi where it never does. `radial`: where its k stand."""
    angle = torch.linspace(0.0, math.pi, _SEARCH_STEPS + 1, dtype=torch.float64, device=coefficients.device)
    rows = coefficients.detach().double()
    t2, slope = (angle * angle)[None, :], torch.zeros_like(angle)[None, :]
    for power, column in reversed(list(enumerate(radial, 1))):
        slope = t2 * (slope + (2.0 * power + 1.0) * rows[:, column : column + 1])
    growing = 1.0 + slope > 0.0  # d (t R(t^2)) / dt
    first_fold = torch.cat([growing, torch.zeros_like(growing[:, :1])], dim=1).int().argmin(dim=1)
    return angle[first_fold.clamp(max=_SEARCH_STEPS)].to(coefficients.dtype)
