"""Sums, scans and compaction over packed samples: ray i owns rows offsets[i]:offsets[i+1]; the tail is ignored."""

import torch
from torch import Tensor

from ...types import PackedSamples
from .._checks import check_device, check_dtype, check_shape, check_tensor, refuse
from .._dispatch import implementation


def packed_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(n_rays,) or (n_rays, channels): the sum of each ray's rows. Differentiable to `values`; accumulates in fp32.

    >>> packed_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3], dtype=torch.int32)).tolist()
    [3.0, 0.0, 4.0]
    """
    _check_values(values, offsets)
    return implementation("packed", "packed_sum", values)(values, offsets)


def packed_cumsum(values: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """(n,): the running sum inside each ray; zero in the tail. Differentiable to `values`.

    >>> packed_cumsum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3], dtype=torch.int32)).tolist()
    [1.0, 3.0, 4.0]
    """
    check_shape("values", values, ("n",))
    _check_values(values, offsets)
    return implementation("packed", "packed_cumsum", values)(values, offsets, exclusive=exclusive, reverse=reverse)


def compact(samples: PackedSamples, keep: Tensor, *, capacity: int | None = None) -> PackedSamples:
    """Only the samples where `keep` (capacity,) bool is True, in the same order. `capacity` as in `march`. The number
    of rays stays; rays that lose all their samples become empty. `n_rays_kept` is the smaller of what marching kept and
    what fits now. `keep` may also be the codes of `merge_weak_samples`, which stretch intervals."""
    check_tensor("keep", keep, (samples.capacity,), torch.uint8 if keep.dtype == torch.uint8 else torch.bool)
    check_device(keep=keep, offsets=samples.offsets)
    refuse(capacity is not None and capacity < 1, "capacity", "at least 1", capacity)
    return implementation("packed", "compact", samples.t_starts)(samples, keep, capacity=capacity)


def _check_values(values: Tensor, offsets: Tensor) -> None:
    refuse(values.dim() not in (1, 2), "values", "shape (n,) or (n, channels)", tuple(values.shape))
    check_dtype("values", values)
    check_tensor("offsets", offsets, ("n_rays + 1",), torch.int32)
    refuse(offsets.shape[0] < 1, "offsets", "at least one element, offsets[0] = 0", tuple(offsets.shape))
    check_device(values=values, offsets=offsets)


def mean_over_rays(values: Tensor, samples: PackedSamples) -> Tensor:
    """() mean of values (n_rays,) over the rays that were kept; no rays give zero."""
    kept = samples.n_rays_kept
    if kept is None:
        return values.sum() / max(samples.n_rays, 1)
    counted = torch.arange(values.shape[0], device=values.device) < kept
    return torch.where(counted, values, torch.zeros_like(values)).sum() / kept.clamp(min=1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]` for rows (n,) of int64; the gradient of a row is the sum over all that read it, in their order.
    Behind `values[rows]` on a CPU each of torch's threads adds what it has as soon as it has it: the last digits differ
    from run to run, and so does the sign of sums that cancel, which Adam takes for a direction. The backward of
    `index_select` adds in order there; on a GPU it is indexing that does.

    >>> import torch
    >>> take_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0])).tolist()
    [[3.0, 4.0], [3.0, 4.0], [1.0, 2.0]]
    """
    return values[rows] if values.is_cuda else values.index_select(0, rows)
