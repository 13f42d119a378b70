"""Specialisations of the kernels of `ops/frame`."""

from __future__ import annotations

from nerfturbo.ops.frame import triton as kernels

from . import CompileCase


def _cases() -> list[CompileCase]:
    types = "*i32 p_queue p_next_queue p_live p_next_live p_used p_spans p_bits p_rays, *i8 p_distance, i32 rows"
    walk = f"{types}, fp32x6 rule unit, fp32x12 box, i32+i32+fp32 limits"
    sizes = {"COLUMNS": 8, "BLOCK": 32, "WINDOW": kernels.WINDOW, "WALKED": float(kernels.WALKED)}
    cases = [
        CompileCase(kernels._absorb_kernel, f"{types}, i32x3 strides", {**sizes, "LOGITS": logits}, name=f"{logits}")
        for logits in (0, 1)
    ]
    for cone, levels, skip in ((False, 1, True), (False, 1, False), (True, 5, True)):
        grid = {"CONE": cone, "LEVELS": levels, "RESOLUTION": 128, "SKIP": skip}
        cases.append(CompileCase(kernels._next_kernel, walk, {**sizes, **grid}, name=f"{levels} {skip}"))
    line = {"STRIDE": 32, "SIDE": 32, "FAR": kernels.FAR, "FIRST": False, "BLOCK": 256}
    cases.append(CompileCase(kernels._distance_kernel, "*i8 p_in p_out", line, num_warps=4))
    grid = {"LEVELS": 1, "RESOLUTION": 128, "WORDS": 4}
    cases.append(CompileCase(kernels._summary_kernel, "*i32 p_bits, *i8 p_summary", grid))
    cases.append(CompileCase(kernels._finish_kernel, "", {"COLUMNS": 8, "BLOCK": kernels.FINISH_BLOCK}, num_warps=4))
    return cases


COMPILE_CASES = _cases()
