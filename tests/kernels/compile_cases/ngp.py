"""Specialisations of the kernels of `ops/ngp`."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from nerfturbo.ops.ngp import NgpWeights
from nerfturbo.ops.ngp import triton as kernels

from . import CompileCase


def _cases(dtype: str, operand: Any, *, rays: bool = True, loose: bool = False) -> list[CompileCase]:
    shape = {"DE": 32, "DS": 16, "DF": 16, "DH": 64, "PE": 32, "PS": 16, "PF": 16, "PH": 64, "BLOCK": kernels.BLOCK}
    shape |= {"T": operand, "PRECISION": "tf32", "EVEN": True, "PARTIAL": False, "ACTIVATED": not rays, "LOOSE": loose}
    shape |= {"stride_xn": 1, "stride_rn": 1, "stride_ln": 1, "p_ddirections": None}
    shape |= {"p_values": None} if rays else {"p_rays": None}
    shape |= dict.fromkeys(["stride_xc", "stride_c", "stride_rc"], 1 << 18)
    types = f"*{dtype} p_x p_features p_dfeatures, *i32 p_used p_rays"
    name = f"{dtype}{'' if rays else '-own'}"
    if loose:
        return [
            CompileCase(
                kernels._forward_kernel,
                types,
                shape | {"p_features": None},
                kernels.WARPS,
                kernels.STAGES,
                64,
                f"loose-{name}",
            )
        ]
    return [
        CompileCase(kernels._forward_kernel, types, shape, kernels.WARPS, kernels.STAGES, 64, f"forward-{name}"),
        CompileCase(
            kernels._colour_backward_kernel, types, shape, kernels.WARPS, kernels.STAGES, 64, f"colour-backward-{name}"
        ),
    ]


def _wide_case(kernel: Any, name: str, max_spills: int, *absent: str) -> CompileCase:
    like = _cases("fp16", tl.float16)[0].constexprs | _cases("fp16", tl.float16)[1].constexprs
    shape = like | {"DE": 40, "PE": 64, "DH": 128, "PH": 128} | dict.fromkeys(absent)
    types = "*fp16 p_x p_features p_dfeatures, *i32 p_used p_rays"
    return CompileCase(kernel, types, shape, kernels.WARPS, kernels.STAGES, max_spills, name)


def wide_cases() -> list[CompileCase]:
    """Where they fit on the GPU of which `_capability` tells."""
    shapes = [(128, 40), (16, 128), (128, 32), (128, 128), (3, 128)]
    weights = NgpWeights(*(torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes))
    if not kernels.skips_unused(weights[0], weights):
        return []
    return [
        _wide_case(kernels._forward_kernel, "forward-128", 0),
        _wide_case(kernels._colour_backward_kernel, "colour-backward-128-45", 400, "p_g3", "p_dfeatures"),
        _wide_case(kernels._colour_backward_kernel, "colour-backward-128-3", 400, "p_g4", "p_g5"),
    ]


TENSOR_CORE_CASES = [
    *_cases("fp16", tl.float16),
    *_cases("fp16", tl.float16, rays=False),
    *_cases("bf16", tl.bfloat16),
    *_cases("fp16", tl.float16, loose=True),
]


def _encode_case(features: int) -> CompileCase:
    shape = {"LEVELS": 32 // features, "F": features, "BLOCK": kernels.ENCODE_BLOCK, "stride_xn": 1}
    return CompileCase(
        kernels._encode_kernel,
        "*fp16 p_table p_out, *i32 p_levels p_used",
        shape,
        kernels.ENCODE_WARPS,
        name=f"{features}",
    )


COMPILE_CASES = [_encode_case(2), _encode_case(4)]


def _visibility_case(features: int, dtype: str = "fp16", hidden: int = 64, *, thin: bool = False) -> CompileCase:
    operand = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    shape = {"LEVELS": 32 // features, "ROWS": 32 // features, "F": features, "DH": hidden, "PH": hidden}
    shape |= {
        "T": operand,
        "PRECISION": "tf32",
        "SLOTS": kernels.SLOTS,
        "STEPS": kernels.STEPS,
        "MAX_LOGIT": kernels.MAX_LOGIT,
    }
    shape |= {"p_keep": None} if thin else {"p_optical": None}
    types = f"*{dtype} p_table, *i32 p_counters p_list p_levels, *u8 p_keep, fp32x6 box"
    name = f"visible-{dtype}-{features}-{hidden}{'-thin' if thin else ''}"
    return CompileCase(kernels._visible_kernel, types, shape, kernels.VISIBILITY_WARPS, name=name)


COMPILE_CASES += [
    CompileCase(
        kernels._list_kernel, "*i32 p_offsets p_counters p_list", {"LONG": kernels.LONG, "BLOCK": kernels.LIST_BLOCK}, 4
    )
]

TENSOR_CORE_CASES += [
    *(_visibility_case(2), _visibility_case(4), _visibility_case(4, "bf16"), _visibility_case(4, "fp32")),
    *(_visibility_case(4, hidden=128), _visibility_case(4, thin=True)),
]
