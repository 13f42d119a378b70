"""Where rays enter and leave a box."""

from __future__ import annotations

from torch import Tensor

from ..types import Aabb
from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation


def ray_aabb(
    origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float = 0.0, far: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """t_min, t_max (n_rays,): the part of each ray inside the box and between near and far.

    A ray that misses gets t_min = t_max = near. A ray parallel to a face and outside it misses; one that starts
    inside begins at near. Not differentiable.

    >>> import torch
    >>> origins = torch.tensor([[0.0, 0.0, -3.0], [5.0, 0.0, -3.0]])
    >>> directions = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    >>> [t.tolist() for t in ray_aabb(origins, directions, Aabb.cube(1.0))]
    [[2.0, 0.0], [4.0, 0.0]]
    """
    check_shape("origins", origins, ("n_rays", 3))
    check_shape("directions", directions, (origins.shape[0], 3))
    check_float("origins", origins)
    check_device(origins=origins, directions=directions)
    return implementation("aabb", "ray_aabb", origins)(origins, directions, aabb, near=near, far=far)
