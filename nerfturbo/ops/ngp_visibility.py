"""Which samples light reaches, with Instant-NGP's density evaluated on the way: nothing behind the surface is computed.

    density = exp(min(y_0, 15))     y_0 as `ngp_density` gives it at the middle of a sample
    keep    = `visibility(density, samples, ...)`

A ray is followed from its first sample on, a few samples at a time, and left once its transmittance falls below the
threshold. Behind an opaque surface that saves most of the look-ups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Aabb, PackedSamples
from ._checks import check_device, check_float, check_shape
from ._dispatch import implementation
from .hash_encode import HashLayout
from .thinning import Thinning


@dataclass(frozen=True)
class NgpDensity:
    """Everything that decides Instant-NGP's density at a point of the box."""

    aabb: Aabb
    table: Tensor  # (n_entries, n_features); its dtype sets the precision: pass the half copy where there is one
    layout: HashLayout
    weights: tuple[Tensor, Tensor]  # density_in (hidden, n_outputs), density_out (features, hidden)


def ngp_visibility(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    field: NgpDensity,
    *,
    early_stop_eps: float = 0.0,
    alpha_thre: float | Tensor = 0.0,
    thinning: Thinning | None = None,
) -> Tensor:
    """(capacity,) bool: `visibility` of the samples under the density of `field`, False in the tail.

    `origins` and `directions` are (n_rays, 3); `alpha_thre` may be a () tensor on the device. Not differentiable. With
    `thinning` the result is its codes, (capacity,) uint8: samples that add little are kept by chance.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> weights = (torch.ones(3, 4), torch.ones(2, 3))
    >>> field = NgpDensity(Aabb.cube(1.0), torch.full((layout.n_entries, 2), 0.5), layout, weights)
    >>> samples = PackedSamples.from_counts(torch.tensor([3]), torch.arange(3) / 10, torch.arange(1, 4) / 10)
    >>> origins, directions = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
    >>> ngp_visibility(origins, directions, samples, field, early_stop_eps=1e-4).tolist()  # density exp(6), length 0.1
    [True, False, False]
    """
    check_shape("origins", origins, (samples.n_rays, 3))
    check_shape("directions", directions, (samples.n_rays, 3))
    check_float("origins", origins)
    check_float("directions", directions)
    layout, (density_in, density_out) = field.layout, field.weights
    check_shape("field.table", field.table, (layout.n_entries, layout.n_features))
    check_float("field.table", field.table)
    check_shape("field.weights[0]", density_in, ("hidden", layout.n_outputs))
    check_shape("field.weights[1]", density_out, ("features", density_in.shape[0]))
    check_device(
        origins=origins, directions=directions, t_starts=samples.t_starts, table=field.table,
        density_in=density_in, density_out=density_out,
    )  # fmt: skip
    if thinning is not None:
        check_shape("thinning.phases", thinning.phases, (samples.n_rays,))
        check_device(origins=origins, phases=thinning.phases)
    visible = implementation("ngp_visibility", "ngp_visibility", origins)
    options = {"early_stop_eps": float(early_stop_eps), "alpha_thre": alpha_thre, "thinning": thinning}
    with torch.no_grad():
        return visible(origins, directions, samples, field, **options)
