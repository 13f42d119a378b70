"""Hash encoding by fancy indexing, corner by corner; gradients by autograd."""

import torch
from torch import Tensor

from .._sink import redirect, zero_tail
from ..packed import take_rows
from . import GROUP, PRIMES, HashLayout, HashLevel, level_weights
from . import hash_encode as any_hash_encode


def table_rows(level: HashLevel, corner: Tensor) -> Tensor:
    """(n,) int64 rows of the table for integer nodes (n, 3)."""
    x, y, z = corner.unbind(-1)
    if level.hashed:
        # Products stay below 2^63 (nodes < 2^31), and the mask keeps the low bits that 32-bit arithmetic would give.
        mixed = (x * PRIMES[0]) ^ (y * PRIMES[1]) ^ (z * PRIMES[2])
        return level.offset + (mixed & (level.size - 1))
    return level.offset + x + level.nodes * (y + level.nodes * z)


def hash_encode(positions, table, layout, *, half=None, sink=None, n_used=None) -> Tensor:
    table, positions = redirect(table, half, sink), zero_tail(positions, n_used)
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


def thin_out(grad: Tensor, positions: Tensor, layout: HashLayout, thin: float) -> Tensor:
    """`grad` (n, n_levels * n_features) with small gradients left out. Per level, a sample's gradient g (its largest
    feature) is compared with t = thin * mean g of its GROUP of consecutive samples: below t it stays with chance g / t,
    enlarged to t, so that in the mean nothing changes. The chance is a hash of the bits of the position (n, 3), which
    are new in every step, and of the level."""
    n, levels = grad.shape[0], torch.arange(layout.n_levels, dtype=torch.int32, device=grad.device)
    x, y, z = positions.float().contiguous().view(torch.int32).unbind(-1)
    bits = (x ^ (y * -1640531535) ^ (z * 805459861))[:, None] + levels * 374761393
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2048144789
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * -1028477379
    chance = ((bits >> 8) & 0xFFFFFF) * 2.0**-24
    parts = grad.view(n, layout.n_levels, layout.n_features)
    size = parts.abs().amax(-1)
    padded = torch.nn.functional.pad(size, (0, 0, 0, -n % GROUP)).view(-1, GROUP, layout.n_levels)
    least = (thin * padded.mean(1)).repeat_interleave(GROUP, 0)[:n]
    factor = torch.where(size < least, least / size.clamp(min=1e-30), 1.0)
    return (parts * torch.where(size > chance * least, factor, 0.0)[..., None]).view_as(grad)


def encode_regions(positions, footprints, table, layout, *, half=None, sink=None, n_used=None) -> Tensor:
    """Point by point; what encodes one is that of the backend in force."""
    total, options = 0.0, {"half": half, "sink": sink, "n_used": n_used}
    for point, footprint in zip(positions.unbind(1), zero_tail(footprints, n_used).unbind(1), strict=True):
        weights = level_weights(footprint, layout).repeat_interleave(layout.n_features, dim=1)
        total = total + any_hash_encode(point, table, layout, **options) * weights
    return (total / positions.shape[1]).to(table.dtype if half is None else half.dtype)
