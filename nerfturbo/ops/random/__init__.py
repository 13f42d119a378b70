"""Counter-based random numbers: Philox-4x32-10 of (seed, stream, step, index). The same bits come out of every backend,
device, rank and resumed run, so a checkpoint stores only seed and step. The counter is (index low, index high, step,
stream), the key is (seed low, seed high); one counter gives four words."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .._checks import check_tensor, refuse
from .._dispatch import implementation


class Stream(IntEnum):
    """Who draws: two users of randomness never share a stream."""

    PIXELS = 0
    JITTER = 1
    BACKGROUND = 2
    GRID_CELLS = 3
    GRID_JITTER = 4
    GRID_TIMES = 5
    TIMES = 6
    IMPORTANCE = 7
    KEYPOINTS = 12
    REFINEMENT = 16
    THINNING = 20
    USER = 1024


def random_bits(
    n: int, *, columns: int = 1, seed: int, stream: int, step: int | Tensor, first: int = 0, device: torch.device | str
) -> Tensor:
    """(n, columns) int32 words of Philox for the global indices first ... first + n - 1; columns is 1 to 4. `step` may
    be a () int64 tensor on the device, so that a captured CUDA graph draws anew at each replay.

    >>> random_bits(1, columns=4, seed=0, stream=0, step=0, device="cpu").tolist()
    [[1713891541, -513161843, -1135104948, -1694442536]]
    """
    return _draw(torch.int32, n, columns, device, seed=seed, stream=int(stream), step=step, first=first)


def random_uniform(
    n: int, *, columns: int = 1, seed: int, stream: int, step: int | Tensor, first: int = 0, device: torch.device | str
) -> Tensor:
    """(n, columns) float32 in [0, 1), multiples of 2^-24: the top 24 bits of `random_bits`.

    >>> random_uniform(2, seed=1, stream=Stream.USER, step=3, device="cpu").shape
    torch.Size([2, 1])
    """
    return _draw(torch.float32, n, columns, device, seed=seed, stream=int(stream), step=step, first=first)


def _draw(dtype: torch.dtype, n: int, columns: int, device: Any, **counter: Any) -> Tensor:
    refuse(not 1 <= columns <= 4, "columns", "1 to 4", columns, "draw from another stream for more")
    refuse(n < 0, "n", "a count >= 0", n)
    if isinstance(counter["step"], Tensor):
        check_tensor("step", counter["step"], (), torch.int64)
    out = torch.empty(n, columns, dtype=dtype, device=device)
    return implementation("random", "draw", out)(out, **counter)
