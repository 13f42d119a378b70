"""Which samples belong to which ray, in the three forms that nerfacc's callers use.

Inside, everything is `offsets` (n_rays + 1,) int32, as in `nerfturbo.PackedSamples`. What is made of a caller's tensor
is remembered until it dies or is written to: `rendering` need not count again the rays which `sampling` returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...types import PackedSamples


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
    if found is None or found[0]() is not tensor or found[1] != version_of(tensor):
        return None
    return found[2]


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
    """Chunks must follow each other without gaps, as all functions that make `packed_info` leave them."""
    if packed_info.dim() != 2 or packed_info.shape[-1] != 2:
        raise InputError("packed_info", "shape (n_rays, 2)", str(tuple(packed_info.shape)))

    def make() -> Tensor:
        offsets = offsets_of_counts(packed_info[:, 1])
        if packed_info.device.type == "cpu":  # elsewhere looking would wait for the device
            filled = packed_info[:, 1] > 0
            if int(offsets[-1]) != n_samples or bool((packed_info[:, 0] != offsets[:-1])[filled].any()):
                expected = f"chunks that follow each other and hold all {n_samples} samples"
                raise InputError("packed_info", expected, f"chunks that hold {int(offsets[-1])} or leave gaps")
        return offsets

    return remembered(packed_info, f"offsets of {n_samples}", make)


def offsets_of_indices(indices: Tensor, n_rays: int | None) -> Tensor:
    """`indices` must not decrease; without `n_rays` the largest index is read back, which waits for the device."""
    if indices.dim() != 1:
        raise InputError("ray_indices", "shape (n_samples,)", str(tuple(indices.shape)))
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


def offsets_of(
    values: Tensor, packed_info: Tensor | None, ray_indices: Tensor | None, n_rays: int | None, what: str = "values"
) -> Tensor | None:
    """Offsets of flattened values (n_samples,); None when neither form is given, which means batched ones."""
    if packed_info is None and ray_indices is None:
        return None
    if values.dim() != 1:
        raise InputError(what, "shape (n_samples,), flattened", str(tuple(values.shape)))
    n_samples = values.shape[0]
    if packed_info is not None:
        return offsets_of_packed_info(packed_info, n_samples)
    assert ray_indices is not None
    if ray_indices.shape[0] != n_samples:
        raise InputError("ray_indices", f"shape ({n_samples},)", str(tuple(ray_indices.shape)))
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
    """(n_rays, 2) int64: where each ray's samples begin and how many there are. `ray_indices` must ascend.

    Without `n_rays` it is the largest index plus one, which is read back from the device.

    >>> pack_info(torch.tensor([0, 0, 2]), n_rays=4).tolist()
    [[0, 2], [2, 0], [2, 1], [3, 0]]
    """
    return packed_info_of(offsets_of_indices(ray_indices, n_rays))
