"""Which samples belong to which ray, in the forms that nerfacc's callers use, and for which version they call. Inside,
everything is `offsets` (n_rays + 1,) int32, as in `nerfturbo.PackedSamples`. What is made of a caller's tensor is
remembered until it dies or is written to: `rendering` need not count again the rays which `sampling` returned."""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...errors import InputError, refuse
from ...ops._checks import check_shape, check_tensor
from ...types import PackedSamples

__all__ = ["RayIntervals", "RaySamples", "pack_data", "pack_info", "unpack_data", "unpack_info"]

F = TypeVar("F", bound=Callable[..., Any])
Some = Tensor | None
Count = int | None


def or_older(older: Callable[..., Any], place: int = 0) -> Callable[[F], F]:
    """Send calls that were written for nerfacc 0.2 or 0.3 to `older`. They are known by

    - a function, `packed_info` or `ray_indices` at `place`, where 0.5 takes real numbers, or a keyword only of `older`;
    - keywords alone, with samples (n, 1) and the `packed_info` of 0.2: int32, or what our `ray_marching` returned.
    """

    def decorate(function: F) -> F:
        only_older = inspect.signature(older).parameters.keys() - inspect.signature(function).parameters.keys()

        def is_older(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            mark = args[place] if len(args) > place else None
            if callable(mark) or not only_older.isdisjoint(kwargs):
                return True
            if args:
                return isinstance(mark, Tensor) and not mark.is_floating_point() and (place == 0 or mark.dim() == 1)
            info, first = kwargs.get("packed_info"), kwargs.get("t_starts", kwargs.get("alphas"))
            if info is None or first is None:
                return False
            return first.dim() == 2 and (info.dtype == torch.int32 or info.dim() == 1)

        @wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (older if is_older(args, kwargs) else function)(*args, **kwargs)

        return cast(F, either)

    return decorate


@dataclass
class _Segments:
    """Values along rays, batched or flattened. Flattened ones need `packed_info` or `ray_indices`."""

    vals: Tensor  # (n_rays, n) or (all,)
    packed_info: Tensor | None = None  # (n_rays, 2) first value and number of values of each ray
    ray_indices: Tensor | None = None  # (all,)

    @property
    def device(self) -> torch.device:
        return self.vals.device


@dataclass
class RaySamples(_Segments):
    """Points along rays."""

    is_valid: Tensor | None = None  # (all,) bool


@dataclass
class RayIntervals(_Segments):
    """Edges of intervals along rays. Touching intervals share an edge, which is then a left and a right one."""

    is_left: Tensor | None = None  # (all,) bool
    is_right: Tensor | None = None  # (all,) bool


_known: dict[tuple[int, str], tuple[weakref.ref[Tensor], int, Any]] = {}


def version_of(tensor: Tensor) -> int:
    """Counts the writes that torch has seen."""
    return -1 if tensor.is_inference() else tensor._version


def remember(tensor: Tensor, kind: str, value: Any) -> None:
    """Keep `value`, made of `tensor`, for as long as the tensor lives unchanged."""
    key = (id(tensor), kind)
    _known[key] = (weakref.ref(tensor, lambda _: _known.pop(key, None)), version_of(tensor), value)


def recall(tensor: Tensor, kind: str) -> Any:
    """What `remember` kept, or None."""
    found = _known.get((id(tensor), kind))
    return found[2] if found and found[0]() is tensor and found[1] == version_of(tensor) else None


def remembered(tensor: Tensor, kind: str, make: Callable[[], Any]) -> Any:
    value = recall(tensor, kind)
    if value is None:
        value = make()
        remember(tensor, kind, value)
    return value


def offsets_of_counts(counts: Tensor) -> Tensor:
    """(n_rays + 1,) int32."""
    return torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))


def offsets_of_packed_info(packed_info: Tensor, n_samples: int) -> Tensor:
    """Chunks must follow each other without gaps, as all functions that make `packed_info` leave them. Code for nerfacc
    0.2 may give the ray indices of our `ray_marching` in place of it: they know their rays."""
    if packed_info.dim() == 1 and (known := recall(packed_info, "offsets")) is not None:
        return known
    if packed_info.dim() != 2 or packed_info.shape[-1] != 2:
        hint = "for packed_info from ray_marching, as in nerfacc 0.2, import nerfturbo.compat.nerfacc_packed"
        raise InputError("packed_info", "shape (n_rays, 2)", str(tuple(packed_info.shape)), hint)

    def make() -> Tensor:
        offsets = offsets_of_counts(packed_info[:, 1])
        if packed_info.device.type == "cpu":  # elsewhere looking would wait for the device
            filled = packed_info[:, 1] > 0
            bad = int(offsets[-1]) != n_samples or bool((packed_info[:, 0] != offsets[:-1])[filled].any())
            expected = f"chunks that follow each other and hold all {n_samples} samples"
            refuse(bad, "packed_info", expected, f"chunks that hold {int(offsets[-1])} or leave gaps")
        return offsets

    return remembered(packed_info, f"offsets of {n_samples}", make)


def offsets_of_indices(indices: Tensor, n_rays: int | None) -> Tensor:
    """`indices` must not decrease; without `n_rays` the largest index is read back, which waits for the device."""
    refuse(indices.dim() != 1, "ray_indices", "shape (n_samples,)", tuple(indices.shape))
    known = recall(indices, "offsets")
    if known is not None and n_rays in (None, known.shape[0] - 1):
        return known
    if n_rays is None:
        n_rays = int(indices[-1]) + 1 if indices.shape[0] else 0

    def make() -> Tensor:
        if indices.device.type == "cpu" and bool((indices[1:] < indices[:-1]).any()):
            raise InputError("ray_indices", "indices in ascending order", "unsorted ones", "sort the samples by ray")
        rays = torch.arange(n_rays + 1, device=indices.device, dtype=indices.dtype)
        return torch.searchsorted(indices.contiguous(), rays).to(torch.int32)

    return remembered(indices, f"offsets of {n_rays} rays", make)


def offsets_of(values: Tensor, packed_info: Some, ray_indices: Some, n_rays: Count, what: str = "values") -> Some:
    """Offsets of flattened values (n_samples,); None when neither form is given, which means batched ones."""
    if packed_info is None and ray_indices is None:
        return None
    refuse(values.dim() != 1, what, "shape (n_samples,), flattened", tuple(values.shape))
    n_samples = values.shape[0]
    if packed_info is not None:
        return offsets_of_packed_info(packed_info, n_samples)
    assert ray_indices is not None
    refuse(ray_indices.shape[0] != n_samples, "ray_indices", f"shape ({n_samples},)", tuple(ray_indices.shape))
    return offsets_of_indices(ray_indices, n_rays)


def indices_of(offsets: Tensor, n_samples: int) -> Tensor:
    """(n_samples,) int64 ray of each sample."""
    samples = torch.arange(n_samples, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), samples, right=True)


def ray_indices_of(samples: PackedSamples) -> Tensor:
    """(n_samples,) int64 ray of each sample, with all that `rendering` would make of it."""
    indices = samples.ray_indices.long()
    remember(indices, "offsets", samples.offsets)
    remember(indices, "narrow", samples.ray_indices)
    return indices


def packed_info_of(offsets: Tensor) -> Tensor:
    """(n_rays, 2) int64: first sample and number of samples of each ray."""
    wide = offsets.long()
    return torch.stack([wide[:-1], wide[1:] - wide[:-1]], dim=-1)


@torch.no_grad()
def pack_info(ray_indices: Tensor, n_rays: int | None = None) -> Tensor:
    """(n_rays, 2) int64: where each ray's samples begin and how many there are. `ray_indices` must ascend. Without
    `n_rays` it is the largest index plus one, which is read back from the device.

    >>> pack_info(torch.tensor([0, 0, 2]), n_rays=4).tolist()
    [[0, 2], [2, 0], [2, 1], [3, 0]]
    """
    return packed_info_of(offsets_of_indices(ray_indices, n_rays))


@torch.no_grad()
def unpack_info(packed_info: Tensor, n_samples: int | None = None) -> Tensor:
    """(n_samples,) int64 ray of each sample: the inverse of `pack_info`."""
    if n_samples is None:
        n_samples = packed_info.shape[0] if packed_info.dim() == 1 else int(packed_info[:, 1:].sum())
    offsets = offsets_of_packed_info(packed_info, n_samples)
    if packed_info.dim() == 1:
        return packed_info
    indices = indices_of(offsets, n_samples)
    remember(indices, "offsets", offsets)
    return indices


def pack_data(data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(all, D) what a mask (n_rays, n) keeps of data (n_rays, n, D), ray after ray, and its packed_info."""
    check_shape("data", data, ("n_rays", "n", "D"))
    check_tensor("mask", mask, tuple(data.shape[:2]), torch.bool)
    return data[mask], packed_info_of(offsets_of_counts(mask.sum(-1)))


def unpack_data(packed_info: Tensor, data: Tensor, n_samples: int | None = None, pad_value: float = 0.0) -> Tensor:
    """(n_rays, n_samples, D): data (all, D) of each ray, then `pad_value`. As wide as the longest ray unless given;
    what is beyond is cut off. Differentiable to the data."""
    check_shape("data", data, ("n_samples", "D"))
    offsets = offsets_of_packed_info(packed_info, data.shape[0])
    if n_samples is None:
        n_samples = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
    rays = indices_of(offsets, data.shape[0])
    column = torch.arange(data.shape[0], device=data.device) - offsets[rays]
    inside = column < n_samples
    result = data.new_full((offsets.shape[0] - 1, n_samples, data.shape[1]), pad_value)
    return result.index_put((rays[inside], column[inside]), data[inside])
