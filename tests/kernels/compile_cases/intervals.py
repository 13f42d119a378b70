"""Specialisations of the kernels of `ops/intervals`."""

from __future__ import annotations

from nerfturbo.ops.intervals import triton as kernels

from . import CompileCase

COMPILE_CASES = [
    *(
        CompileCase(
            kernels._place_kernel, "fp32x6 box", {"SPACING": w, "FOLD": f, "BLOCK": kernels.BLOCK}, 4, name=f"{w}-{f}"
        )
        for w, f in ((0, 0), (1, 1), (2, 2))
    ),
    CompileCase(kernels._weights_kernel, "", {"RAYS": 1, "STEPS": 32}),
    CompileCase(kernels._gradient_kernel, "", {"RAYS": 1, "STEPS": 32, "stride_bin": 1}),
    CompileCase(kernels._cumulate_kernel, "i32x4 strides", {"RAYS": 1, "STEPS": 32}),
    CompileCase(kernels._invert_kernel, "i32x4 strides, i32 search", {"BLOCK": kernels.DRAW_BLOCK}, num_warps=4),
]
