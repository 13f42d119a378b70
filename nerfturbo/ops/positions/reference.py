"""The slab test; positions by gather and multiply-add, gradients by autograd; points of cones."""

import math

import torch
from torch import Tensor

from ...types import Aabb
from ..packed import take_rows
from . import CONE, CONE_WIDTH, Contraction, fold, fold_scale


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


def turn_bits(directions: Tensor, t_starts: Tensor) -> Tensor:
    """(n,) int32: what turns the points of a cone; the same in every backend, to the bit."""
    x, y, z = directions.float().contiguous().view(torch.int32).unbind(-1)
    bits = x ^ (y * -1640531535) ^ (z * 805459861) ^ (t_starts.float().contiguous().view(torch.int32) * 374761393)
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2048144789
    return (bits ^ ((bits >> 13) & 0x7FFFF)) * -1028477379


def cone_positions(origins, directions, radii, samples, *, points, aabb, contraction) -> tuple[Tensor, Tensor]:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, points, 3), origins.new_zeros(samples.capacity, points)
    index = samples.ray_indices.long()
    ray, start = directions[index], samples.t_starts.detach().to(origins.dtype)
    middle, half = ((samples.t_ends + s * samples.t_starts).detach().to(origins.dtype) * 0.5 for s in (1.0, -1.0))
    if points == 1:
        along, offset = middle[:, None], 0.0
    else:
        share = (half / middle.clamp(min=1e-12))[:, None]  # of the middle: t_end is middle * (1 + share)
        root = ((share.square() - 1.0).square() + 4.0).sqrt() * origins.new_tensor(CONE)[:, 0]
        along = start[:, None] + half[:, None] * ((1.0 + share).square() + 2.0 + root) / (share.square() + 3.0)
        offset = _across(ray, turn_bits(ray, samples.t_starts)) * (radii[index][:, None] * along)[..., None]
    positions = origins[index][:, None] + ray[:, None] * along[..., None] + offset
    unit = fold(aabb.normalize(positions), contraction)
    wide = radii[index][:, None] * along.abs() * (CONE_WIDTH[points] * 3.0 / sum(aabb.size))
    return unit, wide * fold_scale(unit, contraction)


def _across(ray: Tensor, bits: Tensor) -> Tensor:
    """(n, 6, 3): from the middle of a cone of radius 1 about unit vectors (n, 3) to its points, turned by `bits` (n,).
    The two axes across are those of Duff et al., which need no branch."""
    x, y, z = ray.unbind(-1)
    sign = torch.where(z < 0.0, -1.0, 1.0).to(ray.dtype)
    a = -1.0 / (sign + z)
    first = torch.stack([1.0 + sign * x * x * a, sign * x * y * a, -sign * x], -1)
    second = torch.stack([x * y * a, sign + y * y * a, -y], -1)
    q = ((bits >> 8) & 0xFFFFFF).to(ray.dtype) * 2.0**-23 - 1.0  # the tangent of half of an angle
    mirror, half_turn = (1.0 - 2.0 * (bits & bit).clamp(max=1).to(ray.dtype) for bit in (1, 2))
    cos, sin = (value * (half_turn / (1.0 + q * q)) for value in (1.0 - q * q, 2.0 * q))
    own_cos, own_sin = ray.new_tensor(CONE)[:, 1], ray.new_tensor(CONE)[:, 2] * mirror[:, None]
    u, v = cos[:, None] * own_cos - sin[:, None] * own_sin, sin[:, None] * own_cos + cos[:, None] * own_sin
    return (u[..., None] * first[:, None] + v[..., None] * second[:, None]) * math.sqrt(0.5)
