"""Packed sums and scans by index arithmetic; gradients by autograd."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...types import PackedSamples
from ..composite import stretched
from . import take_rows


def row_rays(offsets: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """ray (n,) int64 of each row, 0 in the tail, and used (n,) bool."""
    rows = torch.arange(n, device=offsets.device)
    used = rows < offsets[-1]
    ray = torch.searchsorted(offsets[1:].long(), rows, right=True)
    return torch.where(used, ray, torch.zeros_like(ray)), used


def widen(values: Tensor) -> Tensor:
    """Sums run in fp32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def packed_sum(values: Tensor, offsets: Tensor) -> Tensor:
    ray, used = row_rays(offsets, values.shape[0])
    wide, shape = widen(values), (offsets.shape[0] - 1, *values.shape[1:])
    mask = used if values.dim() == 1 else used[:, None]
    if shape[0] == 0:
        return wide.new_zeros(shape) + 0.0 * wide[:0].sum()
    return wide.new_zeros(shape).index_add(0, ray, torch.where(mask, wide, wide.new_zeros(())))


def packed_cumsum(values: Tensor, offsets: Tensor, *, exclusive: bool, reverse: bool) -> Tensor:
    n = values.shape[0]
    wide = widen(values)
    if n == 0 or offsets.shape[0] == 1:
        return torch.where(torch.zeros_like(wide, dtype=torch.bool), wide, torch.zeros_like(wide))
    ray, used = row_rays(offsets, n)
    clean = torch.where(used, wide, torch.zeros_like(wide))
    # A scan over everything would cancel digits between rays: pad rays to one length and scan along it instead.
    position = torch.arange(n, device=values.device) - offsets[ray].long()
    n_rays, longest = offsets.shape[0] - 1, max(1, int((offsets[1:] - offsets[:-1]).max().item()))
    place = ray * longest + position.clamp(0, longest - 1)
    padded = clean.new_zeros(n_rays * longest).index_add(0, place, clean).view(n_rays, longest)
    if reverse:
        padded = padded.flip(1)
    scanned = padded.cumsum(1)
    if exclusive:  # shifted, not subtracted: a large value must not eat the digits of the sum before it
        scanned = pad(scanned[:, :-1], (1, 0))
    if reverse:
        scanned = scanned.flip(1)
    result = take_rows(scanned.reshape(-1), place)
    return torch.where(used, result, torch.zeros_like(result))


def fit_offsets(counts: Tensor, capacity: int | None) -> tuple[Tensor, Tensor | None]:
    """offsets (n_rays + 1,) int32 and, for a fixed capacity, how many whole rays fit: () int32."""
    totals = pad(torch.cumsum(counts.long(), 0), (1, 0))
    if capacity is None:
        return totals.to(torch.int32), None
    kept = (totals[1:] <= capacity).sum(dtype=torch.int32)
    return torch.minimum(totals, totals[kept.long()]).to(torch.int32), kept


def scatter_to_capacity(t_starts, t_ends, offsets, *, capacity, n_rays_kept) -> PackedSamples:
    """Cut the tightly packed values to what fits and append a clean tail."""
    length = t_starts.shape[0] if capacity is None else capacity
    ray, used = row_rays(offsets, length)

    def place(values: Tensor) -> Tensor:
        whole = pad(values[:length], (0, max(0, length - values.shape[0])))
        return torch.where(used, whole, torch.zeros_like(whole))

    return PackedSamples(place(t_starts), place(t_ends), ray.to(torch.int32), offsets, n_rays_kept)


@torch.no_grad()
def compact(samples: PackedSamples, keep: Tensor, *, capacity: int | None) -> PackedSamples:
    codes, keep = keep, (keep != 0) & samples.used
    totals = pad(torch.cumsum(keep.long(), 0), (1, 0))[samples.offsets.long()]
    offsets, kept = fit_offsets(totals[1:] - totals[:-1], capacity)
    if samples.n_rays_kept is not None:
        kept = samples.n_rays_kept if kept is None else torch.minimum(kept, samples.n_rays_kept)
    starts, ends = samples.t_starts[keep], samples.t_ends[keep]
    if codes.dtype == torch.uint8:
        starts, ends = stretched(starts, ends, codes[keep])
    return scatter_to_capacity(starts, ends, offsets, capacity=capacity, n_rays_kept=kept)
