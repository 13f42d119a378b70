"""Pixels in a memory-mapped file: for pools that memory does not hold, and for opening a scene again at once.

The file lies in the cache folder under a name made from the pictures' paths, sizes and dates, so that a changed picture
gives another file. Linux counts the mapped pages a process has touched as its memory, and maps up to megabytes around
each touch. So pixels are gathered in the order of their places, and what has been passed is given back: the pages stay
in the system's cache while there is room, and the process stays small.
"""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..files import cache_folder, read_entry, replacing

VERSION = 1
RESIDENT_BYTES = 256 << 20  # of a mapping, at most: a power of two
MEMORY_SHARE = 0.6  # of what is free: the largest pool that `auto` keeps in memory
DISK_SHARE = 0.25  # of the disk: all pool files together; the oldest go first


class MappedPool:
    """A complete pool file, mapped: (n_pixels, channels) uint8."""

    def __init__(self, path: Path, n_bytes: int, channels: int) -> None:
        with path.open("rb") as file:  # private pages: whoever writes to the tensor does not change the file
            self._map = mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_COPY)
        self.path, self.channels, self._touched = path, channels, 0
        self.pixels = torch.frombuffer(self._map, dtype=torch.uint8).view(-1, channels)

    def gather(self, indices: Tensor) -> Tensor:
        """(n, channels) uint8 at `indices` (n,), holding no more than RESIDENT_BYTES of the file in memory."""
        part = RESIDENT_BYTES // self.channels
        ordered, order = indices.sort()
        out = torch.empty((indices.shape[0], self.channels), dtype=torch.uint8)
        starts = torch.searchsorted(ordered, torch.arange(0, self.pixels.shape[0] + part, part)).tolist()
        for start, stop in itertools.pairwise(starts):
            if start < stop:
                out[order[start:stop]] = torch.index_select(self.pixels, 0, ordered[start:stop])
                self._release()
        return out

    def touch(self, n_bytes: int) -> None:
        """After reading a part in one piece: give pages back once many have been touched."""
        self._touched += n_bytes
        if self._touched > RESIDENT_BYTES // 2:
            self._release()

    def _release(self) -> None:
        self._touched = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def writing_pool(path: Path, n_bytes: int) -> Iterator[Callable[[int, np.ndarray], None]]:
    """A function that writes an array to its place (the first byte), from any number of threads. The file is there
    when the block has ended; when it fails, nothing is left behind."""
    lock = threading.Lock()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent, n_bytes)
        with replacing(path) as temporary, temporary.open("wb") as file:

            def write(first_byte: int, array: np.ndarray) -> None:
                with lock:
                    file.seek(first_byte)
                    file.write(np.ascontiguousarray(array).reshape(-1).data)

            yield write
            file.truncate(n_bytes)
    except OSError as error:
        hint = "set NERFTURBO_CACHE to a folder that can be written"
        got = error.strerror or str(error)
        raise InputError(str(path.parent), "a folder for the pool of pixels", got, hint) from None


def pool_path(images: Sequence[Path], settings: Sequence[int]) -> Path:
    """Where the pool of these images, read with these settings, belongs."""
    facts = [[str(path.resolve()), (found := path.stat()).st_size, found.st_mtime_ns] for path in images]
    key = hashlib.sha256(json.dumps([VERSION, list(settings), facts]).encode()).hexdigest()[:32]
    try:
        return cache_folder() / "pools" / f"{key}.u8"
    except RuntimeError:  # no home folder
        raise InputError("NERFTURBO_CACHE", "a folder for the pool", "neither it nor a home folder") from None


def open_pool(path: Path, n_bytes: int, channels: int) -> MappedPool | None:
    """The file of an earlier load, or None where there is none of the right size."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == n_bytes:
            os.utime(path)  # the least recently used files are removed first
            return MappedPool(path, n_bytes, channels)
    return None


def fits_memory(n_bytes: int) -> bool:
    """Whether a pool leaves enough of the free memory to everything else."""
    free = available_memory()
    return free is None or n_bytes <= MEMORY_SHARE * free


def available_memory() -> int | None:
    """Bytes that can still be used without swapping, by the system and by a container's limit; None: not known."""
    free = read_entry("/proc/meminfo", "MemAvailable")  # in kB
    found = [] if free is None else [1024 * int(free.split()[0])]
    with contextlib.suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        found.append(limit - used + int(facts["file"]))  # cached files make room when asked
    if not found and sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(found)) if found else None


def check_memory(what: str, n_bytes: int, hint: str, device: torch.device | None = None) -> None:
    """Refuse, before it begins, what needs more memory than a device has free; the machine's unless one is given."""
    free = available_memory()
    if device is not None and device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + idle
    if free is not None and n_bytes > free:
        raise InputError(what, f"what fits the {free / 1e6:.0f} MB of free memory", f"{n_bytes / 1e6:.0f} MB", hint)


def _make_room(folder: Path, n_bytes: int) -> None:
    """Remove the least recently used pools until the new one fits; refuse what the disk cannot hold."""
    disk = shutil.disk_usage(folder)
    old = sorted(folder.glob("*.u8"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in old)
    free = disk.free
    while old and (total + n_bytes > DISK_SHARE * disk.total or free < n_bytes + (1 << 28)):
        size = old[0].stat().st_size
        with contextlib.suppress(OSError):
            old[0].unlink()
            free += size
        total -= size
        old.pop(0)
    if free < n_bytes + (1 << 28):
        hint = "set NERFTURBO_CACHE to a folder on a larger disk, or load the images smaller with `downscale`"
        raise InputError(str(folder), f"{n_bytes / 2**30:.1f} GiB free for the pool", f"{free / 2**30:.1f} GiB", hint)
