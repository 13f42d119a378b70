"""Regularisers along rays."""

from __future__ import annotations

from torch import Tensor

from ...errors import InputError
from ._rays import offsets_of_indices
from .scan import packed_sum_along
from .volrend import accumulate_along_rays


def distortion(weights: Tensor, t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor, n_rays: int) -> Tensor:
    """(n_rays, 1): Mip-NeRF 360's distortion of each ray's weights,

        sum_ij w_i w_j |m_i - m_j| + 1/3 sum_i w_i^2 (t_end_i - t_start_i),    m the midpoints.

    Differentiable to weights and t. Linear in the number of samples, which must ascend along each ray.
    """
    shapes = {tuple(value.shape) for value in (weights, t_starts, t_ends, ray_indices)}
    if len(shapes) != 1 or weights.dim() != 1:
        raise InputError("weights, t_starts, t_ends and ray_indices", "one shape (n_samples,)", str(sorted(shapes)))
    offsets = offsets_of_indices(ray_indices, n_rays)
    middle = 0.5 * (t_starts + t_ends)
    before = packed_sum_along(weights, offsets, exclusive=True)
    moment = packed_sum_along(weights * middle, offsets, exclusive=True)
    pairs = 2.0 * weights * (middle * before - moment)
    alone = weights.square() * (t_ends - t_starts) / 3.0
    return accumulate_along_rays(pairs + alone, None, ray_indices, n_rays)
