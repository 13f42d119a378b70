"""Random pixels of a pool of pictures, as rays and colours; and the rays of a whole picture.

Ray i of a step looks through the centre of pixel floor(n_pixels * u_i) of the pool; u_i is a 48-bit draw of (seed,
step, i): ranks, devices and resumed runs see the same pixels. Poses look along -z with y
up; directions have unit length.

`choose_pixels` draws among some pixels only: with a mask of n pixels, ray i takes the floor(n u_i)-th of them. The mask
is one bit per pixel and a running count per 64, so that the k-th pixel is found by a binary search and never by trying
again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .._checks import check_device, check_dtype, check_shape, check_tensor, refuse
from .._dispatch import implementation

WORD = 64  # pixels per word of a mask


@dataclass(frozen=True)
class PixelMask:
    """The pixels that may be drawn, one bit each, lowest bit first."""

    words: Tensor  # (n_words,) int64
    before: Tensor  # (n_words + 1,) int64, pixels that may be drawn before each word
    n_drawable: int

    def __post_init__(self) -> None:
        check_dtype("words", self.words, torch.int64)
        check_dtype("before", self.before, torch.int64)
        check_shape("before", self.before, (self.words.shape[0] + 1,))
        check_device(words=self.words, before=self.before)
        refuse(self.n_drawable < 1, "mask", "at least one pixel that may be drawn", "none")

    @classmethod
    def of_words(cls, words: Tensor) -> "PixelMask":
        """From the bits alone, which are counted here."""
        before = torch.nn.functional.pad(torch.cumsum(count_bits(words), 0), (1, 0))
        return cls(words, before, int(before[-1]))

    def to(self, device: torch.device | str) -> "PixelMask":
        return PixelMask(self.words.to(device), self.before.to(device), self.n_drawable)


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
    return (padded.view(n_words, WORD) << torch.arange(WORD, device=flags.device)).sum(-1)


def unpack_words(words: Tensor, first: int, last: int) -> Tensor:
    """(last - first,) bool: the flags of pixels first ... last - 1."""
    start, stop = first // WORD, -(-last // WORD)
    bits = (words[start:stop, None] >> torch.arange(WORD, device=words.device)) & 1
    return bits.reshape(-1)[first - start * WORD : last - start * WORD].bool()


def choose_pixels(
    offsets: Tensor, n_rays: int, *, mask: PixelMask | None = None, seed: int, step: int | Tensor, first: int = 0
) -> Tensor:
    """(n_rays,) int64 into the pool: pixels for rays first ... first + n_rays - 1 of this step's batch; never waits for
    the device. `offsets` (n_images + 1,) int64 as in `PixelPool`."""
    refuse(n_rays < 0, "n_rays", "a count >= 0", n_rays)
    check_tensor("offsets", offsets, (offsets.shape[0],), torch.int64)
    check_device(offsets=offsets, mask=None if mask is None else mask.words)
    choose = implementation("pixels", "choose_pixels", offsets)
    return choose(offsets, n_rays, mask=mask, seed=seed, step=step, first=first)


@dataclass(frozen=True)
class PixelPool:
    """Pictures of any sizes, one after the other and row-major, with the pinhole camera of each."""

    pixels: Tensor  # (n_pixels, 3 or 4) uint8; 0 where colours are read elsewhere
    offsets: Tensor  # (n_images + 1,) int64, first pixel of each picture
    widths: Tensor  # (n_images,) int64
    poses: Tensor  # (n_images, 3, 4) fp32, camera to world
    intrinsics: Tensor  # (n_images, 4) fp32: fx, fy, cx, cy

    def __post_init__(self) -> None:
        n_images = self.widths.shape[0]
        if self.pixels.dim() != 2 or self.pixels.shape[1] not in (0, 3, 4):
            raise InputError("pixels", "shape (n_pixels, 3) or (n_pixels, 4)", str(tuple(self.pixels.shape)))
        check_dtype("pixels", self.pixels, torch.uint8)
        check_shape("offsets", self.offsets, (n_images + 1,))
        check_shape("poses", self.poses, (n_images, 3, 4))
        check_shape("intrinsics", self.intrinsics, (n_images, 4))
        check_device(pixels=self.pixels, offsets=self.offsets, widths=self.widths, poses=self.poses)


class DrawnPixels(NamedTuple):
    """Result of `draw_pixels`."""

    origins: Tensor  # (n_rays, 3) fp32
    directions: Tensor  # (n_rays, 3) fp32, unit length
    rgba: Tensor  # (n_rays, 3 or 4) fp32 in [0, 1]
    image_indices: Tensor  # (n_rays,) int64


def draw_pixels(
    pool: PixelPool, n_rays: int, *, seed: int, step: int | Tensor, first: int = 0, indices: Tensor | None = None
) -> DrawnPixels:
    """Pixels for rays first ... first + n_rays - 1 of this step's batch; never waits for the device. `indices`
    (n_rays,) int64, from `choose_pixels` say, are looked up instead of drawing any."""
    refuse(n_rays < 0, "n_rays", "a count >= 0", n_rays)
    if indices is not None:
        check_tensor("indices", indices, (n_rays,), torch.int64)
        check_device(pixels=pool.pixels, indices=indices)
    draw = implementation("pixels", "draw_pixels", pool.poses)
    return DrawnPixels(*draw(pool, n_rays, seed=seed, step=step, first=first, indices=indices))


def read_pixels(pixels: Tensor, indices: Tensor) -> Tensor:
    """(n, channels) fp32 in [0, 1]: colours of `indices` (n,) int64 among pixels (n_pixels, 3 or 4) uint8. A GPU may
    read them from host memory: it takes its time, and leaves room for kernels on other streams.

    >>> import torch
    >>> read_pixels(torch.tensor([[0, 51, 255]], dtype=torch.uint8), torch.tensor([0]))
    tensor([[0.0000, 0.2000, 1.0000]])
    """
    check_tensor("pixels", pixels, (pixels.shape[0], pixels.shape[-1]), torch.uint8)
    check_tensor("indices", indices, (indices.shape[0],), torch.int64)
    check_device(pixels=pixels, indices=indices)
    return implementation("pixels", "read_pixels", indices)(pixels, indices)


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    """Origins and unit directions (height * width, 3) fp32 through the pixel centres of a pinhole camera, row-major.
    `camera` (16,) holds the pose (3, 4), camera to world, looking along -z with y up, then fx, fy, cx, cy in pixels.
    The rows of a picture from r on are the picture of a camera with r subtracted from cy.

    >>> import torch
    >>> camera = torch.cat([torch.eye(3, 4).flatten(), torch.tensor([2.0, 2.0, 0.5, 0.5])])
    >>> camera_rays(camera, width=1, height=1)[1].tolist()
    [[0.0, 0.0, -1.0]]
    """
    check_tensor("camera", camera, (16,))
    refuse(width < 0 or height < 0, "width and height", "at least 0", f"{width} and {height}")
    return implementation("pixels", "camera_rays", camera)(camera.detach().float(), width=width, height=height)
