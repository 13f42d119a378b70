"""Signed distance to the surface of a built-in scene, in torch: the ground truth for meshes and depth."""

import torch
from torch import Tensor

from nerfturbo.data.builtin.scenes import BOX, CAPSULE, SPHERE, TORUS, Solid, check_name, scene_at
from nerfturbo.errors import InputError


def signed_distance(name: str, points: Tensor, *, time: float = 0.0) -> Tensor:
    """(n,) distances from points (n, 3), negative inside. Exact outside; inside, where solids overlap, a lower bound.
    `time` from 0 to 1 matters for scenes that move.

    >>> signed_distance("toybox", torch.tensor([[0.0, 0.0, 5.0]])) > 3.0
    tensor([True])
    """
    if points.dim() != 2 or points.shape[1] != 3 or not points.is_floating_point():
        raise InputError("points", "floats of shape (n, 3)", f"{points.dtype} {tuple(points.shape)}")
    result = points.new_full((points.shape[0],), float("inf"))
    for solid in scene_at(check_name(name), time):
        result = torch.minimum(result, _solid_distance(solid, points))
    return result


def _solid_distance(solid: Solid, points: Tensor) -> Tensor:
    """The formulas of `render.distance`, for many points at once."""
    local = (points - points.new_tensor(solid.center)) @ points.new_tensor(solid.rotation)
    a, b, c, rounding = solid.parameters
    if solid.kind == SPHERE:
        return local.norm(dim=-1) - a
    if solid.kind == BOX:
        q = local.abs() - (points.new_tensor([a, b, c]) - rounding)
        return q.clamp_min(0.0).norm(dim=-1) + q.amax(-1).clamp_max(0.0) - rounding
    radial, z = local[:, :2].norm(dim=-1), local[:, 2]
    if solid.kind == CAPSULE:
        return torch.hypot(radial, (z.abs() - b).clamp_min(0.0)) - a
    if solid.kind == TORUS:
        return torch.hypot(radial - a, z) - b
    return _frustum(radial, z, a - rounding, b - rounding, c - rounding) - rounding


def _frustum(radial: Tensor, z: Tensor, bottom: float, top: float, half: float) -> Tensor:
    cap_r = (radial - torch.where(z < 0.0, bottom, top)).clamp_min(0.0)
    cap_z = z.abs() - half
    side_r, side_z = top - bottom, 2.0 * half
    back = (((top - radial) * side_r + (half - z) * side_z) / (side_r**2 + side_z**2)).clamp(0.0, 1.0)
    slant_r, slant_z = radial - top + side_r * back, z - half + side_z * back
    nearest = torch.minimum(torch.hypot(cap_r, cap_z), torch.hypot(slant_r, slant_z))
    return torch.where((slant_r < 0.0) & (cap_z < 0.0), -nearest, nearest)
