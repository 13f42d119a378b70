"""Moments of pictures: from 0 to 1, as fields, videos and sliders count them, whatever a file's unit is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unit_times(times: Sequence[float], of_all: Sequence[float]) -> tuple[Tensor, tuple[str, ...]]:
    """Times (n,) in [0, 1] and, where they had to be changed for it, a note: the span of all pictures becomes 0 to 1.

    >>> unit_times([10.0, 30.0], [10.0, 30.0, 50.0])
    (tensor([0.0000, 0.5000]), ('times from 10 to 50 are told as 0 to 1',))
    >>> unit_times([0.2, 0.4], [0.2, 0.4])
    (tensor([0.2000, 0.4000]), ())
    """
    low, high = min(of_all), max(of_all)
    if low >= 0.0 and high <= 1.0:
        return torch.tensor(times, dtype=torch.float32), ()
    unit = [(time - low) / (high - low) if high > low else 0.0 for time in times]  # before rounding: seconds since 1970
    return torch.tensor(unit, dtype=torch.float32), (f"times from {low:g} to {high:g} are told as 0 to 1",)
