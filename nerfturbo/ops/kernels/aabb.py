"""The slab test: one program intersects BLOCK rays with a box. Inputs fp16/bf16/fp32 with any strides, fp32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Aabb
from ._common import CompileCase, check_kernel_float
from ._launch import cdiv, launchable

BLOCK = 256


@triton.jit
def slab(origin, direction, low, high):
    """t where a ray enters and leaves the space between two parallel faces."""
    tiny = 1.1754943508222875e-38
    safe = tl.where(tl.abs(direction) < tiny, tiny, direction)  # 0 * inf = NaN on the face itself
    first = tl.div_rn(low - origin, safe)
    second = tl.div_rn(high - origin, safe)
    return tl.minimum(first, second), tl.maximum(first, second)


@triton.jit
def box_interval(ox, oy, oz, dx, dy, dz, low_x, low_y, low_z, high_x, high_y, high_z, near, far):
    """t_min, t_max inside the box and between near and far; both near for rays that miss or hold a NaN."""
    x0, x1 = slab(ox, dx, low_x, high_x)
    y0, y1 = slab(oy, dy, low_y, high_y)
    z0, z1 = slab(oz, dz, low_z, high_z)
    t_min = tl.minimum(tl.maximum(tl.maximum(tl.maximum(x0, y0), z0), near), far)
    t_max = tl.minimum(tl.maximum(tl.minimum(tl.minimum(x1, y1), z1), near), far)
    total = ox + oy + oz + dx + dy + dz  # tl.minimum drops NaN
    hit = (t_max > t_min) & (total == total)
    return tl.where(hit, t_min, near), tl.where(hit, t_max, near)


@triton.jit
def load_xyz(p, i, stride_row, stride_column, m):
    row = p + i.to(tl.int64) * stride_row
    x = tl.load(row, mask=m, other=0.0).to(tl.float32)
    y = tl.load(row + stride_column, mask=m, other=0.0).to(tl.float32)
    z = tl.load(row + 2 * stride_column, mask=m, other=0.0).to(tl.float32)
    return x, y, z


@launchable(do_not_specialize=["n_rays"])
def _aabb_kernel(
    p_origins, p_directions, p_t_min, p_t_max, n_rays,
    stride_origins, stride_origins_axis, stride_directions, stride_directions_axis,
    low_x, low_y, low_z, high_x, high_y, high_z, near, far, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n_rays
    ox, oy, oz = load_xyz(p_origins, i, stride_origins, stride_origins_axis, m)
    dx, dy, dz = load_xyz(p_directions, i, stride_directions, stride_directions_axis, m)
    t_min, t_max = box_interval(
        ox, oy, oz, dx, dy, dz, low_x, low_y, low_z, high_x, high_y, high_z, near, far
    )  # fmt: skip
    tl.store(p_t_min + i, t_min, mask=m)
    tl.store(p_t_max + i, t_max, mask=m)


def ray_aabb(origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float, far: float) -> tuple[Tensor, Tensor]:
    check_kernel_float(origins=origins, directions=directions)
    n_rays = origins.shape[0]
    t_min = torch.empty(n_rays, dtype=origins.dtype, device=origins.device)
    t_max = torch.empty_like(t_min)
    if n_rays:
        _aabb_kernel[(cdiv(n_rays, BLOCK),)](
            origins.detach(), directions.detach(), t_min, t_max, n_rays, *origins.stride(), *directions.stride(),
            *aabb.low, *aabb.high, near, far, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return t_min, t_max


COMPILE_CASES = [
    CompileCase(
        _aabb_kernel,
        {"p_origins": "*fp32", "p_directions": "*fp32", "p_t_min": "*fp32", "p_t_max": "*fp32", "n_rays": "i32"}
        | dict.fromkeys(("stride_origins", "stride_origins_axis", "stride_directions", "stride_directions_axis"), "i32")
        | dict.fromkeys(("low_x", "low_y", "low_z", "high_x", "high_y", "high_z", "near", "far"), "fp32"),
        {"BLOCK": BLOCK},
        num_warps=4,
    )
]
