"""Lens models with a formula both ways, which COLMAP writes and OpenCV does not have; plane at depth 1, y down.

Division, with the distorted radius r and k, the first coefficient:            direction = (x, y, 1 + k r^2)

EUCM (Khomutenko, Garcia and Martinet), with coefficients alpha and beta:      direction = (x, y, m),
    m = (1 - alpha^2 beta r^2) / (alpha sqrt(1 - (2 alpha - 1) beta r^2) + 1 - alpha)

Equirectangular: x is the azimuth and y the angle below the horizon, so that the focal lengths of a whole sphere are
width / (2 pi) and height / pi.

Directions have OpenCV's axes (z forward) and need not have unit length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
