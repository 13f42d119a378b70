"""`nerfturbo doctor`: what works on this machine, and what to do about what does not. `gather` looks at the machine
through `Probes`, which can be faked; `diagnose` is a pure function of what it found."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..files import read_entry
from .flags import parse

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_TRITON_CAPABILITY = (7, 0)
CUDA_LIBRARIES = ("libcudart.so", "libcublas.so", "libcublasLt.so", "libcudnn.so", "libnvrtc.so", "libnccl.so")

Level = Literal["ok", "info", "warning", "broken"]
SHOWN_AS = {"ok": ("ok", "green"), "info": ("-", "dim"), "warning": ("warning", "yellow"), "broken": ("BROKEN", "red")}


@dataclass(frozen=True)
class DoctorArgs:
    """Check this machine: torch, GPU, driver, Triton, numba, each backend against the reference, cache folders. Exit
    code 0 when it can train, 1 when something it needs is broken."""

    json: bool = False  # Print everything as one JSON object.


def main(argv: Sequence[str]) -> int:
    args = parse(DoctorArgs, argv, "doctor")
    facts, findings = examine()
    usable = all(finding.level != "broken" for finding in findings)
    if args.json:
        print(json.dumps({"usable": usable, "findings": [asdict(item) for item in findings], "facts": asdict(facts)}))
    else:
        _show(findings, usable=usable)
    return 0 if usable else 1


def _show(findings: list[Finding], *, usable: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, style = SHOWN_AS[finding.level]
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(mark, style=style), Text(finding.what), detail)
    console.print(table)
    console.print("This machine can train." if usable else "Something nerfturbo needs is broken: see above.")


def examine(probes: Probes | None = None) -> tuple[Facts, list[Finding]]:
    """Facts and findings, self-tests included where torch works."""
    facts = gather(probes)
    findings = diagnose(facts)
    if not any(finding.level == "broken" and finding.what in ("python", "torch") for finding in findings):
        findings += _self_tests()
    return facts, findings


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
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return None


def _driver_version() -> int | None:
    """What the driver's library answers: 12040 for CUDA 12.4."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with contextlib.suppress(OSError, AttributeError):
            version = ctypes.c_int(0)
            ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
            return version.value or None
    return None


def _installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


@dataclass(frozen=True)
class Probes:
    """How the outside is looked at."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    exists: Callable[[str], bool] = os.path.exists
    run: Callable[[list[str]], str | None] = _run
    driver_version: Callable[[], int | None] = _driver_version
    import_torch: Callable[[], Any] = lambda: importlib.import_module("torch")
    installed: Callable[[str], str | None] = _installed


def gather(probes: Probes | None = None) -> Facts:
    """Look at everything once."""
    probes = probes or Probes()
    torch, torch_error = None, None
    try:
        torch = probes.import_torch()
    except (ImportError, OSError) as error:
        torch_error = str(error)
    gpus, gpu_error = _gpus(torch)
    major, minor, _ = platform.python_version_tuple()
    driver = probes.driver_version()
    processor = read_entry("/proc/cpuinfo", "model name", "Model", "Hardware")
    flags = read_entry("/proc/cpuinfo", "flags", "Features")
    said, package = probes.run(["colmap", "help"]), probes.installed("pycolmap")
    colmap = said.strip().splitlines()[0].split(" -- ")[0] if said else package and f"pycolmap {package}"
    memory = None
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system tells
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Facts(
        python=(int(major), int(minor), 0),
        system=f"{platform.system()} {platform.machine()}",
        processor=processor or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory,
        cpu_bf16=not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint((flags or "").split()),
        torch=None if torch is None else torch.__version__,
        torch_error=torch_error,
        torch_cuda=None if torch is None else torch.version.cuda,
        torch_hip=None if torch is None else torch.version.hip,
        gpu_error=gpu_error,
        gpus=gpus,
        nvidia_present=probes.exists("/dev/nvidia0") or bool(probes.run(["nvidia-smi", "-L"])),
        driver_cuda=None if driver is None else (driver // 1000, driver % 1000 // 10),
        visible_devices=probes.environ.get("CUDA_VISIBLE_DEVICES"),
        foreign_cuda=_foreign_libraries(probes),
        triton=probes.installed("triton"),
        numba=probes.installed("numba"),
        video=probes.installed("imageio-ffmpeg") is not None,
        colmap=colmap,
        caches=_caches(probes.environ),
    )


def _gpus(torch: Any) -> tuple[tuple[Gpu, ...], str | None]:
    """What torch can use, or what it says about why it cannot."""
    if torch is None:
        return (), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        return (), " ".join(str(warning.message) for warning in caught) or None
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(gpu.name, (gpu.major, gpu.minor), gpu.total_memory) for gpu in found), None


def _foreign_libraries(probes: Probes) -> tuple[str, ...]:
    found = []
    for folder in filter(None, probes.environ.get("LD_LIBRARY_PATH", "").split(":")):
        with contextlib.suppress(OSError):
            found += [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.startswith(CUDA_LIBRARIES)]
    return tuple(found)


def _caches(environ: Mapping[str, str]) -> tuple[Cache, ...]:
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    numba = Path(environ.get("NUMBA_CACHE_DIR") or Path(__file__).resolve().parents[1] / "ops" / "_cpu" / "__pycache__")
    triton = Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    # numba falls back to a folder of the user where it may not write beside the source
    fallback, problem = home / ".cache" / "numba", writing_problem(numba)
    if problem is not None and "NUMBA_CACHE_DIR" not in environ and writing_problem(fallback) is None:
        numba, problem = fallback, None
    of_numba = Cache("numba", str(numba), "NUMBA_CACHE_DIR", problem)
    return of_numba, Cache("triton", str(triton), "TRITON_CACHE_DIR", writing_problem(triton))


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


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. `broken` means nothing runs; `warning` that something slower runs instead."""

    level: Level
    what: str
    detail: str
    cause: str = ""  # a short name that scripts can rely on
    fix: str = ""


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in reading order."""
    return [*_python(facts), *_gpu(facts), _triton(facts), *_cpu(facts), *_extras(facts)]


def _python(facts: Facts) -> Iterator[Finding]:
    """Python and torch."""
    version = _dotted(facts.python)
    if facts.python[:2] < MIN_PYTHON:
        yield Finding("broken", "python", version, "python too old", f"install Python {_dotted(MIN_PYTHON)} or newer")
    else:
        yield Finding("ok", "python", f"{version} on {facts.system}")
    if facts.torch is None and facts.foreign_cuda:
        yield _foreign(facts, "broken", f"does not import: {facts.torch_error}", "torch")
    elif facts.torch is None:
        yield Finding("broken", "torch", facts.torch_error or "not installed", "torch missing", "pip install torch")
    else:
        rocm = f"ROCm {facts.torch_hip}" if facts.torch_hip else "CPU"
        detail = f"{facts.torch}, {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else rocm} build"
        fix, old = f"pip install 'torch>={_dotted(MIN_TORCH)}'", parse_version(facts.torch) < MIN_TORCH
        yield Finding("broken", "torch", detail, "torch too old", fix) if old else Finding("ok", "torch", detail)


def _gpu(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        if facts.torch is not None:
            none = Finding("info", "gpu", "none; everything runs on the CPU")
            yield _why_no_gpu(facts) if facts.nvidia_present else none
        return
    for index, gpu in enumerate(facts.gpus):
        able = f"compute capability {_dotted(gpu.capability)}, {gpu.units}"
        yield Finding("ok", f"gpu {index}", f"{gpu.name}, {able}, {gpu.memory_bytes / 2**30:.0f} GiB")
    if facts.driver_cuda is not None:
        yield Finding("ok", "driver", f"knows CUDA {_dotted(facts.driver_cuda)}")
    if facts.foreign_cuda:
        yield _foreign(facts, "warning", "torch may load them instead of its own", "gpu libraries")


def _why_no_gpu(facts: Facts) -> Finding:
    """There is an NVIDIA GPU and torch cannot use it: the first cause that explains it."""
    said = f" (torch says: {' '.join(facts.gpu_error.split())[:160]})" if facts.gpu_error else ""
    if facts.torch_cuda is None:
        detail, cause = "an NVIDIA GPU is there, but this torch is built for CPUs only", "cpu-only torch"
        fix = "pip uninstall torch, then pip install torch without constraints-cpu.txt: that takes the CUDA build"
    elif facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        detail, cause = "hidden by CUDA_VISIBLE_DEVICES", "gpu hidden"
        fix = "unset CUDA_VISIBLE_DEVICES"
    elif facts.driver_cuda is None:
        detail, cause = f"the driver's library libcuda.so.1 is missing{said}", "no driver"
        fix = "install the NVIDIA driver; in a container, start it with GPU access (docker run --gpus all)"
    elif parse_version(facts.torch_cuda) > facts.driver_cuda:
        known, cause = _dotted(facts.driver_cuda), "driver too old"
        detail = f"torch is built for CUDA {facts.torch_cuda}, the driver knows only up to {known}{said}"
        fix = f"update the NVIDIA driver, or install a torch built for CUDA {known} or older"
    elif facts.foreign_cuda:
        return _foreign(facts, "warning", f"torch cannot use the GPU{said}", "gpu")
    else:
        detail, cause = f"torch cannot use the GPU{said}", "gpu unusable"
        fix = "run nvidia-smi: when it fails too, reinstall the driver or restart; otherwise reinstall torch"
    return Finding("warning", "gpu", detail, cause, fix)


def _foreign(facts: Facts, level: Level, consequence: str, what: str) -> Finding:
    shown = ", ".join(facts.foreign_cuda[:3]) + (", ..." if len(facts.foreign_cuda) > 3 else "")
    detail = f"LD_LIBRARY_PATH brings other CUDA libraries ({shown}): {consequence}"
    return Finding(level, what, detail, "foreign cuda libraries", "unset LD_LIBRARY_PATH; torch brings its own")


def _triton(facts: Facts) -> Finding:
    if not facts.gpus:
        detail = f"{facts.triton}, without a GPU to run on" if facts.triton else "not installed; only a GPU needs it"
        return Finding("info", "triton", detail)
    if facts.triton is None:
        fix = "pip install triton (Linux), or triton-windows"
        return Finding("broken", "triton", "not installed, and the GPU's kernels need it", "triton missing", fix)
    if old := [gpu.name for gpu in facts.gpus if gpu.capability < MIN_TRITON_CAPABILITY]:
        detail = f"{facts.triton} has no code for {old[0]} (compute capability below 7.0)"
        return Finding("warning", "triton", detail, "gpu too old", "use --backend reference on it, or --device cpu")
    return Finding("ok", "triton", facts.triton)


def _cpu(facts: Facts) -> Iterator[Finding]:
    memory = "" if facts.memory_bytes is None else f", {facts.memory_bytes / 2**30:.0f} GiB"
    units = "bf16 units" if facts.cpu_bf16 else "no bf16 units: fp32 is fastest"
    yield Finding("ok", "cpu", f"{facts.processor}, {facts.cores} cores{memory}, {units}")
    detail = "not installed: CPU training runs plain torch, many times slower"
    missing = Finding("warning", "numba", detail, "numba missing", "pip install numba")
    yield missing if facts.numba is None else Finding("ok", "numba", facts.numba)


def _extras(facts: Facts) -> Iterator[Finding]:
    """Cache folders, and what is optional."""
    for cache in facts.caches:
        what, fix = f"{cache.name} cache", f"point {cache.variable} at a folder that can be written"
        detail = f"{cache.path} cannot be written ({cache.problem}): kernels are compiled again at every start"
        broken = Finding("warning", what, detail, "cache not writable", fix)
        yield Finding("ok", what, cache.path) if cache.problem is None else broken
    no_video = Finding("info", "video", "GIF only; for MP4: pip install imageio-ffmpeg")
    yield Finding("ok", "video", "GIF and MP4") if facts.video else no_video
    no_poses = Finding("info", "photos", "only with poses; to find them: apt install colmap, or pip install pycolmap")
    yield no_poses if facts.colmap is None else Finding("ok", "photos", f"poses by {facts.colmap}")


def parse_version(text: str) -> tuple[int, int]:
    """
    >>> parse_version("2.13.0+cpu"), parse_version("13.0")
    ((2, 13), (13, 0))
    """
    major, minor = [int(number) for number in re.findall(r"\d+", text) + [0, 0]][:2]
    return major, minor


def _dotted(version: tuple[int, ...]) -> str:
    return f"{version[0]}.{version[1]}"


def _self_tests() -> Iterator[Finding]:
    """Values and gradients of a few ops under every backend that can run here, against the reference."""
    import torch

    from ..bench.gate import Draw, backends, basic_cases, gate
    from ..ops._dispatch import available

    gpu, cases = torch.cuda.is_available(), list(basic_cases(Draw(seed=0, small=16)))
    for device in map(torch.device, ("cpu", "cuda") if gpu else ("cpu",)):
        names = backends(device)
        if not gpu and available("triton") and os.environ.get("TRITON_INTERPRET") == "1":
            names.append("triton")
        for backend in names:
            verdicts = {case.op: " ".join(gate(case, backend, device).split())[:200] for case in cases}
            failed = [f"{op}: {verdict}" for op, verdict in verdicts.items() if verdict != "passed"]
            what, agrees = f"{backend} on {device}", "runs" if backend == "reference" else "agrees with the reference"
            fix = "pip install --force-reinstall nerfturbo, clear the caches above; until then --backend reference"
            broken = Finding("broken", what, "; ".join(failed), "self-test failed", fix)
            yield broken if failed else Finding("ok", what, f"{agrees} in {', '.join(verdicts)}")
