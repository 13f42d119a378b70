"""Specialisations of the kernels of `ops/packed`."""

from __future__ import annotations

from nerfturbo.ops.packed import triton as kernels

from . import CompileCase


def _cases(rays: int, steps: int) -> list[CompileCase]:
    types = "*i32 p_offsets p_counts p_sums p_new_rays p_new_offsets, *u8 p_keep, i32 ray_programs"
    tile, name = {"RAYS": rays, "STEPS": steps, "TAIL": kernels.TAIL_BLOCK}, f"{rays}x{steps}"
    scan, sums = {"EXCLUSIVE": True, "REVERSE": True, **tile}, {"CHANNELS": kernels.CHANNELS, **tile}
    return [
        CompileCase(kernels._sum_kernel, f"{types}, *fp16 p_values", sums, name=name),
        CompileCase(kernels._spread_kernel, f"{types}, *fp16 p_grad", sums, name=name),
        CompileCase(kernels._cumsum_kernel, types, scan, name=name),
        CompileCase(kernels._count_kernel, types, {"GROUP": kernels.GROUP, "STEPS": steps}, name=name),
        CompileCase(kernels._compact_kernel, types, {"CODES": False, **tile}, name=name),
        CompileCase(kernels._compact_kernel, types, {"CODES": True, **tile}, name=f"{name}-codes"),
    ]


COMPILE_CASES = [
    *_cases(4, 8),
    *_cases(1, 32),
    CompileCase(
        kernels._fit_kernel,
        "*i32 p_counts p_sums p_offsets p_kept p_limit, i32 capacity",
        {"GROUP": kernels.GROUP, "BLOCK": kernels.FIT_BLOCK, "WIDE": kernels.WIDE},
        num_warps=8,
    ),
]
