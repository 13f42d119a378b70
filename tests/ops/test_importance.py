"""Importance sampling: sorted, inside the bins that have weight, and distributed as the histogram."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import importance_sample, use_backend

from .cases import Target, assert_close, generator, require


def _histogram(n_rays: int, n_bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(6)
    edges = torch.rand(n_rays, n_bins + 1, generator=draw).cumsum(-1)
    weights = torch.rand(n_rays, n_bins, generator=draw) ** 2
    weights[torch.rand(n_rays, n_bins, generator=draw) < 0.3] = 0.0
    weights[::5] = 0.0  # rays that saw nothing
    return edges, weights


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (None, {}),
        (1, {}),
        (33, {}),
        (1, {"padding": 0.01}),
        (None, {"blur": True}),
        (1, {"padding": 0.01, "blur": True}),
    ],
)
@pytest.mark.parametrize("n_bins", [1, 13, 40])
def test_matches_reference(
    sized: tuple[Target, int], n_bins: int, columns: int | None, options: dict[str, Any], poisoned_empty: None
):
    target, n_rays = sized
    require(target)
    edges, weights = (t.to(target.device) for t in _histogram(n_rays, n_bins))
    jitter = None if columns is None else torch.rand(n_rays, columns, generator=generator()).to(target.device)
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):
            results.append(importance_sample(edges, weights, 32, jitter=jitter, **options))
    got, want = results
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    # On a plateau of the cumulative weight rounding may choose either of its ends.
    wrong = (got - want).abs() > 1e-4 * edges.abs().max()
    assert int(wrong.sum()) <= 1 + got.numel() // 1000
    assert bool((got[:, 1:] >= got[:, :-1]).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_widened(target: Target, dtype: torch.dtype):
    require(target)
    edges = torch.linspace(0.0, 2.0, 9).expand(3, 9).to(dtype).to(target.device)
    weights = torch.ones(3, 8, dtype=dtype, device=target.device)
    with use_backend(target.backend):
        got = importance_sample(edges, weights, 4)
    assert got.dtype == torch.float32
    assert_close("edges", got.cpu(), torch.linspace(0.2, 1.8, 5).expand(3, 5), 1e-5)


def test_no_rays(target: Target):
    require(target)
    empty = torch.zeros(0, 5, device=target.device)
    with use_backend(target.backend):
        assert importance_sample(empty, empty[:, 1:], 7).shape == (0, 8)


def test_distribution_follows_the_weights():
    edges = torch.tensor([[0.0, 1.0, 1.5, 4.0, 5.0]])
    weights = torch.tensor([[1.0, 3.0, 0.0, 4.0]])
    drawn = importance_sample(edges, weights, 7999).flatten()
    shares = torch.stack([((drawn >= a) & (drawn < b)).float().mean() for a, b in zip(edges[0], edges[0][1:])])  # noqa: B905
    torch.testing.assert_close(shares, weights[0] / 8.0, atol=1e-3, rtol=0.0)


def test_flat_ray_is_sampled_evenly():
    edges = torch.tensor([[1.0, 1.5, 3.0]])
    got = importance_sample(edges, torch.zeros(1, 2), 3)
    torch.testing.assert_close(got, torch.tensor([[1.25, 1.75, 2.25, 2.75]]))


def test_padding_is_a_weight_more():
    edges, weights = _histogram(9, 6)
    torch.testing.assert_close(
        importance_sample(edges, weights, 12, padding=0.3), importance_sample(edges, weights + 0.3, 12)
    )


def test_blur_draws_from_the_larger_neighbors():
    edges, weights = torch.arange(6.0).expand(1, 6), torch.tensor([[0.0, 4.0, 0.0, 0.0, 2.0]])
    wide = torch.tensor([[2.0, 4.0, 2.0, 1.0, 2.0]])
    torch.testing.assert_close(importance_sample(edges, weights, 20, blur=True), importance_sample(edges, wide, 20))


def test_float64_reference():
    edges, weights = (t.double() for t in _histogram(20, 9))
    with use_backend("reference"):
        exact = importance_sample(edges, weights, 16)
        rounded = importance_sample(edges.float(), weights.float(), 16)
    assert exact.dtype == torch.float64
    assert_close("edges", rounded.double(), exact, 1e-3)


def test_errors_name_the_argument():
    edges, weights = torch.zeros(2, 4), torch.zeros(2, 3)
    with pytest.raises(InputError, match="weights: expected shape"):
        importance_sample(edges, torch.zeros(2, 4), 4)
    with pytest.raises(InputError, match="n_samples: expected at least 1"):
        importance_sample(edges, weights, 0)
    with pytest.raises(InputError, match="jitter: expected shape"):
        importance_sample(edges, weights, 4, jitter=torch.zeros(2, 4))
    with pytest.raises(InputError, match="padding: expected a finite number"):
        importance_sample(edges, weights, 4, padding=-1.0)
    with pytest.raises(InputError, match="edges: expected at least one bin"):
        importance_sample(torch.zeros(2, 1), torch.zeros(2, 0), 4)
