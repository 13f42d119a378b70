"""Where the pictures are not learned yet: an error per tile, and how often its pixels are drawn because of it.

Half of the draws stay uniform, the other half go to tiles in proportion to their error times their pixels:

    share_t = n_t / n  *  (1/2 + 1/2 * e_t / mean e)        n_t of the n drawable pixels lie in tile t

so that every pixel is drawn at least half as often as without a guide, and no weight exceeds 2. e_t is the mean
absolute colour error of the rays that fell into the tile, a running mean over refreshes; a tile that no ray has met
yet counts as the mean tile. The gradient of a loss is largest in expectation where its error is, which is where more
rays lower the variance most; the weights (`ops/pixels`) keep the expectation itself.

Sums are integers: they do not depend on the order in which rays add to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.pixels import PixelGuide, PixelMask, unpack_words
from .images import ImagePool

MAX_TILES = 1 << 20
SMALLEST_TILE = 16
KEEP = 0.5  # of the old error at a refresh
UNIFORM = 0.5  # share of the draws that ignore the errors
_UNITS = 1 << 16  # of an error
_TOTAL = 1 << 36  # of all shares


class ErrorMap:
    """Errors of tiles of pictures: `add` after a step, `refresh` now and then; neither waits for the device."""

    def __init__(self, images: ImagePool, mask: PixelMask | None) -> None:
        device, widths, heights = images.device, *images.sizes.cpu().unbind(-1)
        self.tile = SMALLEST_TILE
        while int((_parts(widths, self.tile) * _parts(heights, self.tile)).sum()) > MAX_TILES:
            self.tile *= 2
        counts = _parts(widths, self.tile) * _parts(heights, self.tile)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        n_tiles = int(first[-1])
        self._pixels = _drawable_pixels(images, mask, first, self.tile).to(device)  # (n_tiles,) float64
        self.errors = torch.full((n_tiles,), -1.0, dtype=torch.float64, device=device)  # negative: not met yet
        self._sums = torch.zeros(n_tiles, dtype=torch.int64, device=device)
        self._counts = torch.zeros(n_tiles, dtype=torch.int64, device=device)
        n_drawable = images.n_pixels if mask is None else mask.n_drawable
        ends = torch.zeros(n_tiles, dtype=torch.int64, device=device)
        self.guide = PixelGuide(ends, first.to(device), self.tile, n_drawable)
        self.refresh()

    def add(self, tiles: Tensor, errors: Tensor, counted: Tensor) -> None:
        """Errors (n,) >= 0 of rays in `tiles` (n,); `counted` (n,) bool leaves rays out."""
        units = (errors.detach().double().clamp(0.0, 16.0) * _UNITS).long() * counted
        self._sums.index_add_(0, tiles, units)
        self._counts.index_add_(0, tiles, counted.long())

    def refresh(self) -> None:
        """Take what was added since the last time into the errors, and draw by them from now on."""
        met = self._counts > 0
        fresh = self._sums.double() / (self._counts.clamp_min(1) * _UNITS)
        mixed = torch.where(self.errors < 0.0, fresh, KEEP * self.errors + (1.0 - KEEP) * fresh)
        self.errors.copy_(torch.where(met, mixed, self.errors))
        self._sums.zero_()
        self._counts.zero_()
        known = (self.errors >= 0.0) * self._pixels
        mean = (self.errors * known).sum() / known.sum().clamp_min(1.0)
        relative = torch.where((self.errors >= 0.0) & (mean > 0.0), self.errors / mean.clamp_min(1e-30), 1.0)
        weights = self._pixels * (UNIFORM + (1.0 - UNIFORM) * relative)
        shares = (weights * (_TOTAL / weights.sum())).long() + (self._pixels > 0.0)
        torch.cumsum(shares, 0, out=self.guide.ends)

    def state_tensors(self) -> list[Tensor]:
        """What changes from step to step, in place."""
        return [self.errors, self._sums, self._counts, self.guide.ends]


def _parts(sides: Tensor, tile: int) -> Tensor:
    return torch.div(sides + tile - 1, tile, rounding_mode="floor")


def _drawable_pixels(images: ImagePool, mask: PixelMask | None, first: Tensor, tile: int) -> Tensor:
    """(n_tiles,) float64 on the CPU: how many pixels of each tile may be drawn."""
    counts = torch.zeros(int(first[-1]), dtype=torch.float64)
    offsets = images.offsets.tolist()
    for index, (width, height) in enumerate(images.sizes.tolist()):
        across, down = -(-width // tile), -(-height // tile)
        flags = torch.zeros(down * tile, across * tile)
        if mask is None:
            flags[:height, :width] = 1.0
        else:
            chosen = unpack_words(mask.words, offsets[index], offsets[index + 1])
            flags[:height, :width] = chosen.view(height, width).float().cpu()
        sums = flags.view(down, tile, across, tile).sum((1, 3), dtype=torch.float64)
        counts[int(first[index]) : int(first[index + 1])] = sums.reshape(-1)
    return counts
