"""From ray indices to the start and number of each ray's samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ._rays import offsets_of_indices, packed_info_of


@torch.no_grad()
def pack_info(ray_indices: Tensor, n_rays: int | None = None) -> Tensor:
    """(n_rays, 2) int64: where each ray's samples begin and how many there are. `ray_indices` must ascend.

    Without `n_rays` it is the largest index plus one, which is read back from the device.

    >>> pack_info(torch.tensor([0, 0, 2]), n_rays=4).tolist()
    [[0, 2], [2, 0], [2, 1], [3, 0]]
    """
    return packed_info_of(offsets_of_indices(ray_indices, n_rays))
