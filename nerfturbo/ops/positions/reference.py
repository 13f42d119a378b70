"""The slab test; positions by gather and multiply-add, gradients by autograd."""

import torch
from torch import Tensor

from ...types import Aabb
from ..packed import take_rows
from . import Contraction, fold


@torch.no_grad()
def ray_aabb(origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float, far: float) -> tuple[Tensor, Tensor]:
    low, high = aabb.tensor(origins.device, origins.dtype)
    # A direction of exactly zero would give 0 * inf = NaN on the face itself; a tiny one gives the right infinity.
    tiny = torch.finfo(origins.dtype).tiny
    safe = torch.where(directions.abs() < tiny, torch.full_like(directions, tiny), directions)
    first, second = (low - origins) / safe, (high - origins) / safe
    t_min = torch.minimum(first, second).amax(-1).clamp(near, far)
    t_max = torch.maximum(first, second).amin(-1).clamp(near, far)
    hit = t_max > t_min
    outside = torch.full_like(t_min, near)
    return torch.where(hit, t_min, outside), torch.where(hit, t_max, outside)


def sample_positions(origins, directions, samples, *, aabb, contraction: Contraction = "none") -> Tensor:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, 3)
    index = samples.ray_indices.long()
    middle = samples.midpoints().detach().to(origins.dtype)
    positions = take_rows(origins, index) + take_rows(directions, index) * middle[:, None]
    return positions if aabb is None else fold(aabb.normalize(positions), contraction)
