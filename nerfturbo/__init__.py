"""nerfturbo: train and render neural radiance fields fast, with nothing to compile.

Names are loaded when first used, so that importing the package costs little more than importing torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "types": ["Aabb", "PackedSamples", "Rays", "RenderOutput"],
    "errors": ["InputError", "NerfturboError"],
    "config": ["Config"],
    "presets": ["preset"],
    "ops": ["use_backend"],
    "data.cameras": ["Cameras"],
    "data.scene": ["Scene", "load_scene"],
    "sampling": ["OccupancyGrid", "ProposalEstimator", "RaySpan", "contract", "uncontract"],
    "fields": ["HashDensity", "InstantNGP", "VanillaNeRF"],
    "rendering": ["color_loss", "distortion_loss", "ray_marching", "render_image", "render_rays", "volume_rendering"],
    "training": ["MixedPrecision", "Trainer", "load_model"],
    "viewer.notebook": ["show"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_RENAMED: dict[str, str] = {}  # old name: new name; kept for two minor versions
_MOVED = ("HashLayout", "composite", "fused_mlp", "hash_encode", "importance_sample", "march")
_MOVED += ("packed_cumsum", "packed_sum", "ray_aabb", "spherical_harmonics")  # to nerfturbo.ops in 0.1; kept until 0.3

__all__ = ["Aabb", "Cameras", "Config", "HashDensity", "InputError", "InstantNGP", "MixedPrecision", "NerfturboError"]
__all__ += ["OccupancyGrid", "PackedSamples", "ProposalEstimator", "RaySpan", "Rays", "RenderOutput", "Scene"]
__all__ += ["Trainer", "VanillaNeRF", "color_loss", "contract", "distortion_loss", "load_model", "load_scene", "ops"]
__all__ += ["preset", "ray_marching", "render_image", "render_rays", "show", "uncontract", "use_backend"]
__all__ += ["volume_rendering"]

if TYPE_CHECKING:
    from . import ops
    from .config import Config
    from .data.cameras import Cameras
    from .data.scene import Scene, load_scene
    from .errors import InputError, NerfturboError
    from .fields import HashDensity, InstantNGP, VanillaNeRF
    from .ops import use_backend
    from .presets import preset
    from .rendering import color_loss, distortion_loss, ray_marching, render_image, render_rays, volume_rendering
    from .sampling import OccupancyGrid, ProposalEstimator, RaySpan, contract, uncontract
    from .training import MixedPrecision, Trainer, load_model
    from .types import Aabb, PackedSamples, Rays, RenderOutput
    from .viewer.notebook import show


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"nerfturbo.{name} is now nerfturbo.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name == "ops":
        return importlib.import_module(".ops", __name__)
    if name in _MOVED:
        warnings.warn(f"nerfturbo.{name} is now nerfturbo.ops.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(".ops", __name__), name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nerfturbo' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
