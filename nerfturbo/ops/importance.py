"""Importance sampling from a step function: new interval edges where the weight is."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_float, check_positive, check_shape
from ._dispatch import implementation


def importance_sample(
    edges: Tensor, weights: Tensor, n_samples: int, *, jitter: Tensor | None = None, padding: float = 0.0
) -> Tensor:
    """(n_rays, n_samples + 1) sorted edges of new intervals, drawn from the histogram (edges, weights).

    The cumulative weight, linear inside each bin, is inverted at u_i = (i + jitter) / (n_samples + 1). A ray whose
    weights sum to nothing is sampled evenly over its length. Not differentiable.

    Args:
        edges: (n_rays, n_bins + 1), non-decreasing along a ray.
        weights: (n_rays, n_bins), >= 0.
        jitter: (n_rays, 1) or (n_rays, n_samples + 1) in [0, 1); None is 0.5.
        padding: added to every weight, so that no bin is given up.

    >>> import torch
    >>> importance_sample(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), 1).tolist()
    [[1.25, 1.75]]
    """
    check_shape("edges", edges, ("n_rays", "n_bins + 1"))
    check_shape("weights", weights, (edges.shape[0], edges.shape[1] - 1))
    check_float("edges", edges)
    check_float("weights", weights)
    check_device(edges=edges, weights=weights, jitter=jitter)
    if n_samples < 1:
        raise InputError("n_samples", "at least 1", str(n_samples))
    if edges.shape[1] < 2:
        raise InputError("edges", "at least one bin", str(tuple(edges.shape)))
    if jitter is not None and tuple(jitter.shape) not in ((edges.shape[0], 1), (edges.shape[0], n_samples + 1)):
        raise InputError("jitter", f"shape (n_rays, 1) or (n_rays, {n_samples + 1})", str(tuple(jitter.shape)))
    check_positive("padding", padding, zero=True)
    sample = implementation("importance", "importance_sample", edges)
    return sample(edges, weights, n_samples, jitter=jitter, padding=float(padding))
