"""Running sums and products along rays, over batched or flattened samples. Differentiable, to any order.

>>> inputs, indices = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([0, 0, 1])
>>> [scan(inputs, indices=indices).tolist() for scan in (inclusive_sum, exclusive_sum)]
[[2.0, 5.0, 4.0], [0.0, 2.0, 0.0]]
>>> [scan(inputs, indices=indices).tolist() for scan in (inclusive_prod, exclusive_prod)]
[[2.0, 6.0, 4.0], [1.0, 2.0, 1.0]]
"""

import torch
from torch import Tensor

from ...errors import refuse
from ...ops import packed_cumsum
from ._rays import indices_of, offsets_of

__all__ = ["exclusive_prod", "exclusive_sum", "inclusive_prod", "inclusive_sum"]


def inclusive_sum(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """The running sum of each ray, or along the last axis of batched inputs."""
    return sum_along(inputs, _offsets(inputs, packed_info, indices))


def exclusive_sum(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """`inclusive_sum` without the sample itself: the first sample of a ray has 0."""
    return sum_along(inputs, _offsets(inputs, packed_info, indices), exclusive=True)


def inclusive_prod(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """The running product of each ray, or along the last axis; its gradient is exact where an input is zero, too."""
    return prod_along(inputs, _offsets(inputs, packed_info, indices))


def exclusive_prod(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """`inclusive_prod` without the sample itself: the first sample of a ray has 1."""
    return prod_along(inputs, _offsets(inputs, packed_info, indices), exclusive=True)


def sum_along(inputs: Tensor, offsets: Tensor | None, *, exclusive: bool = False) -> Tensor:
    """Running sums over flattened samples, or along the last axis without offsets, in the inputs' own type."""
    if offsets is None:
        return torch.cumsum(_shifted(inputs, 0.0) if exclusive else inputs, -1)
    floating = inputs if inputs.is_floating_point() else inputs.float()
    return packed_cumsum(floating.contiguous(), offsets, exclusive=exclusive).to(inputs.dtype)


def prod_along(inputs: Tensor, offsets: Tensor | None, *, exclusive: bool = False) -> Tensor:
    """Running products, over flattened samples by doubling: after pass k a sample holds the product of the 2^k samples
    up to itself, as far as they are on its ray. Exact gradients of any order, because nothing is divided."""
    if offsets is None:
        return torch.cumprod(_shifted(inputs, 1.0) if exclusive else inputs, -1)
    n = inputs.shape[0]
    rows = torch.arange(n, device=inputs.device)
    first = offsets[indices_of(offsets, n)] if n else rows
    if exclusive:
        inputs = torch.where(rows == first, torch.ones_like(inputs), inputs.roll(1))
    reach = int(offsets.diff().max()) if inputs.device.type == "cpu" and n else n  # a GPU would have to be waited for
    result, distance = inputs, 1
    while distance < reach:
        before = torch.where(rows - distance >= first, result.roll(distance), torch.ones_like(result))
        result, distance = result * before, distance * 2
    return result


def _offsets(inputs: Tensor, packed_info: Tensor | None, indices: Tensor | None) -> Tensor | None:
    refuse(packed_info is not None and indices is not None, "packed_info and indices", "only one of them", "both")
    return offsets_of(inputs, packed_info, indices, None, "inputs")


def _shifted(inputs: Tensor, fill: float) -> Tensor:
    return torch.cat([torch.full_like(inputs[..., :1], fill), inputs[..., :-1]], dim=-1)
