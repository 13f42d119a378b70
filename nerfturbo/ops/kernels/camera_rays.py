"""Rays of a picture in one launch: one program = BLOCK pixels. fp32, no atomics."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ._common import CompileCase
from ._launch import cdiv, launchable

BLOCK = 256


@launchable(do_not_specialize=["n_rays", "width"])
def _rays_kernel(p_camera, p_origins, p_directions, n_rays, width, BLOCK: tl.constexpr):
    i_ray = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_ray = i_ray < n_rays
    row = i_ray // width
    x = ((i_ray - row * width).to(tl.float32) + 0.5 - tl.load(p_camera + 14)) / tl.load(p_camera + 12)
    y = (row.to(tl.float32) + 0.5 - tl.load(p_camera + 15)) / tl.load(p_camera + 13)
    d0 = tl.load(p_camera) * x - tl.load(p_camera + 1) * y - tl.load(p_camera + 2)
    d1 = tl.load(p_camera + 4) * x - tl.load(p_camera + 5) * y - tl.load(p_camera + 6)
    d2 = tl.load(p_camera + 8) * x - tl.load(p_camera + 9) * y - tl.load(p_camera + 10)
    length = 1.0 / tl.sqrt(d0 * d0 + d1 * d1 + d2 * d2)
    i_first = i_ray.to(tl.int64) * 3
    tl.store(p_directions + i_first, d0 * length, mask=m_ray)
    tl.store(p_directions + i_first + 1, d1 * length, mask=m_ray)
    tl.store(p_directions + i_first + 2, d2 * length, mask=m_ray)
    for axis in tl.static_range(3):
        origin = tl.load(p_camera + 4 * axis + 3) + tl.zeros([BLOCK], tl.float32)
        tl.store(p_origins + i_first + axis, origin, mask=m_ray)


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    n_rays = width * height
    origins, directions = torch.empty(2, n_rays, 3, dtype=torch.float32, device=camera.device)
    if n_rays:
        _rays_kernel[(cdiv(n_rays, BLOCK),)](camera.contiguous(), origins, directions, n_rays, width, BLOCK=BLOCK)
    return origins, directions


COMPILE_CASES = [
    CompileCase(
        _rays_kernel,
        {"p_camera": "*fp32", "p_origins": "*fp32", "p_directions": "*fp32", "n_rays": "i32", "width": "i32"},
        {"BLOCK": BLOCK},
        num_warps=4,
    )
]
