"""Level weights in one pass over the encoding: one program = BLOCK samples of one level.

Encoding fp16/bf16/fp32 with any strides (feature-major from `hash_encode`); the result has its dtype and layout; fp32
inside. The backward is the forward on the gradient. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hash_encode import HashLayout
from ._common import INTERPRETED, CompileCase, check_kernel_float, empty_in_layout_of
from ._grid import level_constants, used_rows
from ._launch import cdiv, launchable

BLOCK, WARPS = 1024 if INTERPRETED else 256, 4


@triton.jit
def _erf(x):
    """The error function of x >= 0, by the rational approximation of Hastings: off by 2e-7 at most."""
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 1.0 - series * tl.exp(-x * x)


@launchable(do_not_specialize=["n"])
def _fade_kernel(
    p_values, p_footprints, p_scales, p_out, p_used, n, strides,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_level = tl.program_id(0) % LEVELS
    i = (tl.program_id(0) // LEVELS) * BLOCK + tl.arange(0, BLOCK)
    m = i < used_rows(p_used, n)
    footprint = tl.maximum(tl.load(p_footprints + i, mask=m, other=1.0), 1e-12)  # at a point no level fades
    weight = _erf(1.0 / (2.8284271 * footprint * tl.load(p_scales + i_level)))
    for f in tl.static_range(F):
        column = (i_level * F + f).to(tl.int64)
        value = tl.load(p_values + i.to(tl.int64) * strides[0] + column * strides[1], mask=m, other=0.0).to(tl.float32)
        p = p_out + i.to(tl.int64) * strides[2] + column * strides[3]
        tl.store(p, tl.where(m, value * weight, 0.0).to(p_out.dtype.element_ty), mask=i < n)


def _run(values: Tensor, footprints: Tensor, layout: HashLayout, n_used: Tensor | None) -> Tensor:
    out, n = empty_in_layout_of(values), values.shape[0]
    if n:
        _, scales = level_constants(layout, values.device)
        _fade_kernel[(cdiv(n, BLOCK) * layout.n_levels,)](
            p_values=values, p_footprints=footprints, p_scales=scales, p_out=out, p_used=n_used, n=n,
            strides=(*values.stride(), *out.stride()), LEVELS=layout.n_levels, F=layout.n_features, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return out


class _FadeLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, encoding: Tensor, footprints: Tensor, layout: HashLayout, n_used: Tensor | None) -> Tensor:
        ctx.save_for_backward(footprints, n_used)
        ctx.layout = layout
        return _run(encoding, footprints, layout, n_used)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        footprints, n_used = ctx.saved_tensors
        return _run(grad, footprints, ctx.layout, n_used), None, None, None  # encoding, footprints, layout, n_used


def fade_levels(encoding: Tensor, footprints: Tensor, layout: HashLayout, *, n_used: Tensor | None) -> Tensor:
    check_kernel_float(encoding=encoding, footprints=footprints)
    return _FadeLevels.apply(encoding, footprints.float().contiguous(), layout, n_used)


def _case(dtype: str, features: int) -> CompileCase:
    signature: dict[str, str | tuple[str, ...]] = {"p_values": f"*{dtype}", "p_out": f"*{dtype}", "n": "i32"}
    signature |= {"p_footprints": "*fp32", "p_scales": "*fp32", "p_used": "*i32", "strides": ("i32",) * 4}
    shape = {"LEVELS": 32 // features, "F": features, "BLOCK": 256}
    return CompileCase(_fade_kernel, signature, shape, WARPS, name=f"{dtype}-{features}")


COMPILE_CASES = [_case("fp16", 2), _case("fp16", 4), _case("fp32", 2)]
