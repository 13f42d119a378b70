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
from ..contraction import Contraction
from ._common import CompileCase
from ._contraction import FOLDS, fold_unit
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
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_sample = i_sample < capacity
    b_middle = 0.5 * (
        tl.load(p_starts + i_sample, mask=m_sample, other=0.0) + tl.load(p_ends + i_sample, mask=m_sample, other=0.0)
    )
    i_ray = tl.load(p_rays + i_sample, mask=m_sample, other=0) * 3
    p_o, p_d = p_origins + i_ray, p_directions + i_ray
    x = tl.load(p_o, mask=m_sample, other=0.0) + b_middle * tl.load(p_d, mask=m_sample, other=0.0)
    y = tl.load(p_o + 1, mask=m_sample, other=0.0) + b_middle * tl.load(p_d + 1, mask=m_sample, other=0.0)
    z = tl.load(p_o + 2, mask=m_sample, other=0.0) + b_middle * tl.load(p_d + 2, mask=m_sample, other=0.0)
    x, y, z = fold_unit((x - low_x) * scale_x, (y - low_y) * scale_y, (z - low_z) * scale_z, FOLD)
    p = p_positions + i_sample
    tl.store(p, x, mask=m_sample)
    tl.store(p + capacity.to(tl.int64), y, mask=m_sample)
    tl.store(p + 2 * capacity.to(tl.int64), z, mask=m_sample)


def _launch(
    origins: Tensor, directions: Tensor, samples: PackedSamples, box: tuple[float, ...], contraction: str
) -> Tensor:
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
            FOLD=FOLDS[contraction],
            BLOCK=BLOCK,
        )
    return positions.t()


class _SamplePositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        origins: Tensor,
        directions: Tensor,
        samples: PackedSamples,
        box: tuple[float, ...],
        contraction: str,
    ) -> Tensor:
        ctx.samples, ctx.box = samples, box
        return _launch(origins, directions, samples, box, contraction)

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
            None,  # contraction: there is none where gradients are asked for
        )


def sample_positions(
    origins: Tensor, directions: Tensor, samples: PackedSamples, *, aabb: Aabb | None, contraction: Contraction = "none"
) -> Tensor:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, 3)
    box = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0) if aabb is None else (*aabb.low, *(1.0 / size for size in aabb.size))
    rays = origins.float(), directions.float()
    return _SamplePositions.apply(*rays, samples, box, contraction)  # type: ignore[no-any-return]


_FLOATS = dict.fromkeys(("low_x", "low_y", "low_z", "scale_x", "scale_y", "scale_z"), "fp32")
_POINTERS = dict.fromkeys(("p_origins", "p_directions", "p_starts", "p_ends", "p_positions"), "*fp32")
COMPILE_CASES = [
    CompileCase(
        _positions_kernel,
        {**_POINTERS, "p_rays": "*i32", "capacity": "i32", **_FLOATS},
        {"FOLD": fold, "BLOCK": BLOCK},
        num_warps=4,
        name=contraction,
    )
    for contraction, fold in FOLDS.items()
]
