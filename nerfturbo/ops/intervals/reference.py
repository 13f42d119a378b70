"""Spacing, box and contraction one after the other; weights by sums along the rays, new places by binary search."""

import torch
from torch import Tensor

from ..packed.reference import widen
from ..positions import unit_positions
from . import spread


def place_intervals(places, origins, directions, *, near, far, spacing, unit, space) -> tuple[Tensor, Tensor]:
    distances = spread(widen(places), widen(near) / unit, widen(far) / unit, kind=spacing) * unit
    middle = (distances[:, 1:] + distances[:, :-1]) * 0.5
    positions = (widen(origins)[:, None, :] + widen(directions)[:, None, :] * middle[..., None]).reshape(-1, 3)
    return distances, positions if space.aabb is None else unit_positions(positions, space.aabb, space.contraction)


def interval_weights(density: Tensor, distances: Tensor) -> Tensor:
    density, distances = widen(density), widen(distances)
    optical = density * (distances[:, 1:] - distances[:, :-1])
    before = torch.nn.functional.pad(optical.cumsum(-1)[:, :-1], (1, 0))
    return torch.exp(-before) * -torch.expm1(-optical)


@torch.no_grad()
def importance_sample(edges, weights, n_samples, *, jitter, padding, blur) -> Tensor:
    edges, weights = widen(edges), widen(weights)
    if blur:
        higher = torch.maximum(weights[:, 1:], weights[:, :-1])
        higher = torch.cat([weights[:, :1], higher, weights[:, -1:]], dim=-1)
        weights = 0.5 * (higher[:, 1:] + higher[:, :-1])
    weights = weights + padding
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0.0, weights, edges[:, 1:] - edges[:, :-1])
    cdf = torch.cat([torch.zeros_like(total), weights.cumsum(-1)], dim=-1)
    steps = torch.arange(n_samples + 1, device=edges.device, dtype=edges.dtype)
    shift = 0.5 if jitter is None else jitter.to(edges.dtype)
    target = ((steps + shift) / (n_samples + 1) * cdf[:, -1:]).expand(edges.shape[0], -1).contiguous()
    right = torch.searchsorted(cdf, target, right=True).clamp(1, edges.shape[1] - 1)
    cdf0, cdf1 = cdf.gather(1, right - 1), cdf.gather(1, right)
    edge0, edge1 = edges.gather(1, right - 1), edges.gather(1, right)
    span = cdf1 - cdf0
    inside = torch.where(span > 0.0, (target - cdf0) / span.clamp(min=torch.finfo(span.dtype).tiny), 0.0)
    return torch.minimum(edge0 + inside.clamp(0.0, 1.0) * (edge1 - edge0), edge1)
