"""How far cameras are from the true ones, up to the similarity of the whole: refined ones stand in a frame of their
own, shifted, turned and scaled a little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nerfturbo.data.cameras import Cameras, transform_points, transform_poses
from nerfturbo.data.formats.colmap import points_file
from nerfturbo.data.keypoints import _model_folder
from nerfturbo.errors import InputError
from nerfturbo.evaluation.align import turn_degrees


@dataclass(frozen=True)
class CameraErrors:
    """Means over the cameras, after the best similarity between the two sets was applied."""

    degrees: float
    distance: float
    seen: float  # between what the two see at the distance of the scene
    similarity: Tensor  # (4, 4) float64, from the first set to the second


def best_similarity(source: Tensor, target: Tensor) -> Tensor:
    """(4, 4) float64: the rotation, scale and shift that bring points (n, 3) closest to others (Umeyama's)."""
    source, target = source.double().cpu(), target.double().cpu()
    from_mean, to_mean = source.mean(0), target.mean(0)
    a, b = source - from_mean, target - to_mean
    left, sizes, right = torch.linalg.svd(b.T @ a)
    signs = torch.ones(3, dtype=torch.float64)
    signs[2] = torch.sign(torch.linalg.det(left @ right))
    rotation = left @ torch.diag(signs) @ right
    scale = float((sizes * signs).sum() / a.square().sum().clamp(min=1e-12))
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3] = scale * rotation
    matrix[:3, 3] = to_mean - matrix[:3, :3] @ from_mean
    return matrix


def frame_points(cameras: Cameras, distance: float) -> Tensor:
    """(6 n, 3) float64: of each camera its position, and the middle and four points about it of what it sees at a
    distance: cameras that agree in these see the same there."""
    poses = cameras.camera_to_world.double().cpu()
    right, up, backward, position = poses.unbind(-1)
    steps = [(0.0, 0.0), (0.2, 0.0), (-0.2, 0.0), (0.0, 0.2), (0.0, -0.2)]
    seen = [position + distance * (x * right + y * up - backward) for x, y in steps]
    return torch.stack([position, *seen], dim=1).reshape(-1, 3)


def camera_errors(found: Cameras, truth: Cameras, distance: float) -> CameraErrors:
    """How far cameras are from the true ones, up to the similarity of the whole that fits best what they see at a
    distance: that of the scene's middle, say."""
    ours, theirs = frame_points(found, distance), frame_points(truth, distance)
    matrix = best_similarity(ours, theirs)
    moved = transform_poses(found.camera_to_world.double().cpu(), matrix)
    true = truth.camera_to_world.double().cpu()
    degrees = turn_degrees(moved[:, :, :3].transpose(1, 2) @ true[:, :, :3])
    distances = (moved[..., 3] - true[..., 3]).norm(dim=-1)
    apart = (transform_points(ours, matrix) - theirs).view(-1, 6, 3)[:, 1:].norm(dim=-1)
    return CameraErrors(float(degrees.mean()), float(distances.mean()), float(apart.mean()), matrix)


def has_keypoints(source: str) -> bool:
    """Whether a scene's source is a COLMAP reconstruction, or photos that COLMAP posed, with points."""
    try:
        return points_file(_model_folder(source)[1]) is not None
    except InputError:
        return False
