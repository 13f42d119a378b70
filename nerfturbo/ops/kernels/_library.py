"""Networks by the vendor's matrix library, layer by layer: what runs where no fused kernel is the right way.

A weight's gradient is a sum over all samples: few rows, few columns, and hundreds of thousands of terms. In fp32
without TF32 the library may give such a product to as many programs as the result has tiles, four for 256 x 256, and
leave the rest of the GPU idle. So there the samples are cut into slices of SLICE, every slice is one product of a
batch, and the partial sums are added at the end: the same numbers up to rounding, with fewer terms in a row. Half and
TF32 products stay as they are.

dtypes: as the inputs. No kernels of its own; deterministic; second derivatives exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ngp_field import NgpWeights
from ._mlp import fp32_precision

SLICE = 1024  # samples a partial sum
LARGEST_PARTIAL = 1 << 23  # numbers in all partial sums together: 32 MB


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b of (n, p) and (n, q): (p, q)."""
    n = a.shape[0]
    most = LARGEST_PARTIAL // max(1, a.shape[1] * b.shape[1])
    slices = min(n // SLICE, most) if a.dtype == torch.float32 and fp32_precision() == "ieee" else 1
    if slices < 2:
        return a.t() @ b
    rows = n // slices
    whole = slices * rows
    parts = [value[:whole].unflatten(0, (slices, rows)) for value in (a, b)]
    total = torch.bmm(parts[0].transpose(1, 2), parts[1]).sum(0)
    return total if whole == n else torch.addmm(total, a[whole:].t(), b[whole:])


class _Linear(torch.autograd.Function):
    """x Wᵀ, with the weight's gradient as above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_x else None, sum_of_products(grad, x) if needs_weight else None


def library_mlp(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """`fused_mlp`, layer by layer; under autocast in its type, as torch's own layers are."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return library_mlp(inputs.to(torch.get_autocast_dtype(kind)), weights)
    hidden = inputs
    for weight in weights[:-1]:
        hidden = torch.relu(_Linear.apply(hidden, weight.to(hidden.dtype)))
    return _Linear.apply(hidden, weights[-1].to(hidden.dtype))


def library_field(encoding: Tensor, directions: Tensor, ray_indices: Tensor | None, weights: NgpWeights) -> Tensor:
    """`ngp_field`, layer by layer in fp32."""
    density_in, density_out, colour_in, colour_mid, colour_out = (w.float() for w in weights)
    features = library_mlp(encoding.float(), [density_in, density_out])
    own = directions.float() if ray_indices is None else directions.float()[ray_indices.long()]
    colour = library_mlp(torch.cat([own, features], dim=-1), [colour_in, colour_mid, colour_out])
    return torch.cat([colour, features[:, :1]], dim=-1)
