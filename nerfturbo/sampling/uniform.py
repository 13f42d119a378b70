"""Stratified sampling of the whole ray: the baseline, and what skipping is measured against."""

from __future__ import annotations

import torch

from ..ops.positions import ray_aabb
from ..types import Aabb, PackedSamples, Rays


def uniform_samples(
    rays: Rays,
    aabb: Aabb,
    n_samples: int,
    *,
    near: float = 0.0,
    far: float = float("inf"),
    jitter: torch.Tensor | None = None,
) -> PackedSamples:
    """`n_samples` equal intervals per ray between its entry into the box and its exit; none for a ray that misses.

    `jitter` (n_rays, n_samples) in [0, 1) moves each inner edge inside its stratum.
    """
    t_min, t_max = ray_aabb(rays.origins, rays.directions, aabb, near=near, far=far)
    steps = torch.arange(n_samples + 1, device=rays.device, dtype=t_min.dtype).expand(len(rays), -1).clone()
    if jitter is not None:
        steps[:, 1:-1] += jitter[:, 1:].to(steps.dtype) - 0.5
    edges = t_min[:, None] + (t_max - t_min)[:, None] * steps / n_samples
    counts = (t_max > t_min).int() * n_samples
    hit = t_max > t_min
    return PackedSamples.from_counts(counts, edges[hit, :-1].flatten(), edges[hit, 1:].flatten())
