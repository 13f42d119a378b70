"""Specialisations of the kernels of `ops/adam`."""

from __future__ import annotations

from nerfturbo.ops.adam import triton as kernels

from . import CompileCase


def _adam_case(grad: str, skip: bool, scalars: bool = True, parts: int = 0) -> CompileCase:
    constexprs = {"DECAY": 1, "SKIP": skip, "ROWS_OF_4": True, "PARTS": parts, "BLOCK": kernels.BLOCK}
    if not parts:
        constexprs |= {"starts": None, "decays": None}
    if not scalars:
        constexprs |= {"p_grad_scale": None, "p_found_inf": None}
    # For sm_80 the assembler stays at 32 registers for full occupancy and parks two numbers of the fp16 case.
    spills = 8 if grad == "fp16" else 0
    name = f"adam-{grad}{'-skip' if skip else ''}{'' if scalars else '-plain'}{'-parts' if parts else ''}"
    types = f"*fp16 p_half, *{grad} p_grad, *i64 p_step"
    types += f", i32x{parts} starts, fp32x{parts} decays" if parts else ""
    return CompileCase(kernels._adam_kernel, types, constexprs, kernels.WARPS, max_spills=spills, name=name)


COMPILE_CASES = [
    *(_adam_case(grad, skip) for grad in ("fp32", "fp16") for skip in (False, True)),
    _adam_case("fp32", False, scalars=False),
    _adam_case("fp16", True, parts=8),
    CompileCase(kernels._norm_kernel, "", {"BLOCK": kernels.CHECK_BLOCK}, 8, name="norm"),
    CompileCase(
        kernels._record_kernel,
        "*i64 p_step p_totals, *i32 p_active p_rays p_samples p_marched, i32 samples marched max_rays parts length",
        {"COLUMNS": len(kernels.COLUMNS), "MIN_RAYS": kernels.MIN_RAYS, "MAX_GROWTH": kernels.MAX_GROWTH},
    ),
]
