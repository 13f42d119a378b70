"""What a result depends on besides the code: machine, versions, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import torch

PACKAGES = ("nerfturbo", "torch", "triton", "numba", "numpy")


def versions() -> dict[str, str]:
    """Python and the packages that decide speed and results; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on: less than the machine has inside a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, system and, where it is used, the GPU."""
    found: dict[str, str | int] = {
        "processor": cpu_name(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def peak_memory_bytes() -> int | None:
    """The most memory this process held at once; None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


def peak_gpu_memory_bytes(device: torch.device) -> int | None:
    """The most GPU memory torch held at once; None without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
