"""Specialisations of the kernels of `ops/hash_encode`."""

from __future__ import annotations

from nerfturbo.ops.hash_encode import triton as kernels

from . import CompileCase


def _points(points: int) -> dict[str, int | None]:
    return {"POINTS": points} | ({"p_footprints": None} if points == 1 else {})


def _table_case(
    dtype: str, features: int, runs: bool, pair: bool = True, scale: bool = False, points: int = 1
) -> CompileCase:
    types = f"*fp16 p_grad, *{dtype} p_table, *i32 p_levels p_used, i32 first_level"
    constexprs = {
        "LEVELS": 8,
        "F": features,
        "BLOCK": kernels.RUN_BLOCK if runs else kernels.BLOCK,
        "PAIR": pair,
        "RUNS": runs,
    }
    constexprs |= {"stride_xn": 1, "stride_gn": 1} | ({} if scale else {"p_scale": None}) | _points(points)
    name = f"table-{dtype}-{features}-{'runs' if runs else 'each'}{'' if pair else '-lone'}-{points}"
    return CompileCase(
        kernels._backward_table_kernel, types, constexprs, kernels.RUN_WARPS if runs else kernels.WARPS, name=name
    )


def _forward_case(dtype: str, features: int, points: int = 1) -> CompileCase:
    constexprs = {"LEVELS": 32 // features, "F": features, "BLOCK": kernels.BLOCK} | _points(points)
    constexprs |= {"stride_xn": 1, "stride_xc": 1 << 18, "stride_of": 1 << 18}
    types = f"*i32 p_levels p_used, *{dtype} p_table p_out"
    return CompileCase(
        kernels._forward_kernel, types, constexprs, kernels.WARPS, name=f"forward-{dtype}-{features}-{points}"
    )


COMPILE_CASES = [
    *(_table_case(*kind, runs) for kind in (("fp32", 2), ("fp16", 2), ("fp16", 4)) for runs in (True, False)),
    *(_table_case("fp32", features, runs, pair=False) for features in (2, 4) for runs in (True, False)),
    *(_table_case("i64", 2, runs, pair=False, scale=True) for runs in (True, False)),
    *(_forward_case(dtype, features) for dtype, features in (("fp16", 2), ("fp16", 4), ("bf16", 2), ("fp32", 2))),
    CompileCase(
        kernels._backward_positions_kernel,
        "*i32 p_levels p_used, *fp16 p_table p_grad",
        {"LEVELS": 16, "F": 2, "BLOCK": kernels.BLOCK} | _points(1),
        kernels.WARPS,
        name="positions-fp16",
    ),
    *(_forward_case("fp16", features, 6) for features in (2, 4)),
    *(_table_case("fp16", features, runs, points=6) for features in (2, 4) for runs in (True, False)),
]
