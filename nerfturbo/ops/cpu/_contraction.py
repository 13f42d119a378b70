"""The contraction of space inside kernels that make positions."""

from __future__ import annotations

import math

import numpy as np

from ._launch import jit

FOLDS = ("none", "sphere", "cube")
QUARTER, HALF, ONE, TWO = np.float32(0.25), np.float32(0.5), np.float32(1.0), np.float32(2.0)


@jit(inner=True)
def fold_unit(x, y, z, fold):
    """Coordinates of the box [0, 1]^3 into [0, 1]^3, all of space: `ops.contraction.fold`; `fold` counts in FOLDS."""
    if fold == 0:
        return x, y, z
    x, y, z = TWO * x - ONE, TWO * y - ONE, TWO * z - ONE
    size = max(abs(x), abs(y), abs(z)) if fold == 2 else np.float32(math.sqrt(x * x + y * y + z * z))
    factor = QUARTER * (TWO - ONE / size) / size if size > ONE else QUARTER
    return x * factor + HALF, y * factor + HALF, z * factor + HALF
