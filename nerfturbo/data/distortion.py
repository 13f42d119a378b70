"""Lens distortion on the image plane at depth 1 (x right, y down), both ways: OpenCV's model and its fisheye model.

OpenCV, with r^2 = x^2 + y^2 of the undistorted point and coefficients k1 k2 p1 p2 k3 k4 k5 k6:

    a = (1 + k1 r^2 + k2 r^4 + k3 r^6) / (1 + k4 r^2 + k5 r^4 + k6 r^6)
    x_d = a x + 2 p1 x y + p2 (r^2 + 2 x^2),    y_d = a y + p1 (r^2 + 2 y^2) + 2 p2 x y

Fisheye, with the angle t to the optical axis and coefficients k1 k2 k3 k4 (four zeros behind them):

    r_d = t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8)

The ways back have no formula; Newton's method takes a fixed number of steps, so that nothing waits for the device
(fewer on a CPU, where it costs nothing to see that all points have arrived).
Both models fold over at some radius, beyond which a pixel belongs to no ray: `is_valid_opencv` and `is_valid_fisheye`
tell which pixels those are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEWTON_STEPS = 12
_RADIAL = (0, 1, 4)  # where k1 k2 k3 stand among the coefficients
_RATIONAL = (5, 6, 7)  # k4 k5 k6
_SEARCH_RADIUS = 16.0  # 86 degrees off the axis: the plane model of a lens ends before
_SEARCH_STEPS = 4096
_RESIDUAL = 1e-5  # on the plane at depth 1: a hundredth of a pixel at a focal length of 1000
_TINY = 1e-12


def distort_opencv(points: Tensor, coefficients: Tensor) -> Tensor:
    """Undistorted points (m, 2) to where the lens puts them; coefficients (m, 8)."""
    return _distort_with_jacobian(points, coefficients)[0]


def undistort_opencv(points: Tensor, coefficients: Tensor) -> Tensor:
    """The inverse of `distort_opencv`; meaningless where `is_valid_opencv` says no, but always finite."""
    current = points
    for _ in range(NEWTON_STEPS):
        step = _newton_step(points, current, coefficients)
        current = current - step
        if has_arrived(step):
            break
    return current


def has_arrived(step: Tensor) -> bool:
    """Whether no further Newton step would move any point: each is about the square of the one before. Never asked of
    a GPU, which would have to be waited for."""
    if step.device.type != "cpu":
        return False
    return step.numel() == 0 or float(step.detach().abs().amax()) < 0.1 * torch.finfo(step.dtype).eps ** 0.5


def is_valid_opencv(points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
    """(m,) bool: whether a ray leads to the distorted point, before the lens model folds over; `limits` (m,) are those
    of `opencv_limit`."""
    found = undistort_opencv(points, coefficients)
    again, (xx, xy, yx, yy) = _distort_with_jacobian(found, coefficients)
    residual = (again - points).abs().amax(-1)
    unfolded = found.norm(dim=-1) < limits
    return (residual < _RESIDUAL * (1.0 + points.abs().amax(-1))) & (xx * yy - xy * yx > 0.0) & unfolded


def opencv_limit(coefficients: Tensor) -> Tensor:
    """(n,): the undistorted radius at which the radial part of n lenses stops growing; 16 (86 degrees) where it never
    does. A search for each row: meant for cameras, not for rays."""
    radius = torch.linspace(0.0, _SEARCH_RADIUS, _SEARCH_STEPS + 1, dtype=torch.float64, device=coefficients.device)
    scale, slope = _radial_scale((radius * radius)[None, :], coefficients.detach().double()[:, None, :])
    growing = scale + 2.0 * slope * (radius * radius)[None, :] > 0.0  # d (r a(r^2)) / dr
    first_fold = torch.cat([growing, torch.zeros_like(growing[:, :1])], dim=1).int().argmin(dim=1)
    return radius[first_fold.clamp(max=_SEARCH_STEPS)].to(coefficients.dtype)


def distort_fisheye(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) with OpenCV's axes (z forward) to image-plane points (m, 2); angles up to 180 degrees."""
    across = torch.linalg.vector_norm(directions[:, :2], dim=-1)
    radius, _ = _fisheye_radius(torch.atan2(across, directions[:, 2]), coefficients)
    on_axis = across < _TINY
    factor = torch.where(on_axis, 1.0 / directions[:, 2], radius / across.clamp_min(_TINY))
    return directions[:, :2] * factor[:, None]


def undistort_fisheye(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to unit directions (m, 3) with OpenCV's axes (z forward)."""
    radius = torch.linalg.vector_norm(points, dim=-1)
    angle = _fisheye_angle(radius, coefficients)
    across = torch.where(radius < _TINY, torch.ones_like(radius), torch.sin(angle) / radius.clamp_min(_TINY))
    return torch.cat([points * across[:, None], torch.cos(angle)[:, None]], dim=-1)


def is_valid_fisheye(points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
    """(m,) bool: whether a ray leads to the distorted point, before the lens model folds over; `limits` (m,) are those
    of `fisheye_limit`."""
    radius = torch.linalg.vector_norm(points, dim=-1)
    angle = _fisheye_angle(radius, coefficients)
    again, slope = _fisheye_radius(angle, coefficients)
    close = (again - radius).abs() < _RESIDUAL * (1.0 + radius)
    return close & (slope > 0.0) & (angle < limits)


def fisheye_limit(coefficients: Tensor) -> Tensor:
    """(n,): the angle at which the radius of n lenses stops growing; pi where it never does."""
    angle = torch.linspace(0.0, math.pi, _SEARCH_STEPS + 1, dtype=torch.float64, device=coefficients.device)
    growing = _fisheye_radius(angle[None, :], coefficients.detach().double()[:, None, :])[1] > 0.0
    first_fold = torch.cat([growing, torch.zeros_like(growing[:, :1])], dim=1).int().argmin(dim=1)
    return angle[first_fold.clamp(max=_SEARCH_STEPS)].to(coefficients.dtype)


def _radial_scale(r2: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """a(r^2) and da / d(r^2)."""
    k1, k2, k3 = (coefficients[..., i] for i in _RADIAL)
    k4, k5, k6 = (coefficients[..., i] for i in _RATIONAL)
    above = 1.0 + r2 * (k1 + r2 * (k2 + r2 * k3))
    below = 1.0 + r2 * (k4 + r2 * (k5 + r2 * k6))
    d_above = k1 + r2 * (2.0 * k2 + r2 * 3.0 * k3)
    d_below = k4 + r2 * (2.0 * k5 + r2 * 3.0 * k6)
    below = torch.where(below.abs() < 1e-6, torch.full_like(below, 1e-6), below)
    return above / below, (d_above * below - above * d_below) / (below * below)


def _distort_with_jacobian(
    points: Tensor, coefficients: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    x, y = points.unbind(-1)
    p1, p2 = coefficients[..., 2], coefficients[..., 3]
    r2 = x * x + y * y
    scale, slope = _radial_scale(r2, coefficients)
    distorted = torch.stack(
        [
            scale * x + 2.0 * p1 * x * y + p2 * (r2 + 2.0 * x * x),
            scale * y + p1 * (r2 + 2.0 * y * y) + 2.0 * p2 * x * y,
        ],
        dim=-1,
    )
    xx = scale + 2.0 * slope * x * x + 2.0 * p1 * y + 6.0 * p2 * x
    xy = 2.0 * slope * x * y + 2.0 * p1 * x + 2.0 * p2 * y
    yy = scale + 2.0 * slope * y * y + 6.0 * p1 * y + 2.0 * p2 * x
    return distorted, (xx, xy, xy, yy)


def _newton_step(target: Tensor, current: Tensor, coefficients: Tensor) -> Tensor:
    value, (xx, xy, yx, yy) = _distort_with_jacobian(current, coefficients)
    error_x, error_y = (value - target).unbind(-1)
    determinant = xx * yy - xy * yx
    # Beyond the fold there is no root: keep the steps finite there and let the validity test say so.
    determinant = torch.where(determinant.abs() < 1e-4, torch.full_like(determinant, 1e-4), determinant)
    step = torch.stack([yy * error_x - xy * error_y, xx * error_y - yx * error_x], dim=-1) / determinant[:, None]
    return step.clamp(-0.5, 0.5)


def _fisheye_radius(angle: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """r_d and dr_d / dt."""
    k1, k2, k3, k4 = (coefficients[..., i] for i in range(4))
    t2 = angle * angle
    radius = angle * (1.0 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * k4))))
    return radius, 1.0 + t2 * (3.0 * k1 + t2 * (5.0 * k2 + t2 * (7.0 * k3 + t2 * 9.0 * k4)))


def _fisheye_angle(radius: Tensor, coefficients: Tensor) -> Tensor:
    angle = radius.clamp(max=math.pi)
    for _ in range(NEWTON_STEPS):
        value, slope = _fisheye_radius(angle, coefficients)
        step = (value - radius) / torch.where(slope.abs() < 1e-4, torch.full_like(slope, 1e-4), slope)
        angle = (angle - step.clamp(-0.5, 0.5)).clamp(0.0, math.pi)
        if has_arrived(step):
            break
    return angle
