"""nerfacc 0.5.3's interface over nerfturbo: the same names, arguments, shapes and meaning, on CPU and CUDA tensors.

    import nerfturbo.compat.nerfacc as nerfacc

docs/migration/nerfacc.md lists what differs. `nerfturbo.compat.nerfacc_packed` has the interface of nerfacc 0.2.
"""

from .. import _install
from .cameras import opencv_lens_undistortion, opencv_lens_undistortion_fisheye
from .data_specs import RayIntervals, RaySamples
from .estimators.occ_grid import OccGridEstimator
from .estimators.prop_net import PropNetEstimator
from .estimators.vdb import VDBEstimator, traverse_vdbs
from .grid import ray_aabb_intersect, traverse_grids
from .losses import distortion
from .pack import pack_info
from .pdf import importance_sampling, searchsorted
from .scan import exclusive_prod, exclusive_sum, inclusive_prod, inclusive_sum
from .version import __version__
from .volrend import (
    accumulate_along_rays,
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


def install() -> None:
    """Make `import nerfacc` resolve to this package; call it before the first such import."""
    _install.install("nerfacc")
