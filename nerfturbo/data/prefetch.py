"""Colours of drawn pixels, fetched from host memory or disk while the device trains: for pools it cannot hold.

Which pixels a step draws depends on (seed, step) alone, so a thread can read the colours of the next step ahead of
time; only those travel, 3 or 4 bytes a ray. On a GPU two pinned buffers take turns: one is copied to the device while
the other is filled. The threads end with the object that owns them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.pixels import PixelMask, choose_pixels
from .images import ImagePool

SLOTS = 2
SPARE = 1.25  # more rays than the last step had are fetched ahead, because their number adapts


@dataclass(frozen=True)
class HostPixels:
    """A pool in host memory and who is drawn from it."""

    images: ImagePool
    mask: PixelMask | None
    seed: int

    def fetch(self, step: int, n_rays: int, first: int = 0) -> Tensor:
        """(n_rays, channels) uint8: the colours of a step's pixels, by the same draws as on the device."""
        images = self.images
        widths = images.sizes[:, 0].contiguous()
        chosen = choose_pixels(images.offsets, widths, n_rays, mask=self.mask, seed=self.seed, step=step, first=first)
        return images.gather(chosen.indices)


class Prefetcher:
    """`get(step, n)` returns what the pool's `fetch` would, and has a thread fetch the step after it."""

    def __init__(self, pixels: HostPixels) -> None:
        self._pixels = pixels
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nerfturbo-prefetch")
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self.hits = 0  # steps whose pixels were there, or on their way, when they were asked for

    def get(self, step: int, n_rays: int) -> Tensor:
        """(n_rays, channels) uint8 on the host."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            self.hits += 1
            colours = ahead[1].result()[:n_rays]
            if (found := colours.shape[0]) < n_rays:  # the batch has grown by more than was spared
                colours = torch.cat([colours, self._pixels.fetch(step, n_rays - found, found)])
        else:
            colours = self._pixels.fetch(step, n_rays)
        self._ahead = (step + 1, self._thread.submit(self._pixels.fetch, step + 1, int(n_rays * SPARE)))
        return colours


class DeviceFeed:
    """A buffer on the device that holds the colours of one step: what a recorded step reads. `load` renews it.

    `shares` are the first ray and the number of rays of each batch of a step. Copies are queued on the current stream,
    in line with the steps; a pinned buffer is filled again only when its copy is over.
    """

    def __init__(self, pixels: HostPixels, shares: tuple[tuple[int, int], ...], device: torch.device) -> None:
        self.shares = shares
        shape = (sum(count for _, count in shares), pixels.images.channels)
        self._buffer = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._slots = _Slots(pixels, shares, self._buffer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nerfturbo-prefetch")
        self._ahead: dict[int, Future[Tensor]] = {}

    def colours(self, first: int, n_rays: int) -> Tensor:
        """(n_rays, channels) uint8 on the device: the part of the buffer that holds these rays."""
        place = 0
        for start, count in self.shares:
            if start <= first and first + n_rays <= start + count:
                return self._buffer[place + first - start : place + first - start + n_rays]
            place += count
        raise InputError("first, n_rays", f"rays among {list(self.shares)}", f"{first}, {n_rays}")

    def load(self, step: int) -> None:
        """Queue the copy of this step's colours and have the next step's fetched meanwhile."""
        if step not in self._ahead:
            for future in self._ahead.values():
                future.cancel()
            self._ahead = {step: self._thread.submit(self._slots.fill, step)}
        self._buffer.copy_(self._ahead.pop(step).result(), non_blocking=True)
        self._slots.mark_copied(step, self._buffer.device)
        self._ahead[step + 1] = self._thread.submit(self._slots.fill, step + 1)


class _Slots:
    """Pinned buffers, each with the event after which it may be filled again."""

    def __init__(self, pixels: HostPixels, shares: tuple[tuple[int, int], ...], like: Tensor) -> None:
        pinned = like.device.type == "cuda"
        self._pixels, self._shares = pixels, shares
        self._buffers = [
            torch.zeros(like.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(SLOTS)
        ]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(SLOTS)]

    def fill(self, step: int) -> Tensor:
        buffer, event, place = self._buffers[step % SLOTS], self._copied[step % SLOTS], 0
        if event is not None:
            event.synchronize()
        for first, count in self._shares:
            buffer[place : place + count].copy_(self._pixels.fetch(step, count, first))
            place += count
        return buffer

    def mark_copied(self, step: int, device: torch.device) -> None:
        event = self._copied[step % SLOTS]
        if event is not None:
            event.record(torch.cuda.current_stream(device))
