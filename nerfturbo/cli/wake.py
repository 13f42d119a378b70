"""Wake the GPU while torch is imported: its driver takes a second or two to start, and needs nothing of Python's."""

from __future__ import annotations

import ctypes
import os
import threading


def wake_gpu(device: str | None) -> None:
    """Start the driver and the context of the first GPU in a thread, where it may be used and is there."""
    if device in (None, "auto", "cuda", "cuda:0") and os.path.exists("/dev/nvidiactl"):
        threading.Thread(target=_start, daemon=True).start()


def _start() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # The primary context: the one that torch uses later. What fails here fails again there, and is reported there.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
