"""Specialisations of the kernels of `ops/voxels`."""

from __future__ import annotations

from nerfturbo.ops.voxels import triton as kernels

from . import CompileCase

_TYPES = "*i32 p_rays p_blocks p_rows p_used, i32 resolution side"

_WIDTHS = {"K": 9, "C": 28, "PC": 32}

_STRIDES = {"stride_xn": 1, "stride_xc": 1 << 18, "stride_gn": 1, "stride_gc": 1 << 18, "BLOCK": kernels.BLOCK}

COMPILE_CASES = [
    *(
        CompileCase(kernel, f"{_TYPES}, *fp16 p_color", _WIDTHS | _STRIDES, kernels.WARPS)
        for kernel in (kernels._forward_kernel, kernels._backward_kernel, kernels._inputs_kernel)
    ),
    CompileCase(kernels._density_kernel, _TYPES, {"BLOCK": kernels.DENSITY_BLOCK}, kernels.WARPS),
]
