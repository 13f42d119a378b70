"""Sample positions in Triton.

One program = BLOCK samples; a sample gathers its ray. The result is stored (3, capacity), handed out transposed, so
that the encoder reads each axis in one stride. Inputs fp32; no atomics forward. The backward to rays, which only camera
refinement asks for, is a sum over each ray's samples.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...types import Aabb, PackedSamples
from ._common import CompileCase
from ._launch import cdiv, launchable
from .packed import packed_sum

BLOCK = 512


@launchable(do_not_specialize=["capacity"])
def _positions_kernel(
    p_origins,
    p_directions,
    p_starts,
    p_ends,
    p_rays,
    p_positions,
    capacity,
    low_x,
    low_y,
    low_z,
    scale_x,
    scale_y,
    scale_z,
    BLOCK: tl.constexpr,
):
    i_sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_sample = i_sample < capacity
    b_middle = 0.5 * (
        tl.load(p_starts + i_sample, mask=m_sample, other=0.0) + tl.load(p_ends + i_sample, mask=m_sample, other=0.0)
    )
    i_ray = tl.load(p_rays + i_sample, mask=m_sample, other=0) * 3
    for axis in tl.static_range(3):
        low = low_x if axis == 0 else (low_y if axis == 1 else low_z)
        scale = scale_x if axis == 0 else (scale_y if axis == 1 else scale_z)
        b_origin = tl.load(p_origins + i_ray + axis, mask=m_sample, other=0.0)
        b_direction = tl.load(p_directions + i_ray + axis, mask=m_sample, other=0.0)
        b_position = (b_origin + b_middle * b_direction - low) * scale
        tl.store(p_positions + axis * capacity.to(tl.int64) + i_sample, b_position, mask=m_sample)


def _launch(origins: Tensor, directions: Tensor, samples: PackedSamples, box: tuple[float, ...]) -> Tensor:
    capacity = samples.capacity
    positions = torch.empty((3, capacity), device=origins.device, dtype=torch.float32)
    if capacity:
        _positions_kernel[(cdiv(capacity, BLOCK),)](
            origins.contiguous(),
            directions.contiguous(),
            samples.t_starts,
            samples.t_ends,
            samples.ray_indices,
            positions,
            capacity,
            *box,
            BLOCK=BLOCK,
        )
    return positions.t()


class _SamplePositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, origins: Tensor, directions: Tensor, samples: PackedSamples, box: tuple[float, ...]
    ) -> Tensor:
        ctx.samples, ctx.box = samples, box
        return _launch(origins, directions, samples, box)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        samples = ctx.samples
        per_sample = torch.stack([grad[:, axis].float() * ctx.box[3 + axis] for axis in range(3)], dim=-1)
        along = per_sample * samples.midpoints()[:, None]
        return (
            packed_sum(per_sample.contiguous(), samples.offsets),
            packed_sum(along.contiguous(), samples.offsets),
            None,  # samples
            None,  # box
        )


def sample_positions(origins: Tensor, directions: Tensor, samples: PackedSamples, *, aabb: Aabb | None) -> Tensor:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, 3)
    box = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0) if aabb is None else (*aabb.low, *(1.0 / size for size in aabb.size))
    return _SamplePositions.apply(origins.float(), directions.float(), samples, box)  # type: ignore[no-any-return]


_FLOATS = dict.fromkeys(("low_x", "low_y", "low_z", "scale_x", "scale_y", "scale_z"), "fp32")
_POINTERS = dict.fromkeys(("p_origins", "p_directions", "p_starts", "p_ends", "p_positions"), "*fp32")
COMPILE_CASES = [
    CompileCase(
        _positions_kernel,
        {**_POINTERS, "p_rays": "*i32", "capacity": "i32", **_FLOATS},
        {"BLOCK": BLOCK},
        num_warps=4,
    )
]
