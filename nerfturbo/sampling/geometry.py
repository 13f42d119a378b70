"""Occupancy from geometry that is known already: points of a reconstruction or a scan, triangles of a mesh."""

import torch
from torch import Tensor

from ..errors import InputError
from ..ops._checks import refuse
from ..types import Aabb

POINTS_AT_ONCE = 1 << 21  # points of a mesh held in memory at a time


def box_around(points: Tensor, *, margin: float = 0.05) -> Aabb:
    """The cube around points (n, 3), larger by `margin` of its size on every side."""
    low, high = points.amin(0), points.amax(0)
    center, half = ((low + high) * 0.5).tolist(), float((high - low).max()) * (0.5 + margin)
    return Aabb.cube(max(half, 1e-6), (center[0], center[1], center[2]))


def check_points(name: str, points: Tensor) -> Tensor:
    if points.dim() != 2 or points.shape[1] != 3 or points.shape[0] == 0:
        raise InputError(name, "shape (n, 3), at least one row", str(tuple(points.shape)))
    refuse(not bool(torch.isfinite(points).all()), name, "finite coordinates", "NaN or infinity among them")
    return points.detach().float()


def cells_with_points(points: Tensor, aabb: Aabb, resolution: int, levels: int) -> Tensor:
    """(levels, resolution, resolution, resolution) bool: the cells of each level that hold a point."""
    occupied = torch.zeros(levels, resolution**3, dtype=torch.bool, device=points.device)
    low, high = aabb.tensor(points.device)
    unit = (points - (low + high) * 0.5) / ((high - low) * 0.5)
    for level in range(levels):
        inside = unit[(unit.abs() <= 2.0**level).all(-1)] * 2.0**-level
        cell = ((inside + 1.0) * (0.5 * resolution)).long().clamp(0, resolution - 1)
        occupied[level, (cell[:, 0] * resolution + cell[:, 1]) * resolution + cell[:, 2]] = True
    return occupied.view(levels, resolution, resolution, resolution)


def cells_with_triangles(vertices: Tensor, faces: Tensor, aabb: Aabb, resolution: int, levels: int) -> Tensor:
    """Like `cells_with_points`, for points that cover every triangle at half a cell's spacing."""
    if faces.dim() != 2 or faces.shape[1] != 3 or faces.is_floating_point():
        raise InputError("faces", "shape (n, 3), indices of vertices", f"{tuple(faces.shape)} {faces.dtype}")
    if faces.numel() == 0 or int(faces.min()) < 0 or int(faces.max()) >= vertices.shape[0]:
        raise InputError("faces", f"indices from 0 to {vertices.shape[0] - 1}", "none, or others")
    corners = vertices[faces.long()]  # (n, 3, 3)
    longest = (corners - corners.roll(1, 1)).norm(dim=-1).amax(-1)
    wanted = (longest / (0.5 * min(aabb.size) / resolution)).clamp(1.0, 4096.0).log2().ceil().long()
    occupied = torch.zeros(levels, resolution, resolution, resolution, dtype=torch.bool, device=vertices.device)
    for power in wanted.unique().tolist():
        weights = _barycentric(1 << power, vertices)
        for part in corners[wanted == power].split(max(1, POINTS_AT_ONCE // weights.shape[0])):
            points = torch.einsum("pc,tcx->tpx", weights, part).reshape(-1, 3)
            occupied |= cells_with_points(points, aabb, resolution, levels)
    return occupied


def _barycentric(n: int, like: Tensor) -> Tensor:
    """(points, 3) weights of an even lattice over a triangle with n steps along each side."""
    first, second = torch.meshgrid(torch.arange(n + 1), torch.arange(n + 1), indexing="ij")
    inside = first + second <= n
    a, b = first[inside], second[inside]
    return (torch.stack([a, b, n - a - b], dim=-1) / n).to(like)


def dilate(occupied: Tensor, cells: int) -> Tensor:
    """Occupied cells and those within `cells` of them on every axis."""
    if cells <= 0:
        return occupied
    return torch.nn.functional.max_pool3d(occupied.float()[:, None], 2 * cells + 1, stride=1, padding=cells)[:, 0] > 0.0


def flood_fill(surface: Tensor) -> Tensor:
    """Closed surfaces and what they enclose: every cell that no way leads to from outside the outermost level. Levels
    are done from the outermost inwards; a level's border is outside where the level around it is."""
    levels, r = surface.shape[0], surface.shape[1]
    outside = torch.zeros_like(surface)
    border = torch.zeros(r, r, r, dtype=torch.bool, device=surface.device)
    for axis in range(3):
        border.index_fill_(axis, torch.tensor([0, r - 1], device=surface.device), True)
    for level in reversed(range(levels)):
        seeds = border & ~surface[level]
        if level + 1 < levels:
            around = torch.arange(r, device=surface.device) // 2 + r // 4  # the cell of the next level around each
            seeds &= outside[level + 1][around][:, around][:, :, around]
        region = seeds
        while True:
            larger = dilate(region[None], 1)[0] & ~surface[level]
            if torch.equal(larger, region):
                break
            region = larger
        outside[level] = region
    return ~outside
