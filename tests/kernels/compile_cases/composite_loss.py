"""Specialisations of the kernels of `ops/composite_loss`."""

from __future__ import annotations

from nerfturbo.ops.composite_loss import triton as kernels

from . import CompileCase


def _cases(rays: int, steps: int) -> list[CompileCase]:
    types, tile = "*i32 p_offsets p_kept, i32 ray_programs", {"RAYS": rays, "STEPS": steps}
    losses = {"HUBER": True, "ALPHA": True, **tile, "TAIL": kernels.TAIL_BLOCK}
    return [
        # ptxas trades a few bytes for more programs at a time
        CompileCase(kernels._loss_kernel, f"{types}, i32x8 strides", losses, max_spills=32, name=f"{rays}x{steps}"),
        CompileCase(kernels._rays_kernel, f"{types}, i32x2 strides, fp32x3 weights", tile, name=f"{rays}x{steps}"),
    ]


COMPILE_CASES = [
    *_cases(4, 8),
    *_cases(1, 32),
    CompileCase(kernels._sum_kernel, "", {"BLOCK": kernels.SUM_BLOCK}, num_warps=8),
    CompileCase(kernels._scale_kernel, "", {"BLOCK": kernels.SCALE_BLOCK}, num_warps=4),
]
