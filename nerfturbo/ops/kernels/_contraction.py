"""The contraction of space inside kernels that make positions."""

from __future__ import annotations

import triton
import triton.language as tl

FOLDS = {"none": 0, "sphere": 1, "cube": 2}


@triton.jit
def fold_unit(x, y, z, FOLD: tl.constexpr):
    """Coordinates of the box [0, 1]^3 into [0, 1]^3, all of space: `ops.contraction.fold`."""
    if FOLD == 0:
        return x, y, z
    else:
        x, y, z = 2.0 * x - 1.0, 2.0 * y - 1.0, 2.0 * z - 1.0
        if FOLD == 2:
            size = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        else:
            size = tl.sqrt(x * x + y * y + z * z)
        safe = tl.where(size > 1.0, size, 1.0)
        factor = 0.25 * (2.0 - 1.0 / safe) / safe  # a quarter where nothing moves
        return x * factor + 0.5, y * factor + 0.5, z * factor + 0.5
