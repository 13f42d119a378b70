"""nerfacc 0.5.3's interface over nerfturbo: the same names, arguments, shapes and meaning, on CPU and CUDA tensors.
docs/migration/nerfacc.md lists what differs. `nerfacc_packed` and `nerfacc_indexed` have those of 0.2 and 0.3."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from .. import install as _install
from ._rays import RayIntervals, RaySamples, pack_info
from .cameras import opencv_lens_undistortion, opencv_lens_undistortion_fisheye
from .estimators.base import N3TreeEstimator, VDBEstimator, traverse_vdbs
from .estimators.occ_grid import OccGridEstimator
from .estimators.prop_net import PropNetEstimator
from .grid import ray_aabb_intersect, traverse_grids
from .pdf import importance_sampling, searchsorted
from .scan import exclusive_prod, exclusive_sum, inclusive_prod, inclusive_sum
from .volrend import (
    accumulate_along_rays,
    distortion,
    render_transmittance_from_alpha,
    render_transmittance_from_density,
    render_visibility_from_alpha,
    render_visibility_from_density,
    render_weight_from_alpha,
    render_weight_from_density,
    rendering,
)

__all__ = [
    "OccGridEstimator",
    "PropNetEstimator",
    "RayIntervals",
    "RaySamples",
    "VDBEstimator",
    "__version__",
    "accumulate_along_rays",
    "distortion",
    "exclusive_prod",
    "exclusive_sum",
    "importance_sampling",
    "inclusive_prod",
    "inclusive_sum",
    "install",
    "opencv_lens_undistortion",
    "opencv_lens_undistortion_fisheye",
    "pack_info",
    "ray_aabb_intersect",
    "render_transmittance_from_alpha",
    "render_transmittance_from_density",
    "render_visibility_from_alpha",
    "render_visibility_from_density",
    "render_weight_from_alpha",
    "render_weight_from_density",
    "rendering",
    "searchsorted",
    "traverse_grids",
    "traverse_vdbs",
]

__version__ = "0.5.3"  # the release whose interface this package has


def install() -> None:
    """Make `import nerfacc` resolve to this package; call it before the first such import."""
    _install("nerfacc")


def _cuda_getattr(name: str) -> Any:
    """nerfacc's compiled entry points. There are none here: kernels are chosen by `nerfturbo.ops`."""
    hint = f"call the public one of that name, nerfacc.{name}"
    raise AttributeError(name if name[:2] == "__" else f"nerfacc.cuda.{name} is a compiled function; {hint}")


def _add_module(name: str, **members: Any) -> None:
    """Make a module of nerfacc importable that is too small for a file of its own here."""
    module = module_from_spec(ModuleSpec(f"{__name__}.{name}", None))
    vars(module).update(members)
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


_add_module("cuda", is_cub_available=lambda: True, __getattr__=_cuda_getattr)
_add_module("data_specs", RayIntervals=RayIntervals, RaySamples=RaySamples)
_add_module("estimators.n3tree", N3TreeEstimator=N3TreeEstimator)
_add_module("estimators.vdb", VDBEstimator=VDBEstimator, traverse_vdbs=traverse_vdbs, fVDB_ENABLED=False)
_add_module("losses", distortion=distortion)
_add_module("pack", pack_info=pack_info)
_add_module("version", __version__=__version__)
