"""Depth from COLMAP's points: rays through features are to end where their points are.

Of a ray with weights w_i at t_i, w_i of the light ends |log(t_i / z)| away from a point at distance z. The loss is how
far away it ends in the mean,

    sum_i w_i min(|log(t_i / z)|, 1) + (1 - sum_i w_i),

and that is the mean over the drawn features, times their weights. Relative, because a pixel's error of depth grows with
it. The mean of the distances, not the distance of the mean: fog before a point and light that passes it would cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..fields.activations import truncated_exp
from ..fields.field import RayField
from ..ops.composite import composite
from ..rendering.model import NerfModel
from ..rendering.render import field_functions
from ..types import PackedSamples, Rays

FARTHEST = 1.0  # where |log(t / z)| is cut off, and what light that never ends costs
SHARE = 8  # of the samples of a step, at most, for these rays


@lru_cache(maxsize=8)
def _count(n: int, device: torch.device) -> Tensor:
    """Kept, because copying numbers to a device is not possible while a CUDA graph is recorded."""
    return torch.tensor(n, dtype=torch.int32, device=device)


def keypoint_loss(
    model: NerfModel,
    *,
    step: int | Tensor,
    fixed: bool,
    first: int,
    place: Callable[..., tuple[PackedSamples, Tensor]],
) -> Tensor:
    """() the weighted loss of this step's features; with `fixed` shapes for a captured step."""
    from .stages import Capacity  # which imports this file

    config = model.config
    assert model.keypoints is not None
    n = config.photo.depth_rays
    drawn = model.keypoints.draw(n, seed=config.train.seed, step=step, first=first)
    rays = drawn.rays if model.photos is None else model.photos.rays(drawn.rays)
    capacity = None
    if fixed:
        trained = max(n, config.train.batch_samples // SHARE)
        capacity = Capacity(trained * config.train.marched_per_trained, trained, _count(n, rays.device))
    samples, _ = place(model, rays, step=step, capacity=capacity, first=first)
    values = distance_of_ends(_density(model, rays, samples), samples, drawn.distances)
    kept = torch.ones_like(values, dtype=torch.bool)
    if samples.n_rays_kept is not None:
        kept = torch.arange(n, device=values.device) < samples.n_rays_kept
    weights = torch.where(kept, drawn.weights, torch.zeros_like(values))
    return config.photo.depth_weight * (values * weights).sum() / weights.sum().clamp(min=1e-6)


def distance_of_ends(density: Tensor, samples: PackedSamples, distances: Tensor) -> Tensor:
    """(n_rays,): how far from its point at `distances` (n_rays,) the light of each ray ends in the mean, in units of
    log distance. Differentiable to density (capacity,).

    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([0.9, 1.9]), torch.tensor([1.1, 2.1]))
    >>> half = torch.tensor([0.6931 / 0.2, 1e9])  # one half of the light ends at 1, the other at 2
    >>> round(distance_of_ends(half, samples, torch.tensor([1.0])).item(), 3)  # log(2) / 2
    0.347
    """
    away = torch.log(samples.midpoints().clamp(min=1e-6) / distances[samples.ray_indices.long()])
    out = composite(density, away.abs().clamp(max=FARTHEST)[:, None], samples)
    return out.rgb[:, 0] + (1.0 - out.opacity) * FARTHEST


def _density(model: NerfModel, rays: Rays, samples: PackedSamples) -> Tensor:
    """(capacity,), differentiable."""
    if isinstance(model.field, RayField):
        return truncated_exp(model.field.sample_logits(rays, samples)[:, 3])
    sigma_fn, _ = field_functions(model.field, rays)
    return sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
