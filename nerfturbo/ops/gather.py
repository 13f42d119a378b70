"""Rows by their numbers, with a gradient that does not depend on which thread comes first."""

from __future__ import annotations

from torch import Tensor


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]` for rows (n,) of int64; the gradient of a row is the sum over all that read it, in their order.

    Behind `values[rows]` on a CPU each of torch's threads adds what it has as soon as it has it: the last digits
    differ from run to run, and so does the sign of sums that cancel, which Adam takes for a direction. The backward
    of `index_select` adds in order there; on a GPU it is indexing that does.

    >>> import torch
    >>> take_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0])).tolist()
    [[3.0, 4.0], [3.0, 4.0], [1.0, 2.0]]
    """
    return values[rows] if values.is_cuda else values.index_select(0, rows)
