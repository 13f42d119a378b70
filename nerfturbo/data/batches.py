"""Random pixels of a scene as rays and colours, drawn on the device of training.

Images that the GPU cannot hold stay in host memory, pinned, and its kernels read the drawn pixels through the bus
(`map_pixels`). Those of a file are fetched (`HostPixels`): which pixels a step draws depends on (seed, step) alone, so
a thread reads the next step's colours ahead of time. A recorded step finds them in a buffer on the device.
"""

import contextlib
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..ops import pixels as ops
from ..types import Rays
from .cameras import PIXEL_RADIUS
from .images import ImagePool
from .lenses import all_valid, make_lens_table, pixel_centers, pixel_parts
from .scene import Scene


class _Registered:
    """Host memory that GPUs can read, as long as a tensor made of this lives."""

    def __init__(self, pixels: Tensor, runtime: Any) -> None:
        self._pixels, self._runtime, self._own = pixels, runtime, False
        if not pixels.is_pinned():
            if code := int(runtime.cudaHostRegister(pixels.data_ptr(), pixels.nbytes, 0)):
                raise RuntimeError(f"cudaHostRegister: error {code}")
            self._own = True
        facts = {"shape": tuple(pixels.shape), "typestr": "|u1", "data": (pixels.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = facts

    def __del__(self) -> None:
        if self._own:
            self._runtime.cudaHostUnregister(self._pixels.data_ptr())


_REGISTERED = weakref.WeakValueDictionary[tuple[int, int], _Registered]()  # by address and size


def map_pixels(pixels: Tensor, device: torch.device) -> Tensor | None:
    """The same memory as a tensor of the device, not copied; None where a GPU cannot be made to read it."""
    if device.type != "cuda":
        return pixels if device.type == "cpu" else None
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        place = (pixels.data_ptr(), pixels.nbytes)
        held = _REGISTERED[place] = _REGISTERED.get(place) or _Registered(pixels, torch.cuda.cudart())
        seen = torch.as_tensor(held, device=device)
        return seen if seen.data_ptr() == pixels.data_ptr() else None
    with contextlib.suppress(RuntimeError):  # the next operation would report the failure once more
        torch.zeros(1, device=device)
    return None


SPARE = 1.25  # more rays than the last step had are fetched ahead, where their number adapts


@dataclass(frozen=True)
class HostPixels:
    """A pool in host memory and who is drawn from it."""

    images: ImagePool
    mask: ops.PixelMask | None
    seed: int

    def fetch(self, step: int, n_rays: int, first: int = 0) -> Tensor:
        """(n_rays, channels) uint8: the colours of a step's pixels, by the same draws as on the device."""
        options = {"mask": self.mask, "seed": self.seed, "step": step, "first": first}
        return self.images.gather(ops.choose_pixels(self.images.offsets, n_rays, **options))


class Prefetcher:
    """`get(step, n)` returns the colours of n rays from `first` on, and has a thread fetch the step after it."""

    def __init__(self, pixels: HostPixels, *, first: int = 0, spare: float = SPARE, pinned: bool = False) -> None:
        self._pixels, self._first, self._spare, self._pinned = pixels, first, spare, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nerfturbo-prefetch")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def get(self, step: int, n_rays: int) -> Tensor:
        """(n_rays, channels) uint8 on the host."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            colours = ahead[1].result()[:n_rays]
            if (found := colours.shape[0]) < n_rays:  # the batch has grown by more than was spared
                colours = torch.cat([colours, self._pixels.fetch(step, n_rays - found, self._first + found)])
        else:
            colours = self._fetch(step, n_rays)
        self._ahead = (step + 1, self._thread.submit(self._fetch, step + 1, int(n_rays * self._spare)))
        return colours

    def _fetch(self, step: int, n_rays: int) -> Tensor:
        colours = self._pixels.fetch(step, n_rays, self._first)
        return colours.pin_memory() if self._pinned else colours  # such memory is reused when its copy is over


PixelPlace = Literal["auto", "device", "host"]
Device = torch.device | str
DEVICE_SHARE = 0.5  # of a device's free memory: the largest pool that `auto` moves there


@dataclass(frozen=True)
class PixelBatch:
    """Rays and what the pictures show along them; four channels where the pictures have alpha (straight)."""

    rays: Rays
    rgba: Tensor  # (n_rays, 3 or 4) float32 in [0, 1]
    pending: tuple[torch.cuda.Event, Tensor] | None = None  # colours on the bus, and the pixels asked for

    def arrived(self) -> "PixelBatch":
        """The same with its colours: the device waits for them, not the host."""
        if self.pending is None:
            return self
        torch.cuda.current_stream(self.rgba.device).wait_event(self.pending[0])
        return replace(self, pending=None)


class PixelSampler:
    """Draws pixels uniformly over all pictures of a scene, whatever their sizes; masked ones never. What is drawn
    depends on (seed, step, index of the ray) alone: ranks, resumed runs and other devices see the same pixels. The
    scene moves to the device once, here. Pictures that it cannot hold (or with `pixels="host"`) are read from host
    memory; of those in a file a thread fetches the colours of the next step while this one runs. Rays pass through the
    pixels' centres; with `radii` they carry the `pixel_radii` of their pixels. Pinhole cameras draw by one fused op;
    other lenses by a table where one fits (`lenses.py`), else by Newton's method."""

    def __init__(
        self, scene: Scene, device: Device = "cpu", seed: int = 0, *, pixels: PixelPlace = "auto", radii: bool = False
    ) -> None:
        self.device, self.seed = torch.device(device), seed
        self.on_host, self.note = place_pixels(scene, self.device, pixels)
        mapped = map_pixels(scene.images.pixels, self.device) if self.on_host and scene.images.file is None else None
        fetched = self.on_host and mapped is None
        mask, seen = drawable_mask(scene, self.device), scene
        if mapped is not None:
            seen = replace(scene, images=replace(scene.images, pixels=mapped))
        self.scene = replace(scene, cameras=scene.cameras.to(device)) if fetched else seen.to(device)
        self._mask = None if mask is None else mask.to(self.device)
        images, cameras = self.scene.images, self.scene.cameras
        self._offsets, self._widths = images.offsets.to(device), images.sizes[:, 0].contiguous().to(device)
        self._pool, self._widening = None, None
        bus = mapped is not None and self.device.type == "cuda"
        self._bus = torch.cuda.Stream(self.device) if bus else None
        if cameras.model == "pinhole" and not fetched:
            intrinsics = torch.cat([cameras.focal, cameras.center], dim=-1)
            if radii:  # of a pixel's cone: its dot product with the ray's direction
                self._widening = cameras.forward * (PIXEL_RADIUS / cameras.focal.prod(-1, keepdim=True).sqrt())
            pixels_here = images.pixels[:, :0] if bus else images.pixels
            self._pool = ops.PixelPool(pixels_here, self._offsets, self._widths, cameras.camera_to_world, intrinsics)
        self._table = make_lens_table(cameras, self._offsets)
        self._host = HostPixels(scene.images, mask, seed) if fetched else None
        self._prefetcher = None if self._host is None else Prefetcher(self._host)
        self._feeds: dict[tuple[int, int], tuple[Prefetcher, Tensor]] = {}  # by first ray and number of rays

    def draw(self, step: int | Tensor, n_rays: int, *, first: int = 0, late: bool = False) -> PixelBatch:
        """Pixels for rays `first` to `first + n_rays` of this step's batch; never waits for the device. With `late`,
        colours of host memory may still be on their way: call `arrived` before they are used."""
        chosen, options = None, {"seed": self.seed, "step": step, "first": first}
        if self._mask is not None or self._pool is None or self._bus is not None:
            chosen = ops.choose_pixels(self._offsets, n_rays, mask=self._mask, **options)
        if self._pool is None:
            assert chosen is not None
            batch = self._look_up(chosen, step, n_rays, first)
        else:
            drawn = ops.draw_pixels(self._pool, n_rays, indices=chosen, **options)
            cameras, image = self.scene.cameras, drawn.image_indices
            times = None if cameras.times is None else cameras.times[image]
            radii = None if self._widening is None else (self._widening[image] * drawn.directions).sum(-1)
            rays = Rays(drawn.origins, drawn.directions, times, image, radii)
            batch = PixelBatch(rays if cameras.ndc is None else cameras.ndc.bend_rays(rays), drawn.rgba)
        if self._bus is not None:
            assert chosen is not None
            batch = self._read(self._bus, batch, chosen)
            batch = batch if late else batch.arrived()
        return batch

    def _read(self, bus: torch.cuda.Stream, batch: PixelBatch, indices: Tensor) -> PixelBatch:
        """The colours of host memory, read on a stream of its own: they are not needed before the samples are placed.
        It waits for all that came before, so that it may write where colours of an earlier step were."""
        bus.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(bus):
            rgba = ops.read_pixels(self.scene.images.pixels, indices)
            return replace(batch, rgba=rgba, pending=(bus.record_event(), indices))

    def feed(self, step: int, shares: Sequence[tuple[int, int]]) -> None:
        """Before a step whose number only the device knows: bring its colours, where they are fetched.
        `shares` are the first ray and the number of rays of each batch that the step draws."""
        if self._host is None:
            return
        pinned = self.device.type == "cuda"
        self._feeds = self._feeds if set(self._feeds) == set(shares) else {}
        for first, count in shares:
            if (first, count) not in self._feeds:
                buffer = torch.zeros(count, self._host.images.channels, dtype=torch.uint8, device=self.device)
                self._feeds[first, count] = Prefetcher(self._host, first=first, spare=1.0, pinned=pinned), buffer
            ahead, buffer = self._feeds[first, count]
            buffer.copy_(ahead.get(step, count), non_blocking=pinned)

    def _fed(self, first: int, n_rays: int) -> Tensor:
        """(n_rays, channels) uint8 on the device: what `feed` has brought for these rays."""
        for (start, count), (_, buffer) in self._feeds.items():
            if start <= first and first + n_rays <= start + count:
                return buffer[first - start : first - start + n_rays]
        raise InputError("first, n_rays", f"rays among {list(self._feeds)}", f"{first}, {n_rays}")

    def _look_up(self, chosen: Tensor, step: int | Tensor, n_rays: int, first: int) -> PixelBatch:
        image, x, y = pixel_centers(self._offsets, self._widths, chosen)
        cameras = self.scene.cameras
        if self._table is None:
            rays = cameras.rays(image, x, y)
        else:
            rays = cameras.rays_along(image, self._table.look_up(image, chosen))
        if self._host is None or self._prefetcher is None:
            read = chosen if self._bus is None else chosen[:0]
            return PixelBatch(rays, ops.read_pixels(self.scene.images.pixels, read))
        if isinstance(step, Tensor) and self._feeds:
            colours = self._fed(first, n_rays)
        else:
            colours = self._host.fetch(int(step), n_rays, first) if first else self._prefetcher.get(int(step), n_rays)
        return PixelBatch(rays, colours.to(self.device, non_blocking=True).float() / 255.0)


def place_pixels(scene: Scene, device: torch.device, wanted: PixelPlace = "auto") -> tuple[bool, str]:
    """Whether the pictures stay in host memory while training runs on the device, and the words that say why."""
    refuse(wanted not in get_args(PixelPlace), "pixels", "one of " + ", ".join(get_args(PixelPlace)), repr(wanted))
    size = scene.images.pixels.nbytes / 2**30
    file = scene.images.file
    where = "host memory, read from there" if file is None else f"a file ({file.path}), fetched ahead step by step"
    if wanted == "host" or (device.type == "cpu" and file is not None):
        return True, f"{size:.2f} GiB of pixels stay in {where}"
    if wanted == "device" or device.type != "cuda" or scene.images.device.type == "cuda":
        return False, f"{size:.2f} GiB of pixels, where training runs"
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if size <= DEVICE_SHARE * free:
        return False, f"{size:.2f} GiB of pixels move to the GPU, which has {free:.1f} GiB free"
    why = f"they would fill more than half of the GPU's free {free:.1f} GiB"
    return True, f"{size:.2f} GiB of pixels stay in {where}: {why}"


def drawable_mask(scene: Scene, device: Device = "cpu") -> ops.PixelMask | None:
    """The pixels that count and that a ray leads to, which the device finds out; None where that is all of them."""
    mask, cameras = scene.images.mask, scene.cameras
    if all_valid(cameras):
        return mask
    cameras = cameras.to(device)
    words = torch.cat([ops.pack_words(cameras.is_valid(*part)) for part in pixel_parts(cameras)])
    words = words.to(scene.images.offsets.device)
    try:
        return ops.PixelMask.of_words(words if mask is None else words & mask.words)
    except InputError:
        expected = "coefficients that leave pixels to train on"
        raise InputError("distortion", expected, "a lens that folds over at once") from None
