"""Positions to density logits: encode, then the density network's first output alone. Two launches.

One kernel that never writes the encoding took three times as long on an H200 over 1.2 M samples: with all levels of a
tile in registers few loads are in flight, and gathers are what this costs.

dtypes: table fp16, bf16 or fp32 sets the operand type; weights, sums and the result fp32. Deterministic, no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..hash_encode import HashLayout
from ..ngp_field import MAX_LOGIT
from ..reference import fused_mlp as reference
from ._common import check_kernel_float
from ._mlp import fits
from .fused_mlp import forward as mlp_forward
from .hash_encode import hash_encode


def ngp_density(
    positions: Tensor,
    table: Tensor,
    layout: HashLayout,
    weights: tuple[Tensor, Tensor],
    *,
    n_used: Tensor | None = None,
    exponential: bool = False,
) -> Tensor:
    density_in, density_out = weights[0].contiguous(), weights[1].contiguous()
    check_kernel_float(positions=positions, table=table, density_in=density_in, density_out=density_out)
    encoding = hash_encode(positions, table, layout, n_used=n_used)
    own = [density_in, density_out[:1]]
    if not fits(weights, table.dtype, positions.device):
        logits = reference.fused_mlp(encoding, own)[:, 0].float()
        return logits.clamp(max=MAX_LOGIT).exp() if exponential else logits
    return mlp_forward(encoding, own, n_used, dtype=torch.float32, exponential=exponential)[:, 0]


def ngp_densities(positions: Tensor, table: Tensor, layout: HashLayout, weights: tuple[Tensor, Tensor]) -> Tensor:
    return ngp_density(positions, table, layout, weights, exponential=True)
