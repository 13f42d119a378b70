"""A mesh against the exact surface of a built-in scene: how far it is off, and how much of it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.export.mesh import Mesh
from scene_distance import signed_distance

BAND = 0.02  # candidates for points of the true surface lie this close to it
CLOSE = 1e-4
OUTSIDE = 1e-3  # a step off the surface is outside, unless two solids touch there and it is none


@dataclass(frozen=True)
class SurfaceScore:
    """Mean distances in voxels. The cameras of training see a part of the surface; the rest nobody could know."""

    accuracy: float  # from the mesh to the true surface
    completeness: float  # from the true surface, where cameras see it, to the mesh
    completeness_everywhere: float  # from all of the true surface, undersides included
    seen_fraction: float  # of the true surface


def surface_points(name: str, n_points: int, *, half_extent: float = 1.5, seed: int = 0) -> Tensor:
    """(n_points, 3) spread evenly over the surface of a built-in scene: points near it, moved onto it."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while sum(part.shape[0] for part in found) < n_points:
        points = (torch.rand(1 << 18, 3, generator=generator) * 2.0 - 1.0) * half_extent
        points = points[signed_distance(name, points).abs() < BAND].double()
        for _ in range(3):
            points = points - signed_distance(name, points)[:, None] * _gradient(name, points)
        points = points[signed_distance(name, points).abs() < CLOSE]
        beyond = signed_distance(name, points + OUTSIDE * _gradient(name, points))
        found.append(points[beyond > 0.5 * OUTSIDE].float())
        if found[-1].shape[0] == 0:
            raise InputError("name", "a scene with a surface in its box", name)
    return torch.cat(found)[:n_points]


def _gradient(name: str, points: Tensor, step: float = 1e-4) -> Tensor:
    shifts = torch.eye(3, dtype=points.dtype) * step
    columns = [signed_distance(name, points + s) - signed_distance(name, points - s) for s in shifts]
    return torch.nn.functional.normalize(torch.stack(columns, dim=-1), dim=-1)


def score_surface(mesh: Mesh, name: str, seen: Tensor, truth: Tensor, *, voxel: float) -> SurfaceScore:
    """Compare a mesh, in the scene's own coordinates, with points of the true surface (n, 3), of which cameras see
    some (n,)."""
    import trimesh
    from scipy.spatial import KDTree

    body = trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False)
    samples = trimesh.sample.sample_surface(body, 4 * truth.shape[0], seed=0)[0]
    off = signed_distance(name, torch.as_tensor(samples).float()).abs().mean() / voxel
    gaps = torch.as_tensor(KDTree(samples).query(truth.numpy())[0]) / voxel
    return SurfaceScore(float(off), float(gaps[seen].mean()), float(gaps.mean()), float(seen.float().mean()))
