"""Specialisations of the kernels of `ops/mlp`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton.language as tl

from nerfturbo.ops.mlp import triton as kernels

from . import CompileCase


def _cases(dtype: str, operand: Any, widths: tuple[int, ...]) -> list[CompileCase]:
    weights = [torch.empty(b, a, device="meta") for a, b in itertools.pairwise(widths)]
    shape = kernels._shape(torch.empty(1, widths[0], device="meta"), weights) | {"T": operand, "PRECISION": "tf32"}
    shape |= {"BLOCK": kernels.BLOCK, "EVEN": True, "PARTIAL": False, "EXPONENTIAL": False}
    shape |= {f"p_{kind}{k}": None for kind in "wg" for k in range(shape["HIDDEN"], 3)}
    shape |= {f"stride_{name}{axis}": step for name in "xyd" for axis, step in (("n", 1), ("c", 1 << 18))}
    types, name = f"*{dtype} p_x p_y p_dy p_dx, *i32 p_used", f"{dtype}-{'-'.join(map(str, widths))}"
    return [
        CompileCase(kernels._forward_kernel, types, shape, 4, kernels.STAGES, name=f"forward-{name}"),
        CompileCase(kernels._backward_kernel, types, shape, 4, kernels.STAGES, name=f"backward-{name}"),
    ]


TENSOR_CORE_CASES = [*_cases("fp16", tl.float16, (32, 64, 16)), *_cases("bf16", tl.bfloat16, (32, 64, 64, 16))]


def _mask_case(dtype: str, mask: bool) -> CompileCase:
    sizes = {"WIDTH": 256, "ROWS": kernels.ROWS, "COLS": kernels.COLS, "MASK": mask, "PARTIAL": False}
    sizes |= {"stride_g": 256, "stride_h": 256, "stride_o": 256}
    sizes |= {} if mask else {"p_hidden": None, "p_out": None}
    return CompileCase(
        kernels._mask_kernel, f"*{dtype} p_grad p_hidden p_out", sizes, kernels.WARPS, name=f"mask-{dtype}-{mask}"
    )


COMPILE_CASES = [_mask_case(dtype, mask) for dtype in ("fp16", "bf16", "fp32") for mask in (True, False)]
