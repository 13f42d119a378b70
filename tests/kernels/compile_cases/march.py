"""Specialisations of the kernels of `ops/march`."""

from __future__ import annotations

from nerfturbo.ops.march import triton as kernels

from . import CompileCase


def _cases(cone: bool, levels: int, parts: int) -> list[CompileCase]:
    types = "*i32 p_bits p_n_active p_counts p_sums p_found p_offsets p_out_rays, *i8 p_summary, "
    types += "i32 ray_blocks ray_programs, i32x4 strides, fp32x6 rule, fp32x12 box"
    shape = {"CONE": cone, "LEVELS": levels, "RESOLUTION": 128, "WORDS": 4, "RAYS": kernels.PREPARED, "STEPS": 32}
    shape |= {"PARTS": parts, "GROUP": kernels.GROUP, "TAIL": kernels.TAIL_BLOCK, "FOUND": 64 if parts else 0}
    if not parts:  # a grid that is not summarised, and every ray active
        shape |= dict.fromkeys(("p_summary", "p_n_active", "p_jitter", "p_limits", "p_found"))
    walks = (kernels._prepare_kernel, kernels._count_kernel, kernels._write_kernel)
    return [CompileCase(kernel, types, shape, name=f"{levels} levels") for kernel in walks]


COMPILE_CASES = [
    *_cases(False, 1, 1),
    *_cases(True, 5, 4),
    *_cases(False, 2, 0),
    *(
        CompileCase(
            kernel,
            "*i64 p_cells, *i32 p_density_bits p_counts",
            {"PARTS": kernels.PARTS, "BLOCK": kernels.BLOCK},
            num_warps=4,
        )
        for kernel in (kernels._gather_kernel, kernels._decay_kernel, kernels._maximum_kernel, kernels._sum_kernel)
    ),
    CompileCase(
        kernels._bits_kernel,
        "*i32 p_counts p_bits",
        {"PARTS": kernels.PARTS, "WORDS": kernels.BLOCK // 32},
        num_warps=4,
    ),
]
