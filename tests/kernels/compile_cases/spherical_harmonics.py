"""Specialisations of the kernels of `ops/spherical_harmonics`."""

from __future__ import annotations

from nerfturbo.ops.spherical_harmonics import triton as kernels

from . import CompileCase

COMPILE_CASES = [
    CompileCase(kernels._forward_kernel, "", {"DEGREE": 4, "BLOCK": kernels.BLOCK}, num_warps=4),
    CompileCase(kernels._backward_kernel, "", {"DEGREE": 4, "BLOCK": kernels.BLOCK}, num_warps=4),
]
