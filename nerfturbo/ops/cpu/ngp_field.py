"""Instant-NGP's networks on a CPU: torch's own matrix products are hard to beat, numba encodes the positions."""

from __future__ import annotations

from torch import Tensor

from ..hash_encode import HashLayout
from ..reference.fused_mlp import fused_mlp
from ..reference.ngp_field import ngp_field
from .hash_encode import hash_encode

__all__ = ["ngp_density", "ngp_field"]


def ngp_density(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> Tensor:
    density_in, density_out = weights
    encoding = hash_encode(positions, table, layout).float()
    return fused_mlp(encoding, [density_in.float(), density_out[:1].float()])[:, 0]
