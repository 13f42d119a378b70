"""Specialisations of the kernels of `ops/mlp`."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from nerfturbo.ops.mlp import triton as kernels

from . import CompileCase

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _absent(tensors: list[Any], kind: str) -> dict[str, None]:
    """Pointers of None: of layers that a network does not have or a launch leaves out."""
    names = (f"p_{kind}0", f"p_{kind}1", f"p_{kind}2", "p_last" if kind == "w" else f"p_{kind}l")
    return {name: None for name, tensor in kernels._pointers(tensors, names).items() if tensor is None}


def _cases(dtype: str, widths: tuple[int, ...], max_spills: int = 0) -> list[CompileCase]:
    """All launches of a network, where it fits."""
    x = torch.empty(kernels.ROUND, widths[0], dtype=DTYPES[dtype], device="meta")
    weights = [torch.empty(b, a, device="meta") for a, b in itertools.pairwise(widths)]
    if not kernels.fits(weights, x.dtype, x.device):
        return []
    tile = kernels._tile(x, weights, True)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    shape = kernels._shape(x, weights) | tile | _absent(weights, "w")
    shape |= {"T": kernels._OPERANDS[x.dtype], "PRECISION": "tf32", "PARTIAL": False, "EXPONENTIAL": False}
    shape |= {f"stride_{name}{axis}": step for name in "xyd" for axis, step in (("n", 1), ("c", 1 << 18))}
    types, name = f"*{dtype} p_x p_y p_dy p_dx, *i32 p_used", f"{dtype}-{'-'.join(map(str, widths))}"
    cases = [CompileCase(kernels._forward_kernel, types, shape, warps, stages, max_spills, f"forward-{name}")]
    groups = kernels._groups(tuple(w.shape for w in weights), (True,) * len(weights), kernels.SUMS_IN_REGISTERS[warps])
    for group in groups:
        own = shape | _absent([w if k in group else None for k, w in enumerate(weights)], "g")
        own |= {} if group is groups[-1] else {"p_dx": None}
        label = f"backward{''.join(map(str, group))}-{name}"
        cases.append(CompileCase(kernels._backward_kernel, types, own, warps, stages, max_spills, label))
    return cases


TENSOR_CORE_CASES = [*_cases("fp16", (32, 64, 16)), *_cases("bf16", (32, 64, 64, 16))]
# Around the limits of one GPU or another: on some a tile of 128 rows fits, on some one of 64, on some none.
EDGES = [("fp16", (40, 128, 16)), ("fp16", (128, 128, 16)), ("fp16", (128, 128, 128)), ("fp16", (128, 16, 128))]
EDGES += [("fp32", (32, 128, 16)), ("fp32", (128, 64, 16))]


def wide_cases() -> list[CompileCase]:
    """Those that fit on the GPU of which `_capability` tells."""
    return [case for dtype, widths in EDGES for case in _cases(dtype, widths, 400)]


def _mask_case(dtype: str, mask: bool) -> CompileCase:
    sizes = {"WIDTH": 256, "ROWS": kernels.ROWS, "COLS": kernels.COLS, "MASK": mask, "PARTIAL": False}
    sizes |= {"stride_g": 256, "stride_h": 256, "stride_o": 256}
    sizes |= {} if mask else {"p_hidden": None, "p_out": None}
    return CompileCase(
        kernels._mask_kernel, f"*{dtype} p_grad p_hidden p_out", sizes, kernels.WARPS, name=f"mask-{dtype}-{mask}"
    )


COMPILE_CASES = [_mask_case(dtype, mask) for dtype in ("fp16", "bf16", "fp32") for mask in (True, False)]
