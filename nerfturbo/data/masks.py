"""Masks: which pixels of a picture count. The others are neither trained on nor scored.

Three customs are known, and the first that has a file for a picture wins:

- `mask_path` of a frame in transforms.json (nerfstudio): black pixels do not count;
- `dynamic_mask_NAME.png` beside the picture NAME (instant-ngp): pixels that are not black do not count;
- `masks/` in the scene's folder, with the picture's own path below its folder of pictures, and `.png` behind it or in
  place of its extension (COLMAP): black pixels do not count.

A pixel of a shrunk picture counts only if all of the mask's pixels under it do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..ops.pixels import WORD, PixelMask

if TYPE_CHECKING:
    from .images import ImagePool

_WHITE = 128  # of 255: masks are black and white, but for the noise of a JPEG


@dataclass(frozen=True)
class MaskFile:
    """A mask of one picture; `marks_ignored`: what it marks does not count, as opposed to what it leaves black."""

    path: Path
    marks_ignored: bool = False


def find_mask(folder: Path, picture: Path, listed: Path | None = None) -> MaskFile | None:
    """The mask of a picture in a scene's folder, by the customs above; `listed` is the one its frame names."""
    if listed is not None:
        return MaskFile(listed)
    dynamic = picture.with_name(f"dynamic_mask_{picture.stem}.png")
    if dynamic.is_file():
        return MaskFile(dynamic, marks_ignored=True)
    if not (folder / "masks").is_dir() or not picture.is_relative_to(folder):
        return None
    inside = picture.relative_to(folder)
    for name in (inside, inside.relative_to(*inside.parts[:1]) if len(inside.parts) > 1 else inside):
        beside = folder / "masks" / name
        for path in (beside.with_name(f"{beside.name}.png"), beside.with_suffix(".png"), beside):
            if path.is_file():
                return MaskFile(path)
    return None


def load_masks(masks: Sequence[MaskFile | None], sizes: Tensor) -> PixelMask | None:
    """Masks of pictures of `sizes` (n, 2), packed; None where no picture has one."""
    if not any(masks):
        return None
    every = zip(masks, sizes.tolist(), strict=True)
    words = pack_flags(_flags(mask, width, height) for mask, (width, height) in every)
    try:
        return PixelMask.of_words(words)
    except InputError as error:
        first = next(mask for mask in masks if mask is not None)
        raise InputError(str(first.path.parent), error.expected, "masks that leave none") from None


def mask_notes(images: ImagePool, masks: Sequence[MaskFile | None]) -> tuple[str, ...]:
    """What a scene says about its masks."""
    if images.mask is None:
        return ()
    share = 1.0 - images.mask.n_drawable / max(1, images.n_pixels)
    count = sum(mask is not None for mask in masks)
    return (f"masks for {count} of {len(masks)} pictures: {share:.1%} of all pixels are not used",)


def pack_flags(parts: Iterable[np.ndarray]) -> Tensor:
    """Flags of one picture after the other as int64 words, holding one picture at a time."""
    packed, rest = [], np.empty(0, bool)
    for part in parts:
        rest = np.concatenate([rest, part.reshape(-1)])
        whole = rest.shape[0] // WORD * WORD
        packed.append(np.packbits(rest[:whole], bitorder="little"))
        rest = rest[whole:].copy()
    tail = np.zeros(-(-rest.shape[0] // WORD) * WORD, bool)
    tail[: rest.shape[0]] = rest
    packed.append(np.packbits(tail, bitorder="little"))
    return torch.from_numpy(np.concatenate(packed).view("<i8").astype(np.int64))


def _flags(mask: MaskFile | None, width: int, height: int) -> np.ndarray:
    if mask is None:
        return np.ones(width * height, bool)
    from PIL import Image

    from .images import open_upright  # imports this file

    image = open_upright(mask.path)
    counts = _marked(image)
    counts = ~(counts > 0) if mask.marks_ignored else counts >= _WHITE
    if image.size == (width, height):
        return counts
    ratio, wanted = image.size[0] / image.size[1], width / height
    if not 0.95 < ratio / wanted < 1.05:
        expected = f"a mask of its picture's shape, {width} x {height}"
        raise InputError(str(mask.path), expected, f"{image.size[0]} x {image.size[1]}")
    shrunk = Image.fromarray(counts.astype(np.uint8) * 255).resize((width, height), Image.Resampling.BOX)
    return np.asarray(shrunk) == 255


def _marked(image: object) -> np.ndarray:
    """(height, width) uint8: the brightest channel of each pixel."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    if image.mode.startswith("I"):
        return (np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)
    if image.mode in ("L", "1"):
        return np.asarray(image.convert("L"))
    return np.asarray(image.convert("RGB")).max(-1)
