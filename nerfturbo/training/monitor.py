"""What a GPU does while training: utilisation, memory and power from NVML, and a hint when it waits for work.

NVML comes with the driver; the package nvidia-ml-py speaks to it and is imported when a monitor is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections import deque
from typing import Any

import torch

LOG = logging.getLogger("nerfturbo")
EVERY_SECONDS = 1.0
STARVING_PERCENT = 60.0
STARVING_SAMPLES = 8  # readings in a row before the hint


class GpuMonitor:
    """Reads a GPU about once a second, when it is called; `hint` is said once, when the GPU starves."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last, self._values = 0.0, {}
        self._recent: deque[float] = deque(maxlen=STARVING_SAMPLES)
        self._hinted = False

    def __call__(self) -> dict[str, float]:
        """gpu_utilisation (percent), gpu_memory_bytes and gpu_power_watts; the last reading where it is fresh."""
        now = time.monotonic()
        if now - self._last < EVERY_SECONDS and self._values:
            return dict(self._values)
        self._last = now
        with contextlib.suppress(self._nvml.NVMLError):
            self._values["gpu_utilisation"] = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            self._recent.append(self._values["gpu_utilisation"])
            self._values["gpu_memory_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            self._values["gpu_power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0
        self._say_hint()
        return dict(self._values)

    def _say_hint(self) -> None:
        if self._hinted or len(self._recent) < STARVING_SAMPLES:
            return
        mean = sum(self._recent) / len(self._recent)
        if mean < STARVING_PERCENT:
            self._hinted = True
            LOG.warning(hint(mean))


def hint(utilisation: float) -> str:
    """What a GPU that waits for work is waiting for, most likely."""
    return (
        f"the GPU is busy {utilisation:.0f}% of the time: it waits for the host; larger batches "
        "(--train.batch-samples), --train.capture, pixels on the GPU (--pixels device) or fewer previews and saves "
        "help; `nerfturbo profile` shows where the time goes"
    )


def open_monitor(device: torch.device) -> GpuMonitor | None:
    """A monitor of an NVIDIA GPU; None on other devices, without nvidia-ml-py, or where the driver refuses."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        LOG.info("GPU utilisation and power are not shown: pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
        uuid = "GPU-" + str(torch.cuda.get_device_properties(device).uuid)
        return GpuMonitor(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        LOG.info("GPU utilisation and power are not shown: %s", error)
        return None
