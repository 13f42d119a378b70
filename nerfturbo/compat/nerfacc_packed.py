"""nerfacc 0.2: `nerfturbo.compat.nerfacc`, but `ray_marching` returns `packed_info` (n_rays, 2) int32 first."""

from functools import wraps
from typing import Any

from torch import Tensor

from . import nerfacc
from .nerfacc import *  # noqa: F403 # pyright: ignore

__version__ = "0.2.4"


@wraps(nerfacc.ray_marching)
def ray_marching(rays_o: Tensor, rays_d: Tensor, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
    indices, t_starts, t_ends = nerfacc.ray_marching(rays_o, rays_d, *args, **kwargs)
    return nerfacc.pack_info(indices, rays_o.shape[0]).int(), t_starts, t_ends
