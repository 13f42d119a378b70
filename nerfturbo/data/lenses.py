"""Lens models on the image plane at depth 1 (x right, y down), both ways; and tables of what pixels look along.

Directions have OpenCV's axes (z forward) and need not have unit length; t is the angle to the optical axis and (a, b)
that angle along the azimuth. With r^2 = x^2 + y^2 of the undistorted point:

opencv          k1 k2 p1 p2 k3 k4 k5 k6
    R = (1 + k1 r^2 + k2 r^4 + k3 r^6) / (1 + k4 r^2 + k5 r^4 + k6 r^6)
    x_d = x R + 2 p1 x y + p2 (r^2 + 2 x^2),    y_d = y R + p1 (r^2 + 2 y^2) + 2 p2 x y
fisheye         k1 k2 k3 k4
    r_d = t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8)
fov             w (Devernay and Faugeras)
    r_d = atan(2 r tan(w / 2)) / w
thin_prism      k1 k2 p1 p2 k3 k4 s1 s2
    R = 1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8
    x_d = a R + 2 p1 a b + p2 (t^2 + 2 a^2) + s1 t^2,    y_d = b R + p1 (t^2 + 2 b^2) + 2 p2 a b + s2 t^2
rad_tan_prism   k0 to k5, p0 p1, s0 to s3; with x = a R, y = b R, R = 1 + k0 t^2 + k1 t^4 + ... + k5 t^12
    x_d = x + p0 (r^2 + 2 x^2) + 2 p1 x y + s0 r^2 + s1 r^4,    y_d = y + 2 p0 x y + p1 (r^2 + 2 y^2) + s2 r^2 + s3 r^4
division        k; of a distorted point (x, y):  direction = (x, y, 1 + k r^2)
eucm            alpha beta (Khomutenko, Garcia and Martinet); of a distorted point:  direction = (x, y, m),
    m = (1 - alpha^2 beta r^2) / (alpha sqrt(1 - (2 alpha - 1) beta r^2) + 1 - alpha)
equirectangular x is the azimuth, y the angle below the horizon: the focal lengths of a whole sphere are width / (2 pi)
    and height / pi

Where there is no formula for the way back, Newton's method takes a fixed number of steps, so that nothing waits for the
device (fewer on a CPU, where it costs nothing to see that all points have arrived). Most models fold over at some
radius, beyond which a pixel belongs to no ray: `is_valid_*` tell which pixels those are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .cameras import CameraModel, Cameras

PIXEL_CENTER = 0.5
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


_FLAT = 1e-4  # an angle w below which the FOV model is a pinhole


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


_SMALL = 1e-6  # what a denominator or a root is kept above, where a pixel has no ray


def distort_division(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) to image-plane points (m, 2): the smaller root, which the centre of the picture is on."""
    across2 = directions[:, :2].square().sum(-1)
    root = (directions[:, 2].square() - 4.0 * coefficients[..., 0] * across2).clamp_min(0.0).sqrt()
    return directions[:, :2] * (2.0 / (directions[:, 2] + root))[:, None]


def undistort_division(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to directions (m, 3); meaningless where `is_valid_division` says no, but finite."""
    along = 1.0 + coefficients[..., 0] * points.square().sum(-1)
    return torch.cat([points, along[:, None]], dim=-1)


def is_valid_division(points: Tensor, coefficients: Tensor) -> Tensor:
    """(m,) bool: whether a ray in front of the camera leads to the distorted point, before the model folds over."""
    turn = coefficients[..., 0] * points.square().sum(-1)
    return (turn > -1.0 + _SMALL) & (turn < 1.0 - _SMALL)


def distort_eucm(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3) to image-plane points (m, 2)."""
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    length = (beta * directions[:, :2].square().sum(-1) + directions[:, 2].square()).clamp_min(0.0).sqrt()
    along = alpha * length + (1.0 - alpha) * directions[:, 2]
    return directions[:, :2] / torch.where(along.abs() < _SMALL, torch.full_like(along, _SMALL), along)[:, None]


def undistort_eucm(points: Tensor, coefficients: Tensor) -> Tensor:
    """Image-plane points (m, 2) to directions (m, 3); meaningless where `is_valid_eucm` says no, but finite."""
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    r2 = points.square().sum(-1)
    root = (1.0 - (2.0 * alpha - 1.0) * beta * r2).clamp_min(_SMALL).sqrt()
    below = (alpha * root + 1.0 - alpha).clamp_min(_SMALL)
    return torch.cat([points, ((1.0 - alpha.square() * beta * r2) / below)[:, None]], dim=-1)


def is_valid_eucm(points: Tensor, coefficients: Tensor) -> Tensor:
    """(m,) bool: whether a ray leads to the distorted point; some of them may lie behind the camera's plane."""
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    return (1.0 - (2.0 * alpha - 1.0) * beta * points.square().sum(-1) > _SMALL) & (beta > 0.0)


def project_sphere(directions: Tensor, coefficients: Tensor) -> Tensor:
    """Directions (m, 3), all around, to azimuth and angle below the horizon (m, 2)."""
    u, v, w = directions.unbind(-1)
    return torch.stack([torch.atan2(u, w), torch.atan2(v, (u * u + w * w).sqrt())], dim=-1)


def unproject_sphere(points: Tensor, coefficients: Tensor) -> Tensor:
    """Azimuth and angle below the horizon (m, 2) to unit directions (m, 3)."""
    azimuth, below = points.unbind(-1)
    level = torch.cos(below)
    return torch.stack([level * torch.sin(azimuth), torch.sin(below), level * torch.cos(azimuth)], dim=-1)


def is_valid_sphere(points: Tensor, coefficients: Tensor) -> Tensor:
    """(m,) bool: whether the point lies on the sphere once, and not beyond a pole."""
    azimuth, below = points.unbind(-1)
    return (azimuth.abs() <= math.pi * (1.0 + 1e-5)) & (below.abs() <= 0.5 * math.pi * (1.0 + 1e-5))


CPU_BYTES = 64 << 20  # of a table: small beside what a run takes anyway
CUDA_BYTES, CUDA_SHARE = 2 << 30, 0.125  # at most, and of the free memory
_PARTS = {"cpu": 1 << 18, "cuda": 1 << 21}  # pixels at a time: bounds memory, and on a GPU the number of launches
_BYTES_PER_PIXEL = 12
_EDGE_POINTS = 33  # on each side of a picture, corners among them
_REMEMBERED, _REMEMBERED_PIXELS = 4, 1 << 21  # lenses of pictures, for as many rays a pixel; and their size


@dataclass(frozen=True)
class LensTable:
    """What pixels look along in their camera's own axes, as `Cameras.local_directions` gives it."""

    directions: Tensor  # (n, 3) float32, one lens after the other, row by row
    shifts: Tensor  # (n_images,) int64: pixel p of the pool, in picture i, is entry p + shifts[i]

    def look_up(self, image: Tensor, pixel: Tensor) -> Tensor:
        """(m, 3): the directions of pixels (m,) of the pool, which lie in pictures (m,)."""
        return self.directions[pixel + self.shifts[image]]


def make_lens_table(cameras: Cameras, offsets: Tensor, *, limit: int | None = None) -> LensTable | None:
    """On the cameras' device; `offsets` (n + 1,) are those of their pictures. None for pinholes, which need none, and
    where it would take more than `limit` bytes."""
    if cameras.model == "pinhole" or cameras.distortion is None:
        return None
    pictures, lens_of = _lenses(cameras)
    sizes = cameras.size.cpu()[pictures].prod(-1)
    total = int(sizes.sum())
    if total * _BYTES_PER_PIXEL > (_room(cameras.device) if limit is None else limit):
        return None
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    directions = _directions_of(cameras[pictures.to(cameras.device)])
    return LensTable(directions, (starts[lens_of] - offsets[:-1].cpu()).to(cameras.device))


def _lenses(cameras: Cameras) -> tuple[Tensor, Tensor]:
    """One picture through each lens, (n_lenses,), and the lens of each picture, (n,); on the CPU."""
    parts = [cameras.focal, cameras.center, cameras.size.float()]
    parts += [] if cameras.distortion is None else [cameras.distortion]
    lenses, lens_of = torch.unique(torch.cat(parts, dim=-1).detach().cpu(), dim=0, return_inverse=True)
    pictures = torch.full((len(lenses),), len(cameras))
    return pictures.scatter_reduce(0, lens_of, torch.arange(len(cameras)), "amin"), lens_of


def _directions_of(cameras: Cameras) -> Tensor:
    """(n, 3) on the cameras' device: what every pixel of every picture looks along, picture after picture."""
    widths, sizes = cameras.size[:, 0].contiguous(), cameras.size.prod(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    total, part = int(offsets[-1]), pixels_at_once(cameras.device)
    directions = torch.empty((total, 3), dtype=torch.float32, device=cameras.device)
    for first in range(0, total, part):
        pixel = torch.arange(first, min(first + part, total), device=cameras.device)
        directions[first : first + pixel.shape[0]] = cameras.local_directions(*pixel_centers(offsets, widths, pixel))
    return directions


def pixels_at_once(device: torch.device) -> int:
    """Pixels whose lens is inverted together: whole words of a mask."""
    return _PARTS.get(device.type, _PARTS["cuda"])


def pixel_centers(offsets: Tensor, widths: Tensor, pixel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Picture, x and y of pixels (m,) of pictures stored one after the other, row by row."""
    image = torch.searchsorted(offsets, pixel, right=True) - 1
    local, width = pixel - offsets[image], widths[image]
    row = torch.div(local, width, rounding_mode="floor")
    return image, (local - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER


def all_valid(cameras: Cameras) -> bool:
    """Whether a ray leads to every pixel of every picture. A lens is valid from its centre outwards, so the edges of
    its pictures decide."""
    if cameras.model == "pinhole":
        return True
    cameras = cameras[_lenses(cameras)[0].to(cameras.device)]
    steps = torch.linspace(0.0, 1.0, _EDGE_POINTS, device=cameras.device)
    low, high = torch.zeros_like(steps), torch.ones_like(steps)
    edge = torch.stack([torch.cat([steps, steps, low, high]), torch.cat([low, high, steps, steps])], dim=-1)
    points = edge * cameras.size[:, None, :]  # (n, points, 2)
    index = torch.arange(len(cameras), device=cameras.device).repeat_interleave(edge.shape[0])
    x, y = points.reshape(-1, 2).unbind(-1)
    return bool(cameras.is_valid(index, x, y).all())


def valid_pixels(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height, width) bool on a device: to which pixels of picture `index` a ray leads; None where to all of them."""
    return None if cameras.model == "pinhole" else _valid(*_lens_of(cameras, index), device)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _valid(model: CameraModel, width: int, height: int, lens: tuple[float, ...], device: torch.device) -> Tensor | None:
    camera = _through(model, width, height, lens)
    if all_valid(camera):
        return None
    camera, offsets = camera.to(device), torch.tensor([0, width * height], device=device)
    widths, pixels = camera.size[:, 0].contiguous(), torch.arange(width * height, device=device)
    pixels = pixels.split(pixels_at_once(device))
    valid = torch.cat([camera.is_valid(*pixel_centers(offsets, widths, pixel)) for pixel in pixels])
    return None if bool(valid.all()) else valid.view(height, width)


def picture_directions(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height * width, 3) on a device: what the pixels of picture `index` look along in the camera's own axes.

    The lenses of the last few pictures are remembered, so that frame after frame through one lens inverts it once.
    None for pinholes, which need no table, and for pictures too large to keep one.
    """
    width, height = (int(side) for side in cameras.size[index])
    if cameras.model == "pinhole" or cameras.distortion is None or width * height > _REMEMBERED_PIXELS:
        return None
    return _directions(*_lens_of(cameras, index), device)


def _lens_of(cameras: Cameras, index: int) -> tuple[CameraModel, int, int, tuple[float, ...]]:
    """All that says which pixel looks where, as what can be remembered by."""
    assert cameras.distortion is not None  # of a pinhole nobody asks
    width, height = (int(side) for side in cameras.size[index])
    numbers = torch.cat([cameras.focal[index], cameras.center[index], cameras.distortion[index]])
    return cameras.model, width, height, tuple(numbers.tolist())


def _through(model: CameraModel, width: int, height: int, lens: tuple[float, ...]) -> Cameras:
    from .cameras import Cameras  # imports this file

    focal, center, distortion = torch.tensor([lens]).split([2, 2, len(lens) - 4], dim=1)
    size = torch.tensor([[width, height]])
    return Cameras(torch.eye(3, 4)[None], focal, center, size, model=model, distortion=distortion)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _directions(model: CameraModel, width: int, height: int, lens: tuple[float, ...], device: torch.device) -> Tensor:
    return _directions_of(_through(model, width, height, lens).to(device))


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    return min(CUDA_BYTES, int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]))
