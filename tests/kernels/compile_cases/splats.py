"""Specialisations of the kernels of `export/splats`."""

from __future__ import annotations

from nerfturbo.export.splats import triton as kernels

from . import CompileCase

TYPES, SHAPE = "*i64 p_ends p_stops, i32 width height", {"TILE": kernels.TILE, "GROUP": kernels.GROUP}
COMPILE_CASES = [
    CompileCase(kernels._forward_kernel, TYPES, SHAPE, kernels.WARPS[0]),
    CompileCase(kernels._backward_kernel, TYPES, SHAPE, kernels.WARPS[1]),
]
