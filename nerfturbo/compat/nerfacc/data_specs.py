"""Samples and intervals along rays, batched (n_rays, n) or flattened (all,)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RaySamples:
    """Points along rays. Flattened `vals` need `packed_info` or `ray_indices`."""

    vals: Tensor  # (n_rays, n_samples) or (all_samples,)
    packed_info: Tensor | None = None  # (n_rays, 2) first sample and number of samples of each ray
    ray_indices: Tensor | None = None  # (all_samples,)
    is_valid: Tensor | None = None  # (all_samples,) bool

    @property
    def device(self) -> torch.device:
        return self.vals.device


@dataclass
class RayIntervals:
    """Edges of intervals along rays. Touching intervals share an edge, which is then a left and a right one.

    Flattened `vals` need `packed_info` or `ray_indices`, and `is_left` and `is_right`.
    """

    vals: Tensor  # (n_rays, n_edges) or (all_edges,)
    packed_info: Tensor | None = None  # (n_rays, 2) first edge and number of edges of each ray
    ray_indices: Tensor | None = None  # (all_edges,)
    is_left: Tensor | None = None  # (all_edges,) bool
    is_right: Tensor | None = None  # (all_edges,) bool

    @property
    def device(self) -> torch.device:
        return self.vals.device
