"""Which pixels of a pool are drawn: only some of them (a mask), or hard ones more often (a guide).

Uniform: ray i takes the floor(n u_i)-th of the n pixels that the mask leaves; u_i is the 48-bit draw of `draw_pixels`.
The mask is one bit per pixel and a running count per 64 of them, so that the k-th pixel is found by a binary search
and never by trying again: no ray is wasted, and the same draws come out of every backend.

Guided: a tile (a square of pixels of one picture) is drawn with probability share_t / total, then one of its pixels
uniformly. Any mean over the pixels is still estimated without bias if each ray counts `weights` times:

    weights = (1 / n) / (share_t / total / pixels of the tile),   0 where the mask excludes the pixel.

Shares are integers, so that sums over any number of tiles are exact and every backend draws the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ._checks import check_device, check_int, check_shape
from ._dispatch import implementation

WORD = 64  # pixels per word of a mask
MAX_TOTAL = 1 << 38  # of a guide's shares: 24 bits of the draw times this stay within an int64


@dataclass(frozen=True)
class PixelMask:
    """The pixels that may be drawn, one bit each, lowest bit first."""

    words: Tensor  # (n_words,) int64
    before: Tensor  # (n_words + 1,) int64, pixels that may be drawn before each word
    n_drawable: int

    def __post_init__(self) -> None:
        check_int("words", self.words, torch.int64)
        check_int("before", self.before, torch.int64)
        check_shape("before", self.before, (self.words.shape[0] + 1,))
        check_device(words=self.words, before=self.before)
        if self.n_drawable < 1:
            raise InputError("mask", "at least one pixel that may be drawn", "none")

    @classmethod
    def of_words(cls, words: Tensor) -> PixelMask:
        """From the bits alone, which are counted here."""
        before = torch.zeros(words.shape[0] + 1, dtype=torch.int64, device=words.device)
        torch.cumsum(count_bits(words), 0, out=before[1:])
        return cls(words, before, int(before[-1]))

    def to(self, device: torch.device | str) -> PixelMask:
        return PixelMask(self.words.to(device), self.before.to(device), self.n_drawable)


@dataclass(frozen=True)
class PixelGuide:
    """Tiles of the pictures and how often each is drawn. `ends` may change in place between draws."""

    ends: Tensor  # (n_tiles,) int64, shares summed up to and with each tile; the last is the total, < MAX_TOTAL
    first_tiles: Tensor  # (n_images + 1,) int64, first tile of each picture; row-major within it
    tile: int  # side of a tile in pixels; tiles at the right and lower edges are smaller
    n_drawable: int  # pixels of the pool that may be drawn

    def __post_init__(self) -> None:
        check_int("ends", self.ends, torch.int64)
        check_int("first_tiles", self.first_tiles, torch.int64)
        check_device(ends=self.ends, first_tiles=self.first_tiles)
        if self.tile < 1:
            raise InputError("tile", "a side of at least 1 pixel", str(self.tile))


class ChosenPixels(NamedTuple):
    """Result of `choose_pixels`; the last two are None without a guide."""

    indices: Tensor  # (n_rays,) int64 into the pool
    weights: Tensor | None  # (n_rays,) fp32, how much each ray counts
    tiles: Tensor | None  # (n_rays,) int64


def count_bits(words: Tensor) -> Tensor:
    """(n,) int64: how many bits of each int64 word are set."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56) & 0xFF


def pack_words(flags: Tensor) -> Tensor:
    """Flags (n,) as words (ceil(n / 64),) int64; the bits behind the last flag are zero.

    >>> pack_words(torch.tensor([True, False, True])).tolist()
    [5]
    """
    n_words = -(-flags.shape[0] // WORD)
    padded = torch.zeros(n_words * WORD, dtype=torch.int64, device=flags.device)
    padded[: flags.shape[0]] = flags
    shifts = torch.arange(WORD, device=flags.device)
    return (padded.view(n_words, WORD) << shifts).sum(-1)


def unpack_words(words: Tensor, first: int, last: int) -> Tensor:
    """(last - first,) bool: the flags of pixels first ... last - 1."""
    start, stop = first // WORD, -(-last // WORD)
    bits = (words[start:stop, None] >> torch.arange(WORD, device=words.device)) & 1
    return bits.reshape(-1)[first - start * WORD : last - start * WORD].bool()


def choose_pixels(
    offsets: Tensor,
    widths: Tensor,
    n_rays: int,
    *,
    mask: PixelMask | None = None,
    guide: PixelGuide | None = None,
    seed: int,
    step: int | Tensor,
    first: int = 0,
) -> ChosenPixels:
    """Pixels for rays first ... first + n_rays - 1 of this step's batch; never waits for the device.

    Pictures as in `PixelPool`: `offsets` (n_images + 1,) int64 and `widths` (n_images,) int64.
    """
    if n_rays < 0:
        raise InputError("n_rays", "a count >= 0", str(n_rays))
    check_shape("offsets", offsets, (widths.shape[0] + 1,))
    check_int("offsets", offsets, torch.int64)
    check_device(
        offsets=offsets,
        widths=widths,
        mask=None if mask is None else mask.words,
        guide=None if guide is None else guide.ends,
    )
    probe = torch.empty(0, device=offsets.device)
    return ChosenPixels(
        *implementation("choose_pixels", "choose_pixels", probe)(
            offsets, widths, n_rays, mask=mask, guide=guide, seed=seed, step=step, first=first
        )
    )
