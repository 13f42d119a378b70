"""metrics.json: scores, costs, and the machine they were measured on. docs/run_folder.md explains every name."""

import contextlib
import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from ..config import Config
from ..data.scene import BUILTIN_PREFIX, Scene
from ..files import read_entry
from .evaluate import Evaluation
from .metrics import blur_baseline_psnr, constant_baseline_psnr

TIME_INCLUDES = (
    "training steps and grid updates; not loading, kernel compilation, previews, checkpoints or evaluation, "
    "which total_seconds holds too"
)


def measure_baselines(scene: Scene, views: list[int], device: torch.device | str | None = None) -> dict[str, float]:
    """What a score is worth: PSNR on the same views of one constant colour, and of the truth blurred by 3 pixels.
    Computed on the scene's own device unless another is given."""
    chosen = scene if len(views) == len(scene) else scene.select(views)
    constant, blurred = constant_baseline_psnr(chosen, device), blur_baseline_psnr(chosen, device=device)
    return {"constant_psnr": constant, "blurred_psnr": blurred}


def protocol(config: Config, scene: Scene, n_views: int, *, divisor: int = 1) -> dict[str, Any]:
    """How the score was measured: all that can move it by more than the method does; `divisor` shrank the views."""
    sizes = {tuple(max(1, round(side / divisor)) for side in size) for size in scene.cameras.size.tolist()}
    low, high, divisor = min(sizes), max(sizes), divisor * config.data.downscale
    origin = f"the files' size over {divisor}, each pixel the mean of {divisor}^2" if divisor > 1 else "the files' own"
    origin = "rendered at this size" if config.data.source.startswith(BUILTIN_PREFIX) else origin
    return {
        "split": scene.split,
        "n_views": n_views,
        "views": "all" if n_views == len(scene) else f"{n_views} of {len(scene)}, evenly spaced",
        "background": "white" if scene.has_alpha else "as photographed",
        "training_background": config.train.background if scene.has_alpha else "as photographed",
        "color_space": "sRGB",
        "resolution": list(low) if low == high else [list(low), list(high)],
        "resolution_source": origin,
        "steps_per_diagonal": config.render.steps_per_diagonal * config.render.eval_refine,
        "rays_per_pixel": config.render.eval_rays**2,
        "rounding": "none: floating-point renders against the 8-bit truth",
        "mean": "of the PSNR of each view",
        "seeds": [config.train.seed],
        "time_includes": TIME_INCLUDES,
    }


def evaluation_metrics(
    found: Evaluation, config: Config, scene: Scene, baselines: dict[str, float], *, divisor: int = 1
) -> dict[str, Any]:
    """The part of metrics.json that `eval` renews."""
    scores = {"psnr": found.psnr, "ssim": found.ssim, "lpips": found.lpips, "baselines": baselines}
    measured = protocol(config, scene, len(found.views), divisor=divisor)
    return scores | {"protocol": measured, "per_view": [asdict(view) for view in found.views]}


def versions() -> dict[str, str]:
    """Python and the packages that decide speed and results; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in ("nerfturbo", "torch", "triton", "numba", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, system and, where it is used, the GPU."""
    name = read_entry("/proc/cpuinfo", "model name", "Model", "Hardware")
    # Cores this process may run on: less than the machine has inside a container or under taskset.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, str | int] = {
        "processor": name or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
    }
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """The most memory this process held at once, its own and the GPU's, in bytes; None where nobody tells."""
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"peak_memory_bytes": _peak_memory_bytes(), "peak_gpu_memory_bytes": on_gpu}


def _peak_memory_bytes() -> int | None:
    if (held := read_entry("/proc/self/status", "VmHWM")) is not None:
        return int(held.split()[0]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS
    return None
