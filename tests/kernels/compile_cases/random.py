"""Specialisations of the kernels of `ops/random`."""

from __future__ import annotations

from nerfturbo.ops.random import triton as kernels

from . import CompileCase

_WORDS = "*i64 p_step, i32 first step stream seed_low seed_high"

COMPILE_CASES = [
    CompileCase(kernels._random_kernel, _WORDS, {"COLUMNS": 4, "UNIFORM": True, "BLOCK": kernels.BLOCK}, num_warps=4),
    CompileCase(
        kernels._random_kernel,
        f"{_WORDS}, *i32 p_out",
        {"p_step": None, "COLUMNS": 1, "UNIFORM": False, "BLOCK": kernels.BLOCK},
        num_warps=4,
        name="host step",
    ),
]
