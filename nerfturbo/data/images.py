"""Images of any size in one uint8 pool, in memory or in a file (`pool_file.py`): decoded in parallel, straight into
place, never held twice. Pillow reads the files, HEIC through pillow-heif where it is installed. And their masks.

Masks say which pixels count: the others are neither trained on nor scored. The first file found for an image wins:

- `mask_path` of a frame in transforms.json (nerfstudio): black pixels do not count;
- `dynamic_mask_NAME.png` beside the image NAME (instant-ngp): pixels that are not black do not count;
- `masks/`, `images_mask/` or `mask/` in the scene's folder, with the image's own path below its folder of images, and
  `.png` behind it or in place of its extension (COLMAP): black pixels do not count.

A pixel of a downscaled image counts only if all of the mask's pixels under it do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..files import replacing
from ..ops.pixels import WORD, PixelMask, unpack_words
from .options import DEFAULTS, LoadOptions
from .pool_file import MappedPool, check_memory, fits_memory, open_pool, pool_path, writing_pool

if TYPE_CHECKING:
    from PIL import Image

HEIF_ENDINGS = (".heic", ".heif", ".hif")
# What cameras write before they make an image of it: most are TIFF files, of which Pillow would show the thumbnail.
RAW_ENDINGS = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".gpr", ".iiq", ".kdc", ".mos", ".mrw", ".nef"),
    *(".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)
_READABLE = "a picture that can be read here"
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "TIFF", "BMP", "AVIF", "HEIF")  # others run programs: EPS Ghostscript
CONVERT_RAW = "convert them to JPEG, in the highest quality, at full size"
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_AVIF_BRANDS = {b"avif", b"avis"}
_LARGE = 178_956_970  # pixels: Pillow's limit, because a small hostile file can claim any size
_LARGEST = 1 << 30  # of any image: 3 GiB of colours
_PIXELS_PER_BYTE = 32  # at most, of a file above Pillow's limit: photographs have 2 to 20
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_lock = threading.Lock()  # Pillow's limit and its list of formats belong to the whole process


def open_image(path: Path) -> Image.Image:
    """An image with its header read; it is decoded when it is used. Where that fails, the error says why."""
    from PIL import Image, UnidentifiedImageError

    if path.suffix.lower() in RAW_ENDINGS and path.is_file():
        raise InputError(str(path), _READABLE, "a camera's raw file", CONVERT_RAW)
    kind, heif = _kind(path), importlib.util.find_spec("pillow_heif") is not None
    if heif and (path.suffix.lower() in HEIF_ENDINGS or kind == "HEIC"):  # phones also name them .jpg
        import pillow_heif  # type: ignore[import-not-found,unused-ignore]

        with _lock:
            pillow_heif.register_heif_opener()
    try:
        with _lock:  # only the header is read inside
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                image = Image.open(path)
            finally:
                Image.MAX_IMAGE_PIXELS = limit
    except FileNotFoundError:
        raise InputError(str(path), "an image file", "no such file") from None
    except UnidentifiedImageError as error:
        if kind is None:
            raise undecodable(path, error) from None
        hint = "pip install pillow-heif" if kind == "HEIC" else "pip install --upgrade pillow (11.3 or newer reads it)"
        hint = "the file is damaged" if heif and kind == "HEIC" else f"{hint}, or convert the photos to JPEG"
        raise InputError(str(path), _READABLE, f"a{'n' * (kind == 'AVIF')} {kind} file", hint) from None
    except Exception as error:  # decoders fail in as many ways as there are damaged files
        raise undecodable(path, error) from None
    if image.format not in _FORMATS:
        image.close()
        raise InputError(str(path), _READABLE, f"a file of {image.format}", "convert the photos to PNG or JPEG")
    pixels = image.width * image.height
    if pixels > _LARGE and pixels > min(_LARGEST, _PIXELS_PER_BYTE * path.stat().st_size):
        size = f"{image.width} x {image.height} pixels"
        image.close()
        hint = "the file is damaged, or not a photograph: shrink it by another program first"
        raise InputError(str(path), "a picture whose file is as large as its size asks for", size, hint)
    return image


def undecodable(path: Path, error: Exception) -> InputError:
    """What is said of a file that Pillow fails on."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(str(path), "an image that decodes", reason, "the file is damaged or not an image")


def _kind(path: Path) -> str | None:
    """HEIC or AVIF by the first bytes of a file, whatever its name; None for others."""
    start = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(32)
    if start[4:8] != b"ftyp":
        return None
    brands = {start[8:12], start[16:20], start[20:24], start[24:28]}
    return "AVIF" if brands & _AVIF_BRANDS else "HEIC" if brands & _HEIF_BRANDS else None


MASK_FOLDERS = ("masks", "images_mask", "mask")
_WHITE = 128  # of 255: masks are black and white, but for the noise of a JPEG


@dataclass(frozen=True)
class MaskFile:
    """A mask of one image; `marks_ignored`: what it marks does not count, as opposed to what it leaves black."""

    path: Path
    marks_ignored: bool = False


def find_mask(folder: Path, image: Path, listed: Path | None = None) -> MaskFile | None:
    """The mask of an image in a scene's folder, by the customs above; `listed` is the one its frame names."""
    if listed is not None:
        return MaskFile(listed)
    if (dynamic := image.with_name(f"dynamic_mask_{image.stem}.png")).is_file():
        return MaskFile(dynamic, marks_ignored=True)
    places = [folder / name for name in MASK_FOLDERS if (folder / name).is_dir()]
    if not places or not image.is_relative_to(folder):
        return None
    inside = image.relative_to(folder)
    names = (inside, inside.relative_to(*inside.parts[:1]) if len(inside.parts) > 1 else inside)
    besides = (place / name for place in places for name in names)
    paths = (path for one in besides for path in (one.with_name(f"{one.name}.png"), one.with_suffix(".png"), one))
    return next((MaskFile(path) for path in paths if path.is_file()), None)


def load_masks(masks: Sequence[MaskFile | None], sizes: Tensor) -> PixelMask | None:
    """Masks of images of `sizes` (n, 2), packed; None where no image has one."""
    if not any(masks):
        return None
    words = pack_flags(_flags(mask, width, height) for mask, (width, height) in zip(masks, sizes.tolist(), strict=True))
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
    return (f"masks for {count} of {len(masks)} images: {share:.1%} of all pixels are not used",)


def pack_flags(parts: Iterable[np.ndarray]) -> Tensor:
    """Flags of one image after the other as int64 words, holding one image at a time."""
    packed, rest = [], np.empty(0, bool)
    for part in parts:
        rest = np.concatenate([rest, part.reshape(-1)])
        whole = rest.shape[0] // WORD * WORD
        packed.append(np.packbits(rest[:whole], bitorder="little"))
        rest = rest[whole:].copy()
    packed.append(np.packbits(np.pad(rest, (0, -rest.shape[0] % WORD)), bitorder="little"))
    return torch.from_numpy(np.concatenate(packed).view("<i8").astype(np.int64))


def _flags(mask: MaskFile | None, width: int, height: int) -> np.ndarray:
    if mask is None:
        return np.ones(width * height, bool)
    from PIL import Image

    image = open_upright(mask.path)
    marked = np.asarray(_grey_bytes(image).convert("RGB")).max(-1)  # the brightest channel of each pixel
    counts = marked == 0 if mask.marks_ignored else marked >= _WHITE
    if image.size == (width, height):
        return counts
    if not 0.95 < image.size[0] / image.size[1] / (width / height) < 1.05:
        got = f"{image.size[0]} x {image.size[1]}"
        raise InputError(str(mask.path), f"a mask of its picture's shape, {width} x {height}", got)
    shrunk = Image.fromarray(counts.astype(np.uint8) * 255).resize((width, height), Image.Resampling.BOX)
    return np.asarray(shrunk) == 255


_ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
_EXIF_ORIENTATION = 0x0112
_TRANSPOSING_ORIENTATIONS = (5, 6, 7, 8)
_FEW = 9  # images whose borders are looked at
OBJECT_BORDER = 0.9  # share of a flat border from which on there is nothing but an object
_QUARTER_TURNS = {3: 2, 6: 1, 8: 3}
_ONE_COLOUR = 4  # of 255: one colour, but for the noise of a JPEG; a plain wall varies more
_TRANSPARENT_SHARE = 0.005  # of its pixels, in an image of an object on nothing
_DECODED_BYTES = 11  # per pixel of a file while it is read: Pillow's image, a converted one, and its bytes
_DECODING_SHARE = 0.15  # of the pool: what all threads together may hold besides, but
_DECODING_BYTES = 96 << 20  # this much in any case


@dataclass(frozen=True)
class ImagePool:
    """Pictures one after the other, each row by row. Picture i owns pixels offsets[i]:offsets[i + 1]. Colours are sRGB
    as in the file; a fourth channel is straight alpha. Pixels outside `mask` are neither trained on nor scored."""

    pixels: Tensor  # (total_pixels, 3 or 4) uint8
    offsets: Tensor  # (n + 1,) int64
    sizes: Tensor  # (n, 2) int64, width and height
    mask: PixelMask | None = None  # None: every pixel counts
    file: MappedPool | None = None  # where the pixels lie, if not in memory

    def __post_init__(self) -> None:
        if self.pixels.dim() != 2 or self.pixels.shape[1] not in (3, 4) or self.pixels.dtype != torch.uint8:
            got = f"{tuple(self.pixels.shape)} {self.pixels.dtype}"
            raise InputError("pixels", "shape (total_pixels, 3 or 4) of uint8", got)
        n = self.sizes.shape[0]
        if tuple(self.sizes.shape) != (n, 2) or tuple(self.offsets.shape) != (n + 1,):
            got = f"{tuple(self.sizes.shape)} and {tuple(self.offsets.shape)}"
            raise InputError("sizes and offsets", "shapes (n, 2) and (n + 1,)", got)

    @classmethod
    def from_images(cls, images: Sequence[Tensor] | Tensor) -> ImagePool:
        """From images (H, W, C), uint8 or floats in [0, 1], of equal channels; (n, H, W, C) uint8 is not copied."""
        if not isinstance(images, Tensor) or images.is_floating_point():
            images = [to_bytes(image, f"images[{index}]") for index, image in enumerate(images)]
        sizes = torch.tensor([[image.shape[1], image.shape[0]] for image in images], dtype=torch.int64).reshape(-1, 2)
        if isinstance(images, Tensor):
            return cls(images.reshape(-1, images.shape[-1]), _offsets(sizes), sizes)
        return cls(torch.cat([image.reshape(-1, image.shape[-1]) for image in images]), _offsets(sizes), sizes)

    def __len__(self) -> int:
        return self.sizes.shape[0]

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def n_pixels(self) -> int:
        return self.pixels.shape[0]

    def image_bytes(self, index: int) -> Tensor:
        """(H, W, C) uint8, a view of the pool."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        start, stop = self.offsets[index : index + 2].tolist()
        width, height = self.sizes[index].tolist()
        if self.file is not None:
            self.file.touch((stop - start) * self.channels)
        return self.pixels[start:stop].view(height, width, self.channels)

    def image_mask(self, index: int) -> Tensor | None:
        """(H, W) bool: which pixels of an image count; None where all do."""
        if self.mask is None:
            return None
        start, stop = self.offsets[index : index + 2].tolist()
        width, height = self.sizes[index].tolist()
        return unpack_words(self.mask.words, start, stop).view(height, width)

    def gather(self, indices: Tensor) -> Tensor:
        """(n, C) uint8: the pixels at `indices` (n,), wherever they lie."""
        return torch.index_select(self.pixels, 0, indices) if self.file is None else self.file.gather(indices)

    def image(self, index: int, device: torch.device | str | None = None) -> Tensor:
        """(H, W, C) float32 in [0, 1], on the pool's device unless another is given: bytes travel, not floats."""
        return self.image_bytes(index).to(device or self.device).float() / 255.0

    def select(self, indices: Sequence[int]) -> ImagePool:
        """A pool of its own with some of the images, in the order given: this copies them."""
        sizes = self.sizes[torch.as_tensor(list(indices), dtype=torch.int64, device=self.device)]
        parts = [self.image_bytes(index).reshape(-1, self.channels) for index in indices]
        pixels, mask = torch.cat(parts) if parts else self.pixels[:0], None
        if self.mask is not None:
            flags = [self.image_mask(index) for index in indices]
            words = pack_flags(flag.cpu().numpy() for flag in flags if flag is not None)
            mask = PixelMask.of_words(words.to(self.device))
        return ImagePool(pixels, _offsets(sizes), sizes, mask)

    def to(self, device: torch.device | str) -> ImagePool:
        if self.file is not None and torch.device(device).type != "cpu":
            pixels = torch.empty_like(self.pixels, device=device)
            for index, (start, stop) in enumerate(itertools.pairwise(self.offsets.tolist())):
                pixels[start:stop].copy_(self.image_bytes(index).view(-1, self.channels))
        else:
            pixels = self.pixels.to(device)
        mask = None if self.mask is None else self.mask.to(device)
        file = self.file if pixels is self.pixels else None
        return ImagePool(pixels, self.offsets.to(device), self.sizes.to(device), mask, file)


def composite_over(rgba: Tensor, background: Tensor | float) -> Tensor:
    """Straight RGBA (..., 4) over a background that broadcasts to (..., 3); RGB (..., 3) is returned as it is.

    >>> composite_over(torch.tensor([1.0, 0.0, 0.0, 0.25]), 1.0)
    tensor([1.0000, 0.7500, 0.7500])
    """
    if rgba.shape[-1] == 3:
        return rgba
    refuse(rgba.shape[-1] != 4, "rgba", "3 or 4 channels in the last dimension", tuple(rgba.shape))
    rgb, alpha = rgba[..., :3], rgba[..., 3:]
    return rgb * alpha + background * (1.0 - alpha)


def decode_image(path: str | Path, downscale: int = 1) -> Tensor:
    """One image as (H, W, 3 or 4) uint8: upright by its EXIF tag, each pixel the mean of downscale^2 of the file's;
    with alpha, of premultiplied colours, so that what is invisible does not bleed into edges."""
    image = open_upright(Path(path))
    return torch.from_numpy(_to_array(image, downscale, _has_alpha(image)).copy())


def image_size(path: str | Path, *, upright: bool = True) -> tuple[int, int]:
    """Width and height of an image as `decode_image` gives it, from its header alone; else as it is stored."""
    return _probe(Path(path)).size(upright)


class Backdrop(NamedTuple):
    """What stands around the thing that images show."""

    transparent: bool = False  # they can be seen through; an alpha channel alone does not say so
    flat: float = -1.0  # share of their border that is of one colour, the same in all, or masked; -1: they show nothing

    @classmethod
    def of(cls, paths: Sequence[Path], masks: Sequence[MaskFile | None]) -> Backdrop:
        """Of a few of the images of a capture, in small."""
        found = []
        for index in sorted({step * len(paths) // _FEW for step in range(_FEW)}):
            with contextlib.suppress(Exception):  # said where the image is loaded
                found.append(_small(paths[index], masks[index]))
        if not found:
            return cls()
        sides = [side for image in found for side in (image[:2], image[-2:], image[:, :2], image[:, -2:])]
        border = np.concatenate([side.reshape(-1, 4)[:, :3] for side in sides])
        colour = np.nan_to_num(np.nanmedian(border, axis=0)) if not np.isnan(border).all() else np.zeros(3)
        other = [float((np.abs(image[..., :3] - colour).max(-1) > _ONE_COLOUR).mean()) for image in found]
        flat = 1.0 - float((np.abs(border - colour).max(-1) > _ONE_COLOUR).mean())  # what is masked is no other colour
        transparent = all(float((image[..., 3] < 128).mean()) > _TRANSPARENT_SHARE for image in found)
        return cls(transparent, flat if min(other) > _TRANSPARENT_SHARE else -1.0)


def _small(path: Path, mask: MaskFile | None) -> np.ndarray:
    """(h, w, 4) floats up to 255, as stored, of about 128 pixels a side; what is masked is not a number."""
    with open_image(path) as image:
        image.draft("RGB", (256, 256))
        small = _to_array(image, max(1, min(image.size) // 128), alpha=True).astype(np.float32)
    if mask is not None:
        grey = open_upright(mask.path, turn=False).convert("L").resize(small.shape[1::-1])
        small[(np.asarray(grey) >= _WHITE) == mask.marks_ignored, :3] = np.nan
    return small


def stored_turns(path: Path, shape: Sequence[int]) -> int:
    """Quarter turns clockwise that EXIF asks for, of an image that stays as stored: that is its camera's shape."""
    with contextlib.suppress(InputError):  # said where the image is loaded
        probe = _probe(path)
        return _QUARTER_TURNS.get(probe.orientation, 0) if same_shape(probe.stored, shape) else 0
    return 0


def load_images(
    paths: Sequence[Path],
    options: LoadOptions = DEFAULTS,
    *,
    masks: Sequence[MaskFile | None] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> ImagePool:
    """Decode files in parallel into one pool, of four channels if any has alpha, turned upright by their EXIF tags.
    COLMAP does not turn them: where cameras say `shapes`, images whose stored rows and columns fit stay as stored."""
    refuse(not paths, "paths", "at least one image", "none")
    with ThreadPoolExecutor(max_workers=_THREADS) as threads:
        probes = list(threads.map(_probe, paths))
    upright = [shapes is None or not same_shape(probe.stored, shapes[i]) for i, probe in enumerate(probes)]
    full = [probe.size(turn) for probe, turn in zip(probes, upright, strict=True)]
    sizes = torch.tensor([_downscaled(size, options.downscale) for size in full], dtype=torch.int64)
    channels = 4 if any(probe.has_alpha for probe in probes) else 3
    mask = None if masks is None else load_masks(masks, sizes)
    offsets = _offsets(sizes)
    n_bytes = int(offsets[-1]) * channels
    largest = max(width * height for width, height in full) * _DECODED_BYTES
    workers = int(max(_DECODING_BYTES, _DECODING_SHARE * n_bytes) // largest)  # few where images are large
    expected = sizes.tolist()  # not in threads: torch costs memory in each

    def decode(index: int) -> np.ndarray:
        (width, height), image = expected[index], open_upright(paths[index], turn=upright[index])
        array = _to_array(image, options.downscale, channels == 4)
        if array.shape[:2] != (height, width):
            got, hint = f"{array.shape[1]} x {array.shape[0]}", "the file is damaged"
            raise InputError(str(paths[index]), f"the {width} x {height} pixels its header says", got, hint)
        return array

    def store_all(store: Callable[[int, np.ndarray], object]) -> None:
        threads = ThreadPoolExecutor(max_workers=max(1, min(_THREADS, workers)))
        try:
            stored = threads.map(lambda index: store(index, decode(index)), range(len(paths)))
            for done, _ in enumerate(stored, start=1):
                if options.on_progress is not None:
                    options.on_progress(done, len(paths))
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C or a broken file nobody waits for the rest

    if options.cache == "memory" or (options.cache == "auto" and fits_memory(n_bytes)):
        check_memory("images", n_bytes, "load them smaller with `downscale`, or from a file with `cache=disk`")
        pool = ImagePool(torch.empty((int(offsets[-1]), channels), dtype=torch.uint8), offsets, sizes, mask)
        store_all(lambda index, array: np.copyto(pool.image_bytes(index).numpy(), array))
        return pool
    path = pool_path(paths, (options.downscale, channels, *(() if all(upright) else map(int, upright))))
    file = open_pool(path, n_bytes, channels)  # of an earlier run, where nothing has changed
    if file is None:
        with writing_pool(path, n_bytes) as write:
            firsts = (offsets * channels).tolist()
            store_all(lambda index, array: write(firsts[index], array))
        file = MappedPool(path, n_bytes, channels)
    return ImagePool(file.pixels, offsets, sizes, mask, file)


def save_image(path: Path, image: Tensor) -> None:
    """Write (H, W, 3 or 4), uint8 or floats in [0, 1], in the format of the path's extension, whole or not at all."""
    from PIL import Image

    with replacing(path) as temporary:
        Image.fromarray(to_bytes(image).cpu().numpy()).save(temporary)


def to_bytes(image: Tensor, name: str | None = None) -> Tensor:
    """Floats in [0, 1] as uint8, rounded; uint8 as they are. With a `name`, what is not finite is refused by it."""
    if name is not None and image.is_floating_point() and not bool(torch.isfinite(image).all()):
        raise InputError(name, "pixels that are finite", "NaN or infinity")
    return (image.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8) if image.is_floating_point() else image


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)])


def _downscaled(size: tuple[int, int], divisor: int) -> tuple[int, int]:
    # The same rounding as Cameras.scaled, so that cameras and images agree on every size.
    factor = 1.0 / divisor
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def open_upright(path: Path, *, turn: bool = True) -> Image.Image:
    """A decoded image, turned as its EXIF tag says."""
    from PIL import ImageOps

    with open_image(path) as image:
        try:
            image.load()
            if turn:
                ImageOps.exif_transpose(image, in_place=True)
            return image
        except Exception as error:  # decoders fail in as many ways as there are damaged files
            raise undecodable(path, error) from None


@dataclass(frozen=True)
class _Probe:
    """What the header of an image says."""

    stored: tuple[int, int]  # width, height
    orientation: int  # EXIF's
    has_alpha: bool

    def size(self, upright: bool) -> tuple[int, int]:
        width, height = self.stored
        return (height, width) if upright and self.orientation in _TRANSPOSING_ORIENTATIONS else (width, height)


def _probe(path: Path) -> _Probe:
    from PIL import Image

    with open_image(path) as image:
        try:
            orientation = Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1)  # PNG's own would decode the image
        except Exception as error:
            raise undecodable(path, error) from None
        return _Probe(image.size, orientation, _has_alpha(image))


def same_shape(size: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two sizes have the same ratio, up to the rounding of smaller copies.

    >>> same_shape((4032, 3024), (505, 379)), same_shape((4032, 3024), (3024, 4032))
    (True, False)
    """
    return abs(math.log(size[0] * other[1] / (size[1] * other[0]))) <= 0.02 + 1.0 / min(*size, *other)


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def _grey_bytes(image: Image.Image) -> Image.Image:
    """16-bit grey, and floats up to 1, as 8 bits: Pillow's own conversion would clip at 255 instead of scaling."""
    from PIL import Image

    if image.mode == "F":
        values = torch.from_numpy(np.array(image))
        scaled = to_bytes(values, str(getattr(image, "filename", "image")))
        return Image.fromarray(scaled.numpy()) if values.max() <= 1.0 else image
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))


def _to_array(image: Image.Image, downscale: int, alpha: bool) -> np.ndarray:
    from PIL import Image

    refuse(downscale < 1, "downscale", "an integer >= 1", downscale)
    mode = "RGBA" if alpha else "RGB"
    image = image if image.mode == mode else _grey_bytes(image).convert(mode)
    if downscale > 1:  # Pillow premultiplies RGBA for the mean and divides it out again
        whole = image.width % downscale == 0 and image.height % downscale == 0  # then the exact mean, rounded once
        size = _downscaled(image.size, downscale)
        image = image.reduce(downscale) if whole else image.resize(size, Image.Resampling.BOX)
    return np.asarray(image)
