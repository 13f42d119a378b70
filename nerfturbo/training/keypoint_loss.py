"""Depth from COLMAP's points: rays through features are to end where their points are.

Of a ray with weights w_i at t_i, the light ends at E = sum_i w_i t_i + (1 - sum_i w_i) far in the mean. The loss is the
mean over the drawn features, times their weights, of the Huber loss of log(E / distance): relative, because a pixel's
error of depth grows with it, and a thin field far from opaque is pulled together too.
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

DELTA = 0.1  # of the Huber loss
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
    ends = _expected_ends(model, rays, samples)
    error = torch.log(ends.clamp(min=1e-6) / drawn.distances)
    values = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=DELTA) / DELTA
    kept = torch.ones_like(values, dtype=torch.bool)
    if samples.n_rays_kept is not None:
        kept = torch.arange(n, device=values.device) < samples.n_rays_kept
    weights = torch.where(kept, drawn.weights, torch.zeros_like(values))
    return config.photo.depth_weight * (values * weights).sum() / weights.sum().clamp(min=1e-6)


def _expected_ends(model: NerfModel, rays: Rays, samples: PackedSamples) -> Tensor:
    """(n_rays,): where the light of each ray ends in the mean; what passes, ends at the far side."""
    if isinstance(model.field, RayField):
        density = truncated_exp(model.field.sample_logits(rays, samples)[:, 3])
    else:
        sigma_fn, _ = field_functions(model.field, rays)
        density = sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    out = composite(density, density[:, None], samples)
    return out.depth + (1.0 - out.opacity) * model.bounds.far
