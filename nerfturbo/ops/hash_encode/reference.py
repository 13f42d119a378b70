"""Hash encoding by fancy indexing, corner by corner; gradients by autograd."""

import torch
from torch import Tensor

from .._sink import redirect, zero_tail
from ..packed import take_rows
from . import PRIMES, HashLayout, HashLevel, level_weights


def table_rows(level: HashLevel, corner: Tensor) -> Tensor:
    """(n,) int64 rows of the table for integer nodes (n, 3)."""
    x, y, z = corner.unbind(-1)
    if level.hashed:
        # Products stay below 2^63 (nodes < 2^31), and the mask keeps the low bits that 32-bit arithmetic would give.
        mixed = (x * PRIMES[0]) ^ (y * PRIMES[1]) ^ (z * PRIMES[2])
        return level.offset + (mixed & (level.size - 1))
    return level.offset + x + level.nodes * (y + level.nodes * z)


def hash_encode(positions, table, layout, *, half=None, sink=None, n_used=None) -> Tensor:
    buffer, found_inf = (None, None) if sink is None else (sink.buffers[0], sink.found_inf)
    table, positions = redirect(table, half, buffer, found_inf), zero_tail(positions, n_used)
    work = torch.float64 if torch.float64 in (positions.dtype, table.dtype) else torch.float32
    clamped = positions.to(work).clamp(0.0, 1.0)
    features = []
    for level in layout.levels:
        p = clamped * level.scale + 0.5
        cell = p.detach().floor()
        fraction = p - cell
        cell = cell.long()
        blended = torch.zeros(positions.shape[0], layout.n_features, dtype=work, device=positions.device)
        for corner in range(8):
            shift = torch.tensor([corner & 1, (corner >> 1) & 1, corner >> 2], device=positions.device)
            weight = torch.where(shift.bool(), fraction, 1.0 - fraction).prod(-1)
            blended = blended + weight[:, None] * take_rows(table, table_rows(level, cell + shift)).to(work)
        features.append(blended)
    return zero_tail(torch.cat(features, dim=-1).to(table.dtype), n_used)


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None) -> Tensor:
    weights = level_weights(zero_tail(footprints[:, None], n_used)[:, 0], layout)
    weights = weights.repeat_interleave(layout.n_features, dim=1)
    return (zero_tail(encoding, n_used) * weights).to(encoding.dtype)
