"""The numeric operations. A file here is a contract: what is computed, shapes, gradients, errors.

`reference/` holds the truth in plain torch, `cpu/` numba kernels, `kernels/` Triton kernels; `_dispatch` chooses.
"""

from ._dispatch import current_backend, use_backend
from ._sink import GradientSink
from .aabb import ray_aabb
from .composite import composite, visibility
from .fused_mlp import fused_mlp
from .hash_encode import HashLayout, hash_encode
from .importance import importance_sample
from .march import OccupancyBits, StepRule, march
from .packed import compact, packed_cumsum, packed_sum
from .random import Stream, random_bits, random_uniform
from .spherical_harmonics import spherical_harmonics

__all__ = [
    "GradientSink",
    "HashLayout",
    "OccupancyBits",
    "StepRule",
    "Stream",
    "compact",
    "composite",
    "current_backend",
    "fused_mlp",
    "hash_encode",
    "importance_sample",
    "march",
    "packed_cumsum",
    "packed_sum",
    "random_bits",
    "random_uniform",
    "ray_aabb",
    "spherical_harmonics",
    "use_backend",
    "visibility",
]
