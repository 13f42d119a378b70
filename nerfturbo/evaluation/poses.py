"""Poses between poses: rotations as unit quaternions, positions on a smooth curve."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError


def quaternions(rotations: Tensor) -> Tensor:
    """(n, 4) unit quaternions w, x, y, z of rotation matrices (n, 3, 3); the sign is arbitrary.

    The largest eigenvector of Bar-Itzhack's symmetric matrix: stable for every rotation, and the nearest one for a
    matrix that is one only nearly.
    """
    m = rotations.double().unbind(-2)
    (a, b, c), (d, e, f), (g, h, i) = (row.unbind(-1) for row in m)
    rows = [
        [a - e - i, b + d, c + g, h - f],
        [b + d, e - a - i, f + h, c - g],
        [c + g, f + h, i - a - e, d - b],
        [h - f, c - g, d - b, a + e + i],
    ]
    matrix = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2) / 3.0
    vectors = torch.linalg.eigh(matrix).eigenvectors[..., -1]  # x, y, z, w
    return vectors[..., [3, 0, 1, 2]]


def rotations(quaternion: Tensor) -> Tensor:
    """(n, 3, 3) from unit quaternions (n, 4)."""
    w, x, y, z = quaternion.unbind(-1)
    rows = [
        [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)],
        [2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)],
        [2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def pose_distances(poses: Tensor, others: Tensor, scale: float) -> Tensor:
    """(n,) how far apart poses (n, 3, 4) are: distance over `scale` plus the angle between their axes in radians."""
    trace = (poses[..., :3] * others[..., :3]).sum((-1, -2))
    angle = torch.acos(((trace - 1.0) * 0.5).clamp(-1.0, 1.0))
    return (poses[..., 3] - others[..., 3]).norm(dim=-1) / scale + angle


def shortest_tour(poses: Tensor, scale: float) -> Tensor:
    """(n,) an order of the poses that goes from each to its nearest neighbour not seen yet, from the first on."""
    n = poses.shape[0]
    apart = pose_distances(poses[:, None], poses[None], scale)
    order = [0]
    left = torch.ones(n, dtype=torch.bool)
    left[0] = False
    for _ in range(n - 1):
        nearest = int(torch.where(left, apart[order[-1]], torch.inf).argmin())
        left[nearest] = False
        order.append(nearest)
    return torch.tensor(order)


def interpolate_poses(keys: Tensor, n_frames: int, scale: float) -> Tensor:
    """(n_frames, 3, 4) from the first key pose (n, 3, 4) to the last, at an even pace.

    Positions follow a Catmull-Rom curve, which passes through every key; rotations turn about one axis from key to key.
    """
    if keys.shape[0] < 2:
        raise InputError("keys", "at least 2 poses", str(keys.shape[0]))
    lengths = pose_distances(keys[:-1], keys[1:], scale).clamp_min(1e-6).double()
    marks = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.linspace(0.0, 1.0, n_frames, dtype=torch.float64) * marks[-1]
    index = (torch.searchsorted(marks, place, right=True) - 1).clamp(0, keys.shape[0] - 2)
    share = ((place - marks[index]) / lengths[index]).clamp(0.0, 1.0)[:, None]
    turned = _slerp(_aligned(quaternions(keys[:, :, :3])), index, share)
    return torch.cat([rotations(turned), _curve(keys[:, :, 3].double(), index, share)[..., None]], dim=-1).float()


def _aligned(quaternion: Tensor) -> Tensor:
    """Signs such that neighbours turn the short way."""
    dots = (quaternion[1:] * quaternion[:-1]).sum(-1)
    signs = torch.cat([dots.new_ones(1), torch.where(dots < 0.0, -1.0, 1.0).to(dots)]).cumprod(0)
    return quaternion * signs[:, None]


def _slerp(keys: Tensor, index: Tensor, share: Tensor) -> Tensor:
    first, second = keys[index], keys[index + 1]
    angle = torch.acos((first * second).sum(-1, keepdim=True).clamp(-1.0, 1.0))
    sine = angle.sin()
    near = sine.abs() < 1e-6
    safe = torch.where(near, torch.ones_like(sine), sine)
    mixed = (((1.0 - share) * angle).sin() * first + (share * angle).sin() * second) / safe
    mixed = torch.where(near, torch.lerp(first, second, share), mixed)
    return mixed / mixed.norm(dim=-1, keepdim=True)


def _curve(points: Tensor, index: Tensor, t: Tensor) -> Tensor:
    last = points.shape[0] - 1
    p0, p1, p2, p3 = (points[(index + shift).clamp(0, last)] for shift in (-1, 0, 1, 2))
    tangent, bend = 0.5 * (p2 - p0), 0.5 * (p3 - p1)
    return (
        (2 * t**3 - 3 * t**2 + 1) * p1
        + (t**3 - 2 * t**2 + t) * tangent
        + (3 * t**2 - 2 * t**3) * p2
        + (t**3 - t**2) * bend
    )
