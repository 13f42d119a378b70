"""What `doctor` finds out about a machine. Every look outside goes through `Probes`, so that tests can fake one."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcublasLt.so", "libcudnn.so", "libnvrtc.so", "libnccl.so")


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def units(self) -> str:
        """The matrix units it has, which decide the precision that pays."""
        if self.capability < (7, 0):
            return "no tensor cores"
        kinds = ["fp16"] + (["bf16", "tf32"] if self.capability >= (8, 0) else [])
        return "tensor cores for " + ", ".join(kinds + (["fp8"] if self.capability >= (8, 9) else []))


@dataclass(frozen=True)
class Cache:
    """A folder that compiled kernels are kept in."""

    name: str
    path: str
    variable: str  # the environment variable that moves it
    problem: str | None  # why it cannot be written


@dataclass(frozen=True)
class Facts:
    """All that the diagnosis rests on."""

    python: tuple[int, int, int]
    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    cpu_bf16: bool
    torch: str | None
    torch_error: str | None
    torch_cuda: str | None  # the CUDA version torch was built with; None for a CPU build
    torch_hip: str | None
    gpu_error: str | None  # what torch said when it could not use a GPU
    gpus: tuple[Gpu, ...]
    nvidia_present: bool
    driver_cuda: tuple[int, int] | None  # the newest CUDA the driver knows
    visible_devices: str | None
    foreign_cuda: tuple[str, ...]  # CUDA libraries that LD_LIBRARY_PATH puts before torch's own
    triton: str | None
    numba: str | None
    video: bool
    caches: tuple[Cache, ...]
    colmap: str | None = None  # what finds the poses of photos


def _run(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _driver_version() -> int | None:
    """What the driver's library answers: 12040 for CUDA 12.4."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            version = ctypes.c_int(0)
            ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
            return version.value or None
        except (OSError, AttributeError):
            continue
    return None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_torch() -> Any:
    return importlib.import_module("torch")


@dataclass(frozen=True)
class Probes:
    """How the outside is looked at."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    exists: Callable[[str], bool] = os.path.exists
    run: Callable[[list[str]], str | None] = _run
    driver_version: Callable[[], int | None] = _driver_version
    import_torch: Callable[[], Any] = _import_torch
    installed: Callable[[str], str | None] = _installed
    list_folder: Callable[[str], list[str]] = os.listdir


def _colmap(probes: Probes) -> str | None:
    said = probes.run(["colmap", "help"])
    if said:
        return said.strip().splitlines()[0].split(" -- ")[0]
    version = probes.installed("pycolmap")
    return None if version is None else f"pycolmap {version}"


def gather(probes: Probes | None = None) -> Facts:
    """Look at everything once."""
    probes = probes or Probes()
    torch, torch_error = None, None
    try:
        torch = probes.import_torch()
    except (ImportError, OSError) as error:
        torch_error = str(error)
    gpus, gpu_error = _gpus(torch)
    return Facts(
        python=(int(platform.python_version_tuple()[0]), int(platform.python_version_tuple()[1]), 0),
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory(),
        cpu_bf16=_cpu_bf16(),
        torch=None if torch is None else torch.__version__,
        torch_error=torch_error,
        torch_cuda=None if torch is None else torch.version.cuda,
        torch_hip=None if torch is None else torch.version.hip,
        gpu_error=gpu_error,
        gpus=gpus,
        nvidia_present=probes.exists("/dev/nvidia0") or bool(probes.run(["nvidia-smi", "-L"])),
        driver_cuda=_driver_cuda(probes.driver_version()),
        visible_devices=probes.environ.get("CUDA_VISIBLE_DEVICES"),
        foreign_cuda=_foreign_libraries(probes),
        triton=probes.installed("triton"),
        numba=probes.installed("numba"),
        video=probes.installed("imageio-ffmpeg") is not None,
        colmap=_colmap(probes),
        caches=_caches(probes.environ),
    )


def _driver_cuda(version: int | None) -> tuple[int, int] | None:
    return None if version is None else (version // 1000, version % 1000 // 10)


def _gpus(torch: Any) -> tuple[tuple[Gpu, ...], str | None]:
    if torch is None:
        return (), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        return (), " ".join(str(warning.message) for warning in caught) or None
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, (properties.major, properties.minor), properties.total_memory))
    return tuple(found), None


def _foreign_libraries(probes: Probes) -> tuple[str, ...]:
    found = []
    for folder in filter(None, probes.environ.get("LD_LIBRARY_PATH", "").split(":")):
        try:
            names = sorted(probes.list_folder(folder))
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if name.startswith(CUDA_LIBRARIES)]
    return tuple(found)


def _cpuinfo(*keys: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for line in lines for key, _, value in [line.partition(":")] if key.strip() in keys), "")


def _processor() -> str:
    return _cpuinfo("model name", "Model", "Hardware") or platform.processor() or platform.machine()


def _cpu_bf16() -> bool:
    features = set(_cpuinfo("flags", "Features").split())
    return bool(features & {"avx512_bf16", "amx_bf16", "bf16"})


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _caches(environ: Mapping[str, str]) -> tuple[Cache, ...]:
    package = Path(__file__).resolve().parents[1] / "ops" / "cpu" / "__pycache__"
    numba = environ.get("NUMBA_CACHE_DIR") or str(package)
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    triton = environ.get("TRITON_CACHE_DIR") or str(home / ".triton" / "cache")
    # numba falls back to a folder of the user where it may not write beside the source
    fallback = home / ".cache" / "numba"
    problem = writing_problem(Path(numba))
    if problem is not None and "NUMBA_CACHE_DIR" not in environ and writing_problem(fallback) is None:
        numba, problem = str(fallback), None
    return (
        Cache("numba", numba, "NUMBA_CACHE_DIR", problem),
        Cache("triton", triton, "TRITON_CACHE_DIR", writing_problem(Path(triton))),
    )


def writing_problem(folder: Path) -> str | None:
    """Why a file could not be made in `folder` (or where it would be made); None when it could."""
    nearest = folder
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror or str(error)
