"""Specialisations of the kernels of `ops/positions`."""

from __future__ import annotations

from nerfturbo.ops.positions import triton as kernels

from . import CompileCase

COMPILE_CASES = [
    CompileCase(kernels._aabb_kernel, "fp32x6 box", {"BLOCK": kernels.BOX_BLOCK}, num_warps=4),
    *(
        CompileCase(
            kernels._positions_kernel,
            "fp32x6 box, *i32 p_rays, i32 capacity",
            {"FOLD": fold, "BLOCK": kernels.BLOCK},
            4,
            name=contraction,
        )
        for contraction, fold in kernels.FOLDS.items()
    ),
    *(
        CompileCase(
            kernels._cone_kernel,
            f"fp32x6 box, fp32x{len(kernels._CONE)} cone, *i32 p_rays, i32 capacity",
            {"FOLD": fold, "POINTS": points, "BLOCK": kernels.CONE_BLOCK},
            4,
            name=f"{contraction}-{points}",
        )
        for contraction, fold, points in (("cube", 2, 1), ("cube", 2, 6), ("sphere", 1, 6), ("none", 0, 6))
    ),
]
