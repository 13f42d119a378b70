"""What "even" means along a ray. A few operations per number, the same plain torch on every device.

Places along a ray are numbers s in [0, 1]: g(t) = (1 - s) g(near) + s g(far), with a warp g that decides where even
steps in s fall. Far from the cameras they should grow, as the pixels' footprints do.

    uniform      g(t) = t
    disparity    g(t) = 1 / t
    mixed        g(t) = t / 2 up to t = 1, and 1 - 1 / (2 t) beyond: half of all places for the first unit of length
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError

Warp = Literal["uniform", "disparity", "mixed"]
WARPS: tuple[Warp, ...] = ("uniform", "disparity", "mixed")
LEAST = 1e-4  # of a unit: nearer than this 1 / t is cut off
LEAST_REST = 1e-7  # of 1 - g: farther than this t ends


def warp(t: Tensor, kind: Warp) -> Tensor:
    """g(t); see the module's formulas.

    >>> warp(torch.tensor([0.5, 1.0, 5.0]), "mixed").tolist()
    [0.25, 0.5, 0.8999999761581421]
    """
    if kind == "uniform":
        return t
    if kind == "disparity":
        return 1.0 / t.clamp(min=LEAST)
    if kind == "mixed":
        return torch.where(t < 1.0, 0.5 * t, 1.0 - 0.5 / t.clamp(min=1.0))
    raise InputError("spacing", '"uniform", "disparity" or "mixed"', repr(kind))


def unwarp(g: Tensor, kind: Warp) -> Tensor:
    """The inverse of `warp`."""
    if kind == "uniform":
        return g
    if kind == "disparity":
        return 1.0 / g
    return torch.where(g < 0.5, 2.0 * g, 0.5 / (1.0 - g).clamp(min=LEAST_REST))


def spread(places: Tensor, near: Tensor, far: Tensor, *, kind: Warp = "uniform") -> Tensor:
    """Distances t of places s in [0, 1] between near and far, which are broadcast against them.

    >>> spread(torch.tensor([0.0, 0.5, 1.0]), torch.tensor(1.0), torch.tensor(4.0), kind="disparity").tolist()
    [1.0, 1.600000023841858, 4.0]
    """
    low, high = warp(near, kind), warp(far, kind)
    return unwarp(low + (high - low) * places, kind)
