"""The numeric operations, a folder each: `__init__` is the contract (formula, shapes, gradients, errors), `reference`
the same in plain torch, `cpu` numba kernels, `triton` Triton kernels. `_dispatch` chooses.
"""

from ._dispatch import current_backend, use_backend
from ._sink import GradientSink
from .composite import composite, visibility
from .hash_encode import HashLayout, hash_encode
from .intervals import importance_sample
from .march import OccupancyBits, StepRule, march
from .mlp import fused_mlp
from .packed import compact, packed_cumsum, packed_sum
from .positions import ray_aabb
from .random import Stream, random_bits, random_uniform
from .spherical_harmonics import spherical_harmonics

__all__ = ["GradientSink", "HashLayout", "OccupancyBits", "StepRule", "Stream", "compact", "composite"]
__all__ += ["current_backend", "fused_mlp", "hash_encode", "importance_sample", "march", "packed_cumsum", "packed_sum"]
__all__ += ["random_bits", "random_uniform", "ray_aabb", "spherical_harmonics", "use_backend", "visibility"]
