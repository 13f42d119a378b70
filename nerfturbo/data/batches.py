"""Random pixels of a scene as rays and colours, drawn on the device of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.pixels import (
    ChosenPixels,
    PixelGuide,
    PixelMask,
    PixelPool,
    choose_pixels,
    draw_pixels,
    drawn_offsets,
    pack_words,
)
from ..types import Rays
from .cameras import PIXEL_RADIUS
from .error_map import ErrorMap
from .lens_table import all_valid, make_lens_table, pixel_centers, pixels_at_once
from .prefetch import DeviceFeed, HostPixels, Prefetcher
from .scene import Scene

PixelPlace = Literal["auto", "device", "host"]
DEVICE_SHARE = 0.5  # of a device's free memory: the largest pool that `auto` moves there


@dataclass(frozen=True)
class PixelBatch:
    """Rays and what the pictures show along them; four channels where the pictures have alpha (straight).

    `weights` say how much each ray counts in a mean, where hard pixels are drawn more often; None: all the same.
    """

    rays: Rays
    rgba: Tensor  # (n_rays, 3 or 4) float32 in [0, 1]
    weights: Tensor | None = None  # (n_rays,) float32
    tiles: Tensor | None = None  # (n_rays,) int64, of the error map
    error_map: ErrorMap | None = None  # that drew them
    rays_per_pixel: int = 1  # rays first // so many, ... of the whole step's batch share a pixel
    first: int = 0  # index of the first ray in it

    def add_errors(self, errors: Tensor, n_rays: Tensor | None = None) -> None:
        """Tell the map that guided the draws how wrong the rays were (n,); only the first `n_rays` of them count."""
        if self.error_map is None or self.tiles is None or self.weights is None:
            return
        counted = self.weights > 0.0
        if n_rays is not None:
            counted = counted & (torch.arange(errors.shape[0], device=errors.device) < n_rays)
        self.error_map.add(self.tiles, errors, counted)


class PixelSampler:
    """Draws pixels uniformly over all pictures of a scene, whatever their sizes; masked ones never.

    What is drawn depends on (seed, step, index of the ray) alone: ranks that draw rays `first`, `first + 1`, ... of one
    batch, resumed runs and other devices see the same pixels.

    The scene moves to the device once, here. Where the device cannot hold the pictures (or with `pixels="host"`), and
    where they lie in a file, they stay behind and a thread fetches the colours of the next step while this one runs.
    With `guided`, pixels are drawn more often where the error has been large, and batches have weights; their
    `add_errors` says how large it was. Rays pass through the pixels' centres, or with a `spread` through a random point
    of a square that many pixels wide around them. With `radii`, rays carry the `pixel_radii` of their pixels.

    Pinhole cameras draw by one fused op. Other lenses have no formula from pixel to ray: directions come from a table
    where one fits (`lens_table.py`), else by Newton's method, and pixels that no ray leads to are never drawn.
    """

    def __init__(
        self,
        scene: Scene,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        pixels: PixelPlace = "auto",
        guided: bool = False,
        spread: float = 0.0,
        radii: bool = False,
        rays_per_pixel: int = 1,
    ) -> None:
        self.device, self.seed, self.spread, self.rays_per_pixel = torch.device(device), seed, spread, rays_per_pixel
        self.on_host, self.note = place_pixels(scene, self.device, pixels)
        side = math.isqrt(rays_per_pixel)
        self._strata = side if side**2 == rays_per_pixel else 1  # 4 rays: one in each quarter of the pixel
        if rays_per_pixel > 1 and self.on_host:
            raise InputError("rays_per_pixel", "1 for pictures that stay in host memory", str(rays_per_pixel))
        if guided and self.on_host and self.device.type != "cpu":
            hint = "draw uniformly, or load the pictures smaller with `downscale`"
            raise InputError("guided", "pictures that the device holds", "pictures in host memory", hint)
        self.scene = replace(scene, cameras=scene.cameras.to(device)) if self.on_host else scene.to(device)
        mask = drawable_mask(scene, self.device)
        self._mask = None if mask is None else mask.to(self.device)
        images, cameras = self.scene.images, self.scene.cameras
        self._offsets, self._widths = images.offsets.to(device), images.sizes[:, 0].contiguous().to(device)
        self.error_map = ErrorMap(images, self._mask) if guided else None
        self._pool, self._widening = None, None
        if cameras.model == "pinhole" and not self.on_host:
            intrinsics = torch.cat([cameras.focal, cameras.center], dim=-1)
            if radii:  # of a pixel's cone: its dot product with the ray's direction
                self._widening = cameras.forward * (PIXEL_RADIUS / cameras.focal.prod(-1, keepdim=True).sqrt())
            self._pool = PixelPool(images.pixels, self._offsets, self._widths, cameras.camera_to_world, intrinsics)
        self._table = make_lens_table(cameras, self._offsets)
        self._host = HostPixels(scene.images, mask, seed) if self.on_host else None
        self._prefetcher = None if self._host is None else Prefetcher(self._host)
        self._feed: DeviceFeed | None = None

    def draw(self, step: int | Tensor, n_rays: int, *, first: int = 0) -> PixelBatch:
        """Pixels for rays `first` to `first + n_rays` of this step's batch; never waits for the device."""
        chosen, guide = None, None if self.error_map is None else self.error_map.guide
        if self._mask is not None or guide is not None or self._pool is None or self.rays_per_pixel > 1:
            chosen = self._choose(guide, step, n_rays, first)
        if self._pool is None:
            assert chosen is not None
            batch = self._look_up(chosen, step, n_rays, first)
            batch = replace(batch, rays_per_pixel=self.rays_per_pixel, first=first)
        else:
            indices = None if chosen is None else chosen.indices
            drawn = draw_pixels(
                self._pool,
                n_rays,
                seed=self.seed,
                step=step,
                first=first,
                indices=indices,
                spread=self.spread,
                strata=self._strata,
            )
            cameras = self.scene.cameras
            times = None if cameras.times is None else cameras.times[drawn.image_indices]
            radii = None
            if self._widening is not None:
                radii = (self._widening[drawn.image_indices] * drawn.directions).sum(-1)
            rays = Rays(drawn.origins, drawn.directions, times, drawn.image_indices, radii)
            rays = rays if cameras.ndc is None else cameras.ndc.bend_rays(rays)
            batch = PixelBatch(rays, drawn.rgba, rays_per_pixel=self.rays_per_pixel, first=first)
        if chosen is None or guide is None:
            return batch
        return replace(batch, weights=chosen.weights, tiles=chosen.tiles, error_map=self.error_map)

    def _choose(self, guide: PixelGuide | None, step: int | Tensor, n_rays: int, first: int) -> ChosenPixels:
        """The pixels of these rays: each several times in a row, where several rays share one."""
        size = self.rays_per_pixel
        begin, end = first // size, -(-(first + n_rays) // size)
        options = {"seed": self.seed, "step": step, "first": begin}
        chosen = choose_pixels(self._offsets, self._widths, end - begin, mask=self._mask, guide=guide, **options)
        if size == 1:
            return chosen
        rows = torch.div(torch.arange(n_rays, device=self.device) + first % size, size, rounding_mode="floor")
        weights, tiles = (None if value is None else value[rows] for value in (chosen.weights, chosen.tiles))
        return ChosenPixels(chosen.indices[rows], weights, tiles)

    def feed(self, step: int, shares: Sequence[tuple[int, int]]) -> None:
        """Before a step whose number only the device knows: bring its colours, where the pictures are on the host.

        `shares` are the first ray and the number of rays of each batch that the step draws.
        """
        if self._host is not None:
            if self._feed is None or self._feed.shares != tuple(shares):
                self._feed = DeviceFeed(self._host, tuple(shares), self.device)
            self._feed.load(step)

    def refresh(self) -> None:
        """Draw by the errors added so far from now on."""
        if self.error_map is not None:
            self.error_map.refresh()

    def state_tensors(self) -> list[Tensor]:
        """What changes from step to step, in place."""
        return [] if self.error_map is None else self.error_map.state_tensors()

    def _look_up(self, chosen: ChosenPixels, step: int | Tensor, n_rays: int, first: int) -> PixelBatch:
        image, x, y = pixel_centers(self._offsets, self._widths, chosen.indices)
        cameras = self.scene.cameras
        if self.spread:
            options = {"seed": self.seed, "step": step, "first": first, "device": self.device}
            offset = drawn_offsets(n_rays, self.spread, strata=self._strata, **options)
            rays = cameras.rays(image, x + offset[:, 0], y + offset[:, 1])
        elif self._table is None:
            rays = cameras.rays(image, x, y)
        else:
            rays = cameras.rays_along(image, self._table.look_up(image, chosen.indices))
        if self._host is None or self._prefetcher is None:
            return PixelBatch(rays, self.scene.images.pixels[chosen.indices].float() / 255.0)
        if self.error_map is not None:  # only the device knows the draws, and it is this one
            colours = self._host.images.gather(chosen.indices)
        elif isinstance(step, Tensor) and self._feed is not None:
            colours = self._feed.colours(first, n_rays)
        elif first:
            colours = self._host.fetch(int(step), n_rays, first)
        else:
            colours = self._prefetcher.get(int(step), n_rays)
        return PixelBatch(rays, colours.to(self.device, non_blocking=True).float() / 255.0)


def place_pixels(scene: Scene, device: torch.device, wanted: PixelPlace = "auto") -> tuple[bool, str]:
    """Whether the pictures stay in host memory while training runs on the device, and the words that say why."""
    if wanted not in get_args(PixelPlace):
        raise InputError("pixels", "one of " + ", ".join(get_args(PixelPlace)), repr(wanted))
    size = scene.images.pixels.nbytes / 2**30
    if wanted == "host" or (device.type == "cpu" and scene.images.file is not None):
        where = "host memory" if scene.images.file is None else f"a file ({scene.images.file.path})"
        return True, f"{size:.2f} GiB of pixels stay in {where}; each step's colours are fetched ahead"
    if wanted == "device" or device.type != "cuda" or scene.images.device.type == "cuda":
        return False, f"{size:.2f} GiB of pixels, where training runs"
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    if size <= DEVICE_SHARE * free:
        return False, f"{size:.2f} GiB of pixels move to the GPU, which has {free:.1f} GiB free"
    why = f"they would fill more than half of the GPU's free {free:.1f} GiB"
    return True, f"{size:.2f} GiB of pixels stay in host memory ({why}); each step's colours are fetched ahead"


def drawable_mask(scene: Scene, device: torch.device | str = "cpu") -> PixelMask | None:
    """The pixels that count and that a ray leads to, which the device finds out; None where that is all of them."""
    mask, cameras, n_pixels = scene.images.mask, scene.cameras, scene.images.n_pixels
    if all_valid(cameras):
        return mask
    cameras, offsets = cameras.to(device), scene.images.offsets.to(device)
    widths, parts, step = scene.images.sizes[:, 0].contiguous().to(device), [], pixels_at_once(cameras.device)
    for start in range(0, n_pixels, step):
        pixel = torch.arange(start, min(start + step, n_pixels), device=cameras.device)
        parts.append(pack_words(cameras.is_valid(*pixel_centers(offsets, widths, pixel))))
    words = torch.cat(parts).to(scene.images.offsets.device)
    try:
        return PixelMask.of_words(words if mask is None else words & mask.words)
    except InputError:
        expected = "coefficients that leave pixels to train on"
        raise InputError("distortion", expected, "a lens that folds over at once") from None
