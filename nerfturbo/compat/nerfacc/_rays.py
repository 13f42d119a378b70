"""Which samples belong to which ray, in the three forms that nerfacc's callers use.

Inside, everything is `offsets` (n_rays + 1,) int32, as in `nerfturbo.PackedSamples`. What a function here has made
of a caller's tensor is remembered with that tensor (and forgotten with it, or when it is written to), so that the ray
indices which `sampling` returns need not be counted again by `rendering`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError

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
    offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
    return offsets


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
    if n_rays is None:
        known = recall(indices, "offsets")
        if known is not None:
            return known
        n_rays = int(indices[-1]) + 1 if indices.shape[0] else 0

    def make() -> Tensor:
        if indices.device.type == "cpu" and bool((indices[1:] < indices[:-1]).any()):
            raise InputError("ray_indices", "indices in ascending order", "unsorted ones", "sort the samples by ray")
        rays = torch.arange(n_rays + 1, device=indices.device, dtype=indices.dtype)
        return torch.searchsorted(indices.contiguous(), rays).to(torch.int32)

    known = recall(indices, "offsets")
    if known is not None and known.shape[0] == n_rays + 1:
        return known
    return remembered(indices, f"offsets of {n_rays} rays", make)


def offsets_of(
    n_samples: int, packed_info: Tensor | None, ray_indices: Tensor | None, n_rays: int | None
) -> Tensor | None:
    """Offsets of flattened samples; None when neither form is given, which means batched samples."""
    if packed_info is not None:
        return offsets_of_packed_info(packed_info, n_samples)
    if ray_indices is not None:
        if ray_indices.shape[0] != n_samples:
            raise InputError("ray_indices", f"shape ({n_samples},)", str(tuple(ray_indices.shape)))
        return offsets_of_indices(ray_indices, n_rays)
    return None


def indices_of(offsets: Tensor, n_samples: int) -> Tensor:
    """(n_samples,) int64 ray of each sample."""
    samples = torch.arange(n_samples, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), samples, right=True)


def packed_info_of(offsets: Tensor) -> Tensor:
    """(n_rays, 2) int64: first sample and number of samples of each ray."""
    wide = offsets.long()
    return torch.stack([wide[:-1], wide[1:] - wide[:-1]], dim=-1)
