"""From facts to findings: what works, what does not, why, and what to do. Pure functions of `Facts`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .doctor_facts import Facts

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_TRITON_CAPABILITY = (7, 0)

Level = Literal["ok", "info", "warning", "broken"]


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
    return [
        *_python(facts),
        *_torch(facts),
        *_gpu(facts),
        *_triton(facts),
        *_cpu(facts),
        *_caches(facts),
        *_extras(facts),
    ]


def _python(facts: Facts) -> list[Finding]:
    version = ".".join(map(str, facts.python[:2]))
    if facts.python[:2] < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return [Finding("broken", "python", version, "python too old", f"install Python {wanted} or newer")]
    return [Finding("ok", "python", f"{version} on {facts.system}")]


def _torch(facts: Facts) -> list[Finding]:
    if facts.torch is None:
        if facts.foreign_cuda:
            return [_foreign(facts, "broken", f"does not import: {facts.torch_error}", "torch")]
        return [Finding("broken", "torch", facts.torch_error or "not installed", "torch missing", "pip install torch")]
    build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else f"ROCm {facts.torch_hip}" if facts.torch_hip else "CPU"
    detail = f"{facts.torch}, {build} build"
    if parse_version(facts.torch) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return [Finding("broken", "torch", detail, "torch too old", f"pip install 'torch>={wanted}'")]
    return [Finding("ok", "torch", detail)]


def _gpu(facts: Facts) -> list[Finding]:
    if facts.gpus:
        found = [
            Finding(
                "ok",
                f"gpu {index}",
                f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.units}, "
                f"{gpu.memory_bytes / 2**30:.0f} GiB",
            )
            for index, gpu in enumerate(facts.gpus)
        ]
        if facts.driver_cuda is not None:
            found.append(Finding("ok", "driver", f"knows CUDA {_dotted(facts.driver_cuda)}"))
        if facts.foreign_cuda:
            found.append(_foreign(facts, "warning", "torch may load them instead of its own", "gpu libraries"))
        return found
    if facts.torch is None:
        return []
    if not facts.nvidia_present:
        return [Finding("info", "gpu", "none; everything runs on the CPU")]
    return [_why_no_gpu(facts)]


def _why_no_gpu(facts: Facts) -> Finding:
    """There is an NVIDIA GPU and torch cannot use it: the first cause that explains it."""
    said = f" (torch says: {' '.join(facts.gpu_error.split())[:160]})" if facts.gpu_error else ""
    if facts.torch_cuda is None:
        fix = "pip uninstall torch, then pip install torch without constraints-cpu.txt: that takes the CUDA build"
        return Finding(
            "warning", "gpu", "an NVIDIA GPU is there, but this torch is built for CPUs only", "cpu-only torch", fix
        )
    if facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        fix = "unset CUDA_VISIBLE_DEVICES"
        return Finding("warning", "gpu", "hidden by CUDA_VISIBLE_DEVICES", "gpu hidden", fix)
    if facts.driver_cuda is None:
        fix = "install the NVIDIA driver; in a container, start it with GPU access (docker run --gpus all)"
        return Finding("warning", "gpu", f"the driver's library libcuda.so.1 is missing{said}", "no driver", fix)
    built_for = parse_version(facts.torch_cuda)
    if built_for > facts.driver_cuda:
        known = _dotted(facts.driver_cuda)
        detail = f"torch is built for CUDA {facts.torch_cuda}, the driver knows only up to {known}{said}"
        fix = f"update the NVIDIA driver, or install a torch built for CUDA {known} or older"
        return Finding("warning", "gpu", detail, "driver too old", fix)
    if facts.foreign_cuda:
        return _foreign(facts, "warning", f"torch cannot use the GPU{said}", "gpu")
    fix = "run nvidia-smi: when it fails too, reinstall the driver or restart; otherwise reinstall torch"
    return Finding("warning", "gpu", f"torch cannot use the GPU{said}", "gpu unusable", fix)


def _foreign(facts: Facts, level: Level, consequence: str, what: str) -> Finding:
    shown = ", ".join(facts.foreign_cuda[:3]) + (", ..." if len(facts.foreign_cuda) > 3 else "")
    detail = f"LD_LIBRARY_PATH brings other CUDA libraries ({shown}): {consequence}"
    return Finding(level, what, detail, "foreign cuda libraries", "unset LD_LIBRARY_PATH; torch brings its own")


def _triton(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        detail = f"{facts.triton}, without a GPU to run on" if facts.triton else "not installed; only a GPU needs it"
        return [Finding("info", "triton", detail)]
    if facts.triton is None:
        fix = "pip install triton (Linux), or triton-windows"
        return [Finding("broken", "triton", "not installed, and the GPU's kernels need it", "triton missing", fix)]
    old = [gpu for gpu in facts.gpus if gpu.capability < MIN_TRITON_CAPABILITY]
    if old:
        detail = f"{facts.triton} has no code for {old[0].name} (compute capability below 7.0)"
        fix = "use --backend reference on it, or --device cpu"
        return [Finding("warning", "triton", detail, "gpu too old", fix)]
    return [Finding("ok", "triton", facts.triton)]


def _cpu(facts: Facts) -> list[Finding]:
    memory = "" if facts.memory_bytes is None else f", {facts.memory_bytes / 2**30:.0f} GiB"
    units = "bf16 units" if facts.cpu_bf16 else "no bf16 units: fp32 is fastest"
    found = [Finding("ok", "cpu", f"{facts.processor}, {facts.cores} cores{memory}, {units}")]
    if facts.numba is None:
        detail = "not installed: CPU training runs plain torch, many times slower"
        return [*found, Finding("warning", "numba", detail, "numba missing", "pip install numba")]
    return [*found, Finding("ok", "numba", facts.numba)]


def _caches(facts: Facts) -> list[Finding]:
    found = []
    for cache in facts.caches:
        name = f"{cache.name} cache"
        if cache.problem is None:
            found.append(Finding("ok", name, cache.path))
        else:
            detail = f"{cache.path} cannot be written ({cache.problem}): kernels are compiled again at every start"
            fix = f"point {cache.variable} at a folder that can be written"
            found.append(Finding("warning", name, detail, "cache not writable", fix))
    return found


def _extras(facts: Facts) -> list[Finding]:
    video = Finding("ok", "video", "GIF and MP4")
    if not facts.video:
        video = Finding("info", "video", "GIF only; for MP4: pip install imageio-ffmpeg")
    if facts.colmap is not None:
        return [video, Finding("ok", "photos", f"poses by {facts.colmap}")]
    missing = "only with poses; to find them: apt install colmap, or pip install pycolmap"
    return [video, Finding("info", "photos", missing)]


def parse_version(text: str) -> tuple[int, int]:
    """
    >>> parse_version("2.13.0+cpu"), parse_version("13.0")
    ((2, 13), (13, 0))
    """
    numbers = re.findall(r"\d+", text)
    return (int(numbers[0]) if numbers else 0, int(numbers[1]) if len(numbers) > 1 else 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
