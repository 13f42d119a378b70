"""The occupancy grid's own arithmetic: running maximum, threshold, bit packing."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_device, check_float, check_int, check_shape
from ._dispatch import implementation


def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    """In place: density[c] = max(density[c] * decay, fresh) for the given cells; others keep their value.

    `density` (n_cells,) fp32; `cells` (n,) int64, repeats allowed (the largest fresh value wins, one decay); `fresh`
    (n,): non-finite values are ignored. Negative density marks cells no camera sees: they stay as they are.
    """
    check_shape("density", density, ("n_cells",))
    check_shape("cells", cells, ("n",))
    check_shape("fresh", fresh, (cells.shape[0],))
    check_int("cells", cells, torch.int64)
    check_float("fresh", fresh)
    check_device(density=density, cells=cells, fresh=fresh)
    implementation("occupancy", "decay_and_max", density)(density, cells, fresh, decay)


def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    """Write bits[i >> 5] of the cells with density > min(threshold, mean of density over cells >= 0).

    Returns that mean, a () tensor, without reading it back. `bits` (n_cells / 32,) int32 is written in place.
    """
    check_shape("density", density, ("n_cells",))
    check_shape("bits", bits, (density.shape[0] // 32,))
    check_int("bits", bits, torch.int32)
    check_device(density=density, bits=bits)
    return implementation("occupancy", "threshold_bits", density)(density, bits, threshold)


def pack_bits(occupied: Tensor) -> Tensor:
    """(n_cells,) bool -> (n_cells / 32,) int32, cell i at bit i & 31 of word i >> 5."""
    check_shape("occupied", occupied, ("n_cells",))
    shifts = torch.arange(32, dtype=torch.int32, device=occupied.device)
    return (occupied.view(-1, 32).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def unpack_bits(bits: Tensor) -> Tensor:
    """(n_cells / 32,) int32 -> (n_cells,) bool, the inverse of `pack_bits`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).bool().flatten()
