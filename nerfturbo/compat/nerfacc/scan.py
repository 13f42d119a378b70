"""Running sums and products along rays, over batched or flattened samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import packed_cumsum
from ._rays import offsets_of


def inclusive_sum(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """The running sum of each ray, or along the last axis of batched inputs. Differentiable.

    >>> inclusive_sum(torch.tensor([1.0, 2.0, 4.0]), indices=torch.tensor([0, 0, 1])).tolist()
    [1.0, 3.0, 4.0]
    """
    return sum_along(inputs, _offsets(inputs, packed_info, indices))


def exclusive_sum(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """`inclusive_sum` without the sample itself: the first sample of a ray has 0.

    >>> exclusive_sum(torch.tensor([1.0, 2.0, 4.0]), indices=torch.tensor([0, 0, 1])).tolist()
    [0.0, 1.0, 0.0]
    """
    return sum_along(inputs, _offsets(inputs, packed_info, indices), exclusive=True)


def inclusive_prod(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """The running product of each ray, or along the last axis. Differentiable, also where an input is zero.

    >>> inclusive_prod(torch.tensor([2.0, 3.0, 4.0]), indices=torch.tensor([0, 0, 1])).tolist()
    [2.0, 6.0, 4.0]
    """
    return prod_along(inputs, _offsets(inputs, packed_info, indices))


def exclusive_prod(inputs: Tensor, packed_info: Tensor | None = None, indices: Tensor | None = None) -> Tensor:
    """`inclusive_prod` without the sample itself: the first sample of a ray has 1.

    >>> exclusive_prod(torch.tensor([2.0, 3.0, 4.0]), indices=torch.tensor([0, 0, 1])).tolist()
    [1.0, 2.0, 1.0]
    """
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
    first = offsets[torch.searchsorted(offsets[1:].contiguous(), rows.int(), right=True)] if n else rows
    if exclusive:
        inputs = torch.where(rows == first, torch.ones_like(inputs), inputs.roll(1))
    reach = n
    if inputs.device.type == "cpu" and n:  # elsewhere the longest ray is not worth waiting for
        reach = int((offsets[1:] - offsets[:-1]).max())
    result, distance = inputs, 1
    while distance < reach:
        before = torch.where(rows - distance >= first, result.roll(distance), torch.ones_like(result))
        result, distance = result * before, distance * 2
    return result


def _offsets(inputs: Tensor, packed_info: Tensor | None, indices: Tensor | None) -> Tensor | None:
    if packed_info is not None and indices is not None:
        raise InputError("packed_info and indices", "only one of them", "both")
    return offsets_of(inputs, packed_info, indices, None, "inputs")


def _shifted(inputs: Tensor, fill: float) -> Tensor:
    return torch.cat([torch.full_like(inputs[..., :1], fill), inputs[..., :-1]], dim=-1)
