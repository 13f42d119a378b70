"""nerfacc's interface over nerfturbo, on CPU and CUDA tensors: the names, arguments, shapes and meaning of 0.2 to 0.5.
Where versions differ, the arguments of a call say for which it was written: samples (n, 1) are those of 0.2 to 0.4,
samples (n,) are 0.5's, and an older order is known by what stands where. docs/migration/ lists what differs."""
# ruff: noqa: F403 - the modules' lists of names are this package's

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NoReturn

from .. import install as _install
from . import _rays, estimators, grid, pdf, volrend
from . import ray_marching as _marching
from ._rays import *
from .cameras import *
from .estimators import *
from .grid import *
from .pdf import *
from .ray_marching import *
from .scan import *
from .volrend import *

__version__ = "0.5.3"  # the newest release whose interface this package has
install = partial(_install, "nerfacc")
unpack_to_ray_indices = _rays.unpack_info  # its name in 0.2
volume_rendering = volrend.rendering  # as talks and tutorials call it


def _cuda_getattr(name: str) -> Any:
    """nerfacc's compiled entry points, which can be imported. There are none here: `nerfturbo.ops` chooses kernels."""
    message = f"nerfacc.cuda.{name} is a compiled function; call the public one, nerfacc.{name}"
    return _missing(name) if name[:2] == "__" else partial(_missing, message)


def _missing(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise AttributeError(message)


def _add_module(name: str, source: Any, *members: str) -> Any:
    """Make a module of nerfacc importable that is too small for a file of its own here."""
    module = module_from_spec(ModuleSpec(f"{__name__}.{name}", None))
    vars(module).update({member: getattr(source, member) for member in members})
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module


_add_module("cdf", pdf, "ray_resampling")
_add_module("contraction", _marching, "ContractionType", "contract", "contract_inv")
_cuda = _add_module("cuda", None)
_cuda.is_cub_available, _cuda.__getattr__ = lambda: True, _cuda_getattr
_cuda.ContractionType = _cuda.ContractionTypeGetter = _marching.ContractionType
_add_module("data_specs", _rays, "RayIntervals", "RaySamples")
_add_module("estimators.n3tree", estimators, "N3TreeEstimator")
_add_module("estimators.vdb", estimators, "VDBEstimator", "traverse_vdbs").fVDB_ENABLED = False
_add_module("intersection", grid, "ray_aabb_intersect")
_add_module("losses", volrend, "distortion")
_add_module("pack", _rays, *_rays.__all__).unpack_to_ray_indices = unpack_to_ray_indices
_proposal = _add_module("proposal", estimators.prop_net, "_lossfun_outer", "get_proposal_requires_grad_fn")
_proposal.__getattr__ = partial(_missing, "nerfacc.proposal was in 0.4.0 alone: use nerfacc.PropNetEstimator")
_add_module("version", sys.modules[__name__], "__version__")
_add_module("vol_rendering", volrend, *volrend.__all__)
for _name in ("Grid", "OccupancyGrid", "query_grid"):  # where 0.3 had them
    setattr(grid, _name, getattr(_marching, _name))
